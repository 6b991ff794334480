//! `aenv-image`: converts one OCI layer to an overlaybd layer, writes a disk's files as a tar, or checks a disk.
//!
//! A worker process of the server, one conversion each. The result is one line of JSON on standard output (of `dump` to
//! standard output: on standard error). Progress is lines of JSON on standard error, `{"done_bytes","total_bytes"}`, and the
//! last line of a failure there is `{"error":{"kind","message"}}`. Exit status 0, 1 (failed) or 2 (not understood).

mod args;

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use aenv_image::{Kind, Partial, Request, Source};
use serde_json::{Value, json};

use crate::args::Command;

const EXIT_USAGE: u8 = 2;
/// At most five lines of progress a second.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);
const WRITE_BYTES: usize = 1 << 20;

/// What ended a command, ready to be told.
struct Failure(Value);

impl<E: Kind> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut told = json!({ "kind": error.kind(), "message": chain(&error) });
        if let Some(bytes) = error.missing_bytes() {
            told["missing_bytes"] = bytes.into();
        }
        Failure(told)
    }
}

fn main() -> ExitCode {
    let command = match args::parse(std::env::args_os().skip(1)) {
        Ok(command) => command,
        Err(error) => {
            eprintln!("aenv-image: {error}\n{}", args::USAGE);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if !end_with_parent() {
        return ExitCode::FAILURE;
    }
    if let Err(error) = aenv_image::clean_up_on_signals() {
        eprintln!(
            "{}",
            json!({ "error": { "kind": "io", "message": format!("cannot wait for signals: {error}") } })
        );
        return ExitCode::FAILURE;
    }
    let outcome = match command {
        Command::Apply(request) => apply(&request),
        Command::Dump { source, out } => dump(&source, out.as_deref()),
        Command::Check {
            layers,
            size_bytes,
            scratch,
        } => check(layers, size_bytes, scratch),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure(error)) => {
            eprintln!("{}", json!({ "error": error }));
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

fn apply(request: &Request) -> Result<(), Failure> {
    let total = request
        .tar
        .as_ref()
        .and_then(|path| path.metadata().ok())
        .map(|metadata| metadata.len());
    let mut last = Instant::now();
    let report = aenv_image::apply(request, &mut |done| {
        if last.elapsed() >= PROGRESS_EVERY {
            eprintln!("{}", json!({ "done_bytes": done, "total_bytes": total }));
            last = Instant::now();
        }
    })?;
    println!(
        "{}",
        json!({
            "layer": request.out.to_string_lossy(),
            "data_bytes": report.data_bytes,
            "files": report.files,
            "whiteouts": report.whiteouts,
            "skipped_attributes": report.skipped_attributes,
            "diff_id": report.digests.diff_id.to_string(),
            "blob_digest": report.digests.blob.to_string(),
        })
    );
    Ok(())
}

fn dump(source: &Source, out: Option<&Path>) -> Result<(), Failure> {
    let Some(out) = out else {
        let report = aenv_image::dump(source, BufWriter::with_capacity(WRITE_BYTES, io::stdout().lock()))?;
        eprintln!("{}", dump_report(&report, Path::new("-")));
        return Ok(());
    };
    let partial = Partial::beside(out);
    let file = File::create_new(partial.path()).map_err(aenv_image::DumpError::Write)?;
    let report = aenv_image::dump(source, BufWriter::with_capacity(WRITE_BYTES, file))?;
    partial.publish(out).map_err(aenv_image::DumpError::Write)?;
    println!("{}", dump_report(&report, out));
    Ok(())
}

fn dump_report(report: &aenv_image::DumpReport, out: &Path) -> Value {
    json!({
        "tar": out.to_string_lossy(),
        "files": report.files,
        "content_bytes": report.content_bytes,
        "skipped_sockets": report.skipped_sockets,
        "skipped_attributes": report.skipped_attributes,
    })
}

fn check(layers: Vec<PathBuf>, size_bytes: Option<u64>, scratch: PathBuf) -> Result<(), Failure> {
    let said = aenv_image::check(layers, size_bytes, scratch)?;
    println!("{}", json!({ "ok": true, "e2fsck": said }));
    Ok(())
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
