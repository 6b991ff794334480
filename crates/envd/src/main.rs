//! aenv-envd: the daemon inside a sandbox.
//!
//! As PID 1 of a microVM it brings the guest up and serves E2B's envd protocol on port 49983; with
//! `--serve [--port N]` it serves on a plain machine, for tests. No options as PID 1: the kernel command line
//! speaks (see `boot::cmdline`).
//!
//! Build, always static, since images may hold no libraries:
//! ```text
//! RUSTFLAGS="-C target-feature=+crt-static" \
//!     cargo build --release -p aenv-envd --target x86_64-unknown-linux-gnu
//! ```
//! The binary is then in `$CARGO_TARGET_DIR/x86_64-unknown-linux-gnu/release/aenv-envd`.
//!
//! Everything runs on one thread, so shared state needs no locks; file work goes to a few blocking threads.

mod auth;
mod boot;
mod connect;
mod daemon;
mod files;
mod http;
mod identity;
mod image;
mod init;
mod json;
mod metrics;
mod process;
mod rpc;
mod settings;
mod users;

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use daemon::{Daemon, Machine};

/// The port that the clients know.
const PORT_DEFAULT: u16 = 49983;

/// Threads for file work and starts; each may hang on a dead file system in the guest.
const BLOCKING_THREADS_MAX: usize = 32;
const BLOCKING_STACK_BYTES: usize = 512 << 10;
const BLOCKING_IDLE: Duration = Duration::from_secs(30);

const USAGE: &str = "usage: aenv-envd --serve [--port N]   (or PID 1 of a microVM)";

fn main() -> ExitCode {
    bound_malloc();
    if std::process::id() == 1 {
        let entered = uptime();
        if let Err(error) = boot::run() {
            let source = std::error::Error::source(&error)
                .map(|source| format!(": {source}"))
                .unwrap_or_default();
            boot::say(&format!("boot failed: {error}{source}"));
            boot::power::give_up();
        }
        return finish(serve(Machine::Guest, Ipv4Addr::UNSPECIFIED, PORT_DEFAULT, entered));
    }
    match parse_arguments() {
        Some(port) => finish(serve(Machine::Host, Ipv4Addr::LOCALHOST, port, uptime())),
        None => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Memory that this daemon touches becomes part of every snapshot: large blocks go back to the kernel when
/// freed, and threads share one arena.
fn bound_malloc() {
    // SAFETY: called before any other thread exists; the parameters are documented values.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Since the kernel started; the console line for the operator tells how long the boot took.
fn uptime() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(time).unwrap_or_default()
}

/// The port of `--serve`, `None` when the arguments are wrong.
fn parse_arguments() -> Option<u16> {
    let mut arguments = std::env::args().skip(1);
    let (mut serve, mut port) = (false, PORT_DEFAULT);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--serve" => serve = true,
            "--port" => port = arguments.next()?.parse().ok()?,
            _ => return None,
        }
    }
    serve.then_some(port)
}

fn finish(result: std::io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("envd: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until the end of the process; an error is one of the start.
fn serve(machine: Machine, address: Ipv4Addr, port: u16, entered: Duration) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .thread_stack_size(BLOCKING_STACK_BYTES)
        .thread_keep_alive(BLOCKING_IDLE)
        .build()?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let daemon = Rc::new(Daemon::new(machine));
        let listener = http::server::listen(address, port)?;
        // Whoever waits for this line may connect: the socket is listening.
        let (port, now) = (listener.local_addr()?.port(), uptime());
        let (total, own) = (now.as_secs_f64(), now.saturating_sub(entered).as_secs_f64());
        boot::say(&format!(
            "serving on port {port} after {total:.3} s, {own:.3} s of them here"
        ));
        let reaper = process::reaper::run(&daemon.processes);
        let server = http::server::serve(Rc::clone(&daemon), listener);
        if machine == Machine::Guest {
            tokio::select! {
                result = reaper => result,
                () = server => Ok(()),
                result = boot::power::run() => result,
            }
        } else {
            tokio::select! {
                result = reaper => result,
                () = server => Ok(()),
            }
        }
    })
}
