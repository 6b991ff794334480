//! The one place that collects exit statuses.
//!
//! As PID 1 this daemon inherits every orphan, so it must wait for any child; a second waiter for chosen pids
//! would lose the race. One task takes all statuses and hands those of known pids to the registry.

use std::cell::Cell;

use tokio::signal::unix::{SignalKind, signal};

use super::registry::Registry;

thread_local! {
    static OOM_KILLS_SEEN: Cell<u64> = const { Cell::new(0) };
}

/// Runs for the life of the daemon.
pub async fn run(registry: &Registry) -> std::io::Result<()> {
    let mut children = signal(SignalKind::child())?;
    loop {
        collect(registry);
        if children.recv().await.is_none() {
            return Ok(());
        }
    }
}

fn collect(registry: &Registry) {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes one int to a live local.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        match u32::try_from(pid) {
            Ok(pid) if pid > 0 => registry.note_exit(pid, status),
            _ => return,
        }
    }
}

/// Whether the kernel's OOM killer has struck since the last call. Asked only after a SIGKILL that nobody
/// here sent, so the answer names the likely cause and no more.
pub fn oom_kills_have_risen() -> bool {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let count = text
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        .unwrap_or(0);
    OOM_KILLS_SEEN.replace(count) < count
}
