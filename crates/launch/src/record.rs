//! The record of a process: enough to find it again and to know that a reused pid is not it.
//!
//! One line of JSON, `{"pid":N,"start_time_ticks":N,"argv":[...]}`. `start_time_ticks` is field 22 of /proc/PID/stat;
//! it is set at fork and does not change at exec, so the record may be written before exec.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

#[derive(Debug, Serialize)]
pub struct Record<'a> {
    pub pid: u32,
    pub start_time_ticks: u64,
    pub argv: &'a [String],
}

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("cannot read the start time in /proc/self/stat")]
    StartTime(#[source] io::Error),
    #[error("cannot write the record {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl<'a> Record<'a> {
    /// The record of the calling process, which is about to exec `argv`.
    pub fn of_this_process(argv: &'a [String]) -> Result<Self, RecordError> {
        let stat = fs::read_to_string("/proc/self/stat").map_err(RecordError::StartTime)?;
        let start_time_ticks =
            start_time_ticks(&stat).ok_or_else(|| RecordError::StartTime(io::ErrorKind::InvalidData.into()))?;
        Ok(Record {
            pid: std::process::id(),
            start_time_ticks,
            argv,
        })
    }

    /// The JSON line, with its line feed.
    pub fn line(&self) -> String {
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }
}

/// Writes `line` at `path`, so that a reader sees the old content, none, or all of it. Not synced: a record is worth
/// nothing after the machine went down, since the process went with it.
pub fn write(path: &Path, line: &str) -> Result<(), RecordError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    fs::write(&partial, line)
        .and_then(|()| fs::rename(&partial, path))
        .map_err(|source| {
            let _ = fs::remove_file(&partial);
            RecordError::Write {
                path: path.to_owned(),
                source,
            }
        })
}

/// Field 22. The second field is the command in brackets and may hold spaces and brackets: count from its last `)`.
fn start_time_ticks(stat: &str) -> Option<u64> {
    const FIRST_FIELD_AFTER_COMMAND: usize = 3;
    let (_, fields) = stat.rsplit_once(')')?;
    fields
        .split_ascii_whitespace()
        .nth(22 - FIRST_FIELD_AFTER_COMMAND)?
        .parse()
        .ok()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_start_time_is_found_behind_an_odd_command_name() {
        let stat = "7 (a) b) (c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 10 11";
        assert_eq!(start_time_ticks(stat), Some(987_654));
        assert_eq!(start_time_ticks("7 (a) S 1"), None);
    }

    #[test]
    fn the_line_is_the_documented_json() {
        let argv = ["a b".to_owned(), "\"\n".to_owned()];
        let record = Record {
            pid: 7,
            start_time_ticks: 9,
            argv: &argv,
        };
        assert_eq!(
            record.line(),
            "{\"pid\":7,\"start_time_ticks\":9,\"argv\":[\"a b\",\"\\\"\\n\"]}\n"
        );
    }
}
