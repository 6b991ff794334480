//! `aenv-launch`: starts a daemon or VMM that is not our child, and leaves a record by which it is found again.
//!
//! Owns the birth of a process: detaching it from the caller (session, process group, descriptors, signals), its
//! limits and network namespace, and the record that is on disk before the program runs an instruction of its own.
//! Does not own its life: nobody waits for it, restarts it or removes its record.
//!
//! ```text
//! caller -> aenv-launch ---fork--> middle --fork--> program       middle: setsid, then exit, so that the program is
//!               ^                  (exits)             |          adopted by init and leads no session
//!               +------ CLOEXEC pipe: record line, then end of file (exec worked) or the reason (it did not)
//! ```
//!
//! It is a binary of its own because a Python server has threads: forking there is slow and unsafe.

mod args;
mod launch;
mod record;

use std::io::Write;
use std::process::ExitCode;

/// Exit status of a command line that was not understood; a program that could not be started gives 1.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let request = match args::parse(std::env::args_os().skip(1)) {
        Ok(request) => request,
        Err(error) => {
            eprintln!("aenv-launch: {error}\n{}", args::USAGE);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match launch::launch(&request) {
        Ok(line) => {
            // The program runs and its record is on disk: a caller that closed our stdout takes nothing away from that.
            let _ = std::io::stdout().write_all(line.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("aenv-launch: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and all its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text.push_str(": ");
        text.push_str(&source.to_string());
        cause = source.source();
    }
    text
}
