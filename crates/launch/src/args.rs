//! The command line: options up to `--`, then the program and its arguments, which are taken as they are.

use std::ffi::OsString;
use std::path::PathBuf;

pub const USAGE: &str = "usage: aenv-launch --record FILE --log FILE [--netns NAME] [--oom-score-adj N] [--nofile N] \
[--cwd DIR] -- PROGRAM ARGS...";

/// What to start and how.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    pub record: PathBuf,
    pub log: PathBuf,
    pub netns: Option<String>,
    pub oom_score_adj: Option<i32>,
    pub nofile: Option<u64>,
    pub cwd: Option<PathBuf>,
    /// Program and arguments; never empty. UTF-8, because the record is JSON and must name exactly what was started.
    pub argv: Vec<String>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ArgsError {
    #[error("option {0} needs a value")]
    MissingValue(String),
    #[error("option {0} is missing")]
    MissingOption(&'static str),
    #[error("unknown option {0}")]
    UnknownOption(String),
    #[error("{option} is {value:?}, which is not {expected}")]
    BadValue {
        option: &'static str,
        value: String,
        expected: &'static str,
    },
    #[error("no program after --")]
    NoProgram,
    #[error("argument {0:?} is not UTF-8 or holds a NUL byte")]
    NotText(OsString),
}

/// Reads the arguments after the program's own name.
pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Request, ArgsError> {
    let mut arguments = arguments.map(text);
    let (mut record, mut log, mut netns, mut cwd) = (None, None, None, None);
    let (mut oom_score_adj, mut nofile) = (None, None);
    while let Some(option) = arguments.next().transpose()? {
        if option == "--" {
            break;
        }
        let mut value = || {
            arguments
                .next()
                .transpose()?
                .ok_or_else(|| ArgsError::MissingValue(option.clone()))
        };
        match option.as_str() {
            "--record" => record = Some(PathBuf::from(value()?)),
            "--log" => log = Some(PathBuf::from(value()?)),
            "--cwd" => cwd = Some(PathBuf::from(value()?)),
            "--netns" => netns = Some(netns_name(value()?)?),
            "--oom-score-adj" => oom_score_adj = Some(oom_score(value()?)?),
            "--nofile" => nofile = Some(descriptor_limit(value()?)?),
            _ => return Err(ArgsError::UnknownOption(option)),
        }
    }
    let argv = arguments.collect::<Result<Vec<_>, _>>()?;
    Ok(Request {
        record: record.ok_or(ArgsError::MissingOption("--record"))?,
        log: log.ok_or(ArgsError::MissingOption("--log"))?,
        netns,
        oom_score_adj,
        nofile,
        cwd,
        argv: if argv.is_empty() {
            return Err(ArgsError::NoProgram);
        } else {
            argv
        },
    })
}

fn text(argument: OsString) -> Result<String, ArgsError> {
    match argument.into_string() {
        Ok(text) if !text.contains('\0') => Ok(text),
        Ok(text) => Err(ArgsError::NotText(text.into())),
        Err(argument) => Err(ArgsError::NotText(argument)),
    }
}

/// A name, not a path: it must not lead out of /run/netns.
fn netns_name(value: String) -> Result<String, ArgsError> {
    if value.is_empty() || value.contains('/') || value == "." || value == ".." {
        return Err(ArgsError::BadValue {
            option: "--netns",
            value,
            expected: "the name of a network namespace under /run/netns",
        });
    }
    Ok(value)
}

fn oom_score(value: String) -> Result<i32, ArgsError> {
    match value.parse() {
        Ok(score) if (-1000..=1000).contains(&score) => Ok(score),
        _ => Err(ArgsError::BadValue {
            option: "--oom-score-adj",
            value,
            expected: "a whole number from -1000 to 1000",
        }),
    }
}

fn descriptor_limit(value: String) -> Result<u64, ArgsError> {
    match value.parse() {
        // Below 16 the dynamic loader and the C library themselves may fail, with an error that helps nobody.
        Ok(limit) if limit >= 16 => Ok(limit),
        _ => Err(ArgsError::BadValue {
            option: "--nofile",
            value,
            expected: "a number of descriptors of at least 16",
        }),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn parse_words(words: &[&str]) -> Result<Request, ArgsError> {
        parse(words.iter().map(OsString::from))
    }

    #[test]
    fn everything_after_the_dashes_belongs_to_the_program() {
        let request = parse_words(&["--record", "r", "--log", "l", "--", "prog", "--", "--log", ""]);
        assert_eq!(request.unwrap().argv, ["prog", "--", "--log", ""]);
    }

    #[test]
    fn a_missing_option_is_named() {
        assert_eq!(
            parse_words(&["--record", "r", "--", "prog"]),
            Err(ArgsError::MissingOption("--log"))
        );
        assert_eq!(parse_words(&["--record", "r", "--log", "l"]), Err(ArgsError::NoProgram));
        assert_eq!(
            parse_words(&["--record"]),
            Err(ArgsError::MissingValue("--record".into()))
        );
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for (option, value) in [
            ("--netns", "../x"),
            ("--netns", ".."),
            ("--netns", ""),
            ("--oom-score-adj", "1001"),
            ("--oom-score-adj", "x"),
            ("--nofile", "0"),
            ("--nofile", "-1"),
        ] {
            let words = ["--record", "r", "--log", "l", option, value, "--", "prog"];
            assert!(
                matches!(parse_words(&words), Err(ArgsError::BadValue { .. })),
                "{option} {value}"
            );
        }
    }

    #[test]
    fn unknown_options_are_refused() {
        assert_eq!(
            parse_words(&["--what", "r"]),
            Err(ArgsError::UnknownOption("--what".into()))
        );
    }
}
