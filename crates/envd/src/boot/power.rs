//! The end of the machine: on the signals that init programs understand.
//!
//! Always by reboot(2) with RESTART: a microVM has no power button, and its VMM is told not to restart, so
//! that is how it ends.

use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount_remount};
use rustix::process::{Pid, Signal};
use rustix::system::RebootCommand;
use tokio::signal::unix::{SignalKind, signal};

/// How long processes get between SIGTERM and SIGKILL.
const TERM_WAIT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(20);

/// Waits for a signal, then ends the machine; never returns on success.
pub async fn run() -> std::io::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut user2 = signal(SignalKind::user_defined2())?;
    let mut power = signal(SignalKind::from_raw(libc::SIGPWR))?;
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        _ = user2.recv() => {}
        _ = power.recv() => {}
    }
    super::say("going down");
    end_processes().await;
    rustix::fs::sync();
    let _ = mount_remount("/", MountFlags::RDONLY, "");
    rustix::system::reboot(RebootCommand::Restart).map_err(std::io::Error::from)
}

async fn end_processes() {
    signal_all(libc::SIGTERM);
    let until = Instant::now() + TERM_WAIT;
    while signal_all(0) && Instant::now() < until {
        tokio::time::sleep(POLL).await;
    }
    signal_all(libc::SIGKILL);
}

/// Signals every process but this one; `false` when there is none.
fn signal_all(number: i32) -> bool {
    // SAFETY: kill takes no pointers; as PID 1 this process is exempt from -1.
    unsafe { libc::kill(-1, number) == 0 }
}

/// The boot failed: nothing can be served, so the VM ends rather than hangs.
pub fn give_up() -> ! {
    let _ = rustix::process::kill_process(Pid::INIT, Signal::CONT);
    rustix::fs::sync();
    let _ = rustix::system::reboot(RebootCommand::Restart);
    std::process::exit(1)
}
