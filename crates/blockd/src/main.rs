//! aenv-blockd: layered disks and memory images as files on two FUSE mounts.
//!
//! Two processes from one binary. `keeper` owns the mounts and is as small as can be; `serve` does the work. Each
//! watches the other and starts it again, so that guests see a stall of milliseconds when either is killed.

/// One line on stderr. Not `eprintln!`, which ends the process when it cannot write: the log lies on the same disk as the
/// guests' data, and a full one must not take the daemon with it.
macro_rules! say {
    ($($what:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($what)*);
    }};
}

mod arguments;
mod capture;
mod control;
mod export;
mod files;
mod fuse;
mod keeper;
mod limits;
mod process;
mod remote;
mod serve;
mod signals;
mod standing;
mod stats;
mod threads;
mod write_back;

use std::process::ExitCode;

/// Exit codes: what a caller may decide by.
const FAILED: u8 = 1;
const BAD_USAGE: u8 = 2;
const IN_USE: u8 = 3;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("keeper") => match arguments::keeper(arguments) {
            Ok(parsed) => exit("keeper", keeper::run(parsed), |error| {
                matches!(
                    error,
                    keeper::KeeperError::InUse(_) | keeper::KeeperError::CacheInUse(_)
                )
            }),
            Err(error) => bad_usage(&error),
        },
        Some("serve") => match arguments::serve(arguments) {
            Ok(parsed) => exit("serve", serve::run(parsed), |error| {
                matches!(error, serve::ServeError::InUse(_) | serve::ServeError::Cache(_))
            }),
            Err(error) => bad_usage(&error),
        },
        Some("--help" | "-h") => {
            print!("{}", arguments::USAGE);
            ExitCode::SUCCESS
        }
        Some("--version") => {
            println!("aenv-blockd {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        _ => {
            eprint!("{}", arguments::USAGE);
            ExitCode::from(BAD_USAGE)
        }
    }
}

fn exit<E: std::error::Error>(name: &str, outcome: Result<(), E>, in_use: impl Fn(&E) -> bool) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say!("aenv-blockd {name}: {}", control::chain(&error));
            ExitCode::from(if in_use(&error) { IN_USE } else { FAILED })
        }
    }
}

fn bad_usage(error: &dyn std::error::Error) -> ExitCode {
    say!("aenv-blockd: {}", control::chain(error));
    eprint!("{}", arguments::USAGE);
    ExitCode::from(BAD_USAGE)
}
