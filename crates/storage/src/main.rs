//! The program: reads the command line, does one thing, tells the result. See the library.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use aenv_storage::{Command, Failed, Progress, USAGE, chain, compact, digest, get, parse, publish, verify};
use serde::Serialize;
use serde_json::json;

/// Exit status of a command line that was not understood; a command that failed gives 1.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    // A name that is no UTF-8 is not found.
    let arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
    let command = match parse(arguments.skip(1)) {
        Ok(command) => command,
        Err(error) => {
            eprintln!("aenv-storage: {error}\n{USAGE}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if !end_with_parent() {
        return ExitCode::FAILURE;
    }
    match run(&command).and_then(|line| told(&line)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            let error = json!({"error": {"kind": failed.kind(), "message": chain(&failed)}});
            // Without a reader there is nobody to tell.
            let _ = writeln!(std::io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

/// A server that is killed leaves no worker behind. Returns false if it is gone already: `getppid` gives the parent of now,
/// and whoever lost its parent before the call has another.
fn end_with_parent() -> bool {
    let parent = rustix::process::getppid();
    // Without it the worker only ends later, with its work.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM));
    rustix::process::getppid() == parent
}

fn run(command: &Command) -> Result<String, Failed> {
    let progress = Arc::new(Progress::new(std::io::stderr()));
    progress.keep_talking();
    match command {
        Command::Publish(publication) => publish(publication, &progress).map(line),
        Command::Verify(verification) => verify(verification, &progress).map(line),
        Command::Get(fetch) => get(fetch, &progress).map(line),
        Command::Compact { layer, into } => compact(layer, into, &progress).map(line),
        Command::Digest { layer } => digest(layer).map(line),
    }
}

fn line(result: impl Serialize) -> String {
    // Numbers, texts and options: nothing that JSON cannot hold.
    serde_json::to_string(&result).expect("a result is JSON")
}

/// Writes the result. A caller that does not get it must not take the command for done.
fn told(line: &str) -> Result<(), Failed> {
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{line}").and_then(|()| out.flush());
    written.map_err(|source| Failed::File {
        path: "stdout".into(),
        step: "write the result",
        source,
    })
}
