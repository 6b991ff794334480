//! The command line: a command and its options, each with a value but for the few that are switches.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use aenv_layers::Algorithm;
use aenv_store::Digest;

use crate::get::Fetch;
use crate::patience::Patience;
use crate::publish::{Content, Publication, Target};
use crate::verify::{Subject, Verification};

pub const USAGE: &str = "usage:
  aenv-storage publish  --layer FILE (--dir DIR | --store NAME) [--stores FILE] [--prefix layers/] [--suffix .lsmt]
                        [--compress lz4|zstd] [--encrypt] [UPLOAD]
  aenv-storage put-file --file FILE (--dir DIR | --store NAME) [--stores FILE] [--prefix states/] [--suffix .state]
                        [--encrypt] [UPLOAD]
  aenv-storage verify   (--descriptor FILE | --file FILE [--digest HEX]) [--stores FILE] [--content layer|bytes]
  aenv-storage get      (--descriptor FILE | --file FILE [--digest HEX]) --into FILE [--stores FILE]
  aenv-storage compact  --layer FILE --into FILE
  aenv-storage digest   --layer FILE
UPLOAD: [--journal-dir DIR] [--part-bytes 67108864] [--parallel 4] [--deadline-s 600] [--attempt-s 30]
The result is one line of JSON on stdout, progress are lines of JSON on stderr. Status 0: done, 1: failed (the last line
on stderr says why), 2: this command line is wrong.";

/// The store's own limits, and what makes sense in memory: one part for each of `parallel` and one more is held.
const PART_BYTES: std::ops::RangeInclusive<u64> = 8 << 20..=1 << 30;
const PARALLEL: std::ops::RangeInclusive<u64> = 1..=32;
const SECONDS: std::ops::RangeInclusive<u64> = 1..=86_400;
const SWITCHES: [&str; 1] = ["--encrypt"];

/// What to do.
#[derive(Debug)]
pub enum Command {
    Publish(Publication),
    Verify(Verification),
    Get(Fetch),
    Compact { layer: PathBuf, into: PathBuf },
    Digest { layer: PathBuf },
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ArgsError {
    #[error("no command was given")]
    NoCommand,
    #[error("{0} is no command")]
    UnknownCommand(String),
    #[error("option {0} needs a value")]
    MissingValue(String),
    #[error("option {0} is given twice")]
    Twice(String),
    #[error("option {0} is missing")]
    MissingOption(&'static str),
    #[error("{command} has no option {option}")]
    UnknownOption { command: String, option: String },
    #[error("of {0} and {1} exactly one must be given")]
    OneOf(&'static str, &'static str),
    #[error("{option} is {value:?}, which is not {expected}")]
    BadValue {
        option: &'static str,
        value: String,
        expected: String,
    },
}

/// Reads the arguments after the program's own name.
pub fn parse(arguments: impl Iterator<Item = String>) -> Result<Command, ArgsError> {
    let mut arguments = arguments;
    let command = arguments.next().ok_or(ArgsError::NoCommand)?;
    let mut options = Options::read(arguments)?;
    let parsed = match command.as_str() {
        "publish" => Command::Publish(options.publication(true)?),
        "put-file" => Command::Publish(options.publication(false)?),
        "verify" => Command::Verify(options.verification()?),
        "get" => Command::Get(options.fetch()?),
        "compact" => Command::Compact {
            layer: options.needed("--layer")?.into(),
            into: options.needed("--into")?.into(),
        },
        "digest" => Command::Digest {
            layer: options.needed("--layer")?.into(),
        },
        _ => return Err(ArgsError::UnknownCommand(command)),
    };
    match options.0.pop_first() {
        Some((option, _)) => Err(ArgsError::UnknownOption { command, option }),
        None => Ok(parsed),
    }
}

/// What is not taken by a command is unknown to it.
struct Options(BTreeMap<String, String>);

impl Options {
    fn read(mut arguments: impl Iterator<Item = String>) -> Result<Options, ArgsError> {
        let mut options = BTreeMap::new();
        while let Some(option) = arguments.next() {
            let value = match SWITCHES.contains(&option.as_str()) {
                true => String::new(),
                false => arguments
                    .next()
                    .ok_or_else(|| ArgsError::MissingValue(option.clone()))?,
            };
            if options.insert(option.clone(), value).is_some() {
                return Err(ArgsError::Twice(option));
            }
        }
        Ok(Options(options))
    }

    fn take(&mut self, option: &'static str) -> Option<String> {
        self.0.remove(option)
    }

    fn needed(&mut self, option: &'static str) -> Result<String, ArgsError> {
        self.take(option).ok_or(ArgsError::MissingOption(option))
    }

    fn path(&mut self, option: &'static str) -> Option<PathBuf> {
        self.take(option).map(PathBuf::from)
    }

    fn number(
        &mut self,
        option: &'static str,
        default: u64,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<u64, ArgsError> {
        let Some(value) = self.take(option) else {
            return Ok(default);
        };
        let number = value.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| ArgsError::BadValue {
            option,
            value,
            expected: format!("a whole number from {} to {}", range.start(), range.end()),
        })
    }

    fn publication(&mut self, is_layer: bool) -> Result<Publication, ArgsError> {
        let (content, prefix, suffix) = match is_layer {
            true => (Content::Layer(self.needed("--layer")?.into()), "layers/", ".lsmt"),
            false => (Content::File(self.needed("--file")?.into()), "states/", ".state"),
        };
        let target = match (self.path("--dir"), self.take("--store")) {
            (Some(folder), None) => Target::Directory(folder),
            (None, Some(name)) => Target::Store(name),
            _ => return Err(ArgsError::OneOf("--dir", "--store")),
        };
        let compress = if is_layer { self.take("--compress") } else { None };
        Ok(Publication {
            content,
            target,
            stores: self.path("--stores"),
            prefix: self.take("--prefix").unwrap_or(prefix.into()),
            suffix: self.take("--suffix").unwrap_or(suffix.into()),
            compress: compress.map(algorithm).transpose()?,
            encrypt: self.take("--encrypt").is_some(),
            journal_dir: self.path("--journal-dir"),
            part_bytes: self.number("--part-bytes", 64 << 20, PART_BYTES)?,
            // At most 32.
            parallel: self.number("--parallel", 4, PARALLEL)? as usize,
            patience: self.patience()?,
        })
    }

    fn patience(&mut self) -> Result<Patience, ArgsError> {
        let default = Patience::default();
        let mut seconds = |option, default: Duration| {
            let number = self.number(option, default.as_secs(), SECONDS);
            number.map(Duration::from_secs)
        };
        Ok(Patience {
            deadline: seconds("--deadline-s", default.deadline)?,
            attempt: seconds("--attempt-s", default.attempt)?,
            ..default
        })
    }

    fn subject(&mut self) -> Result<Subject, ArgsError> {
        match (self.path("--descriptor"), self.path("--file")) {
            (Some(path), None) => Ok(Subject::Descriptor(path)),
            (None, Some(path)) => Ok(Subject::File {
                path,
                digest: self.take("--digest").map(digest).transpose()?,
            }),
            _ => Err(ArgsError::OneOf("--descriptor", "--file")),
        }
    }

    fn fetch(&mut self) -> Result<Fetch, ArgsError> {
        Ok(Fetch {
            subject: self.subject()?,
            stores: self.path("--stores"),
            into: self.needed("--into")?.into(),
            patience: self.patience()?,
        })
    }

    fn verification(&mut self) -> Result<Verification, ArgsError> {
        let subject = self.subject()?;
        let is_layer = match self.take("--content").as_deref() {
            None | Some("layer") => true,
            Some("bytes") => false,
            Some(value) => {
                return Err(ArgsError::BadValue {
                    option: "--content",
                    value: value.into(),
                    expected: "layer or bytes".into(),
                });
            }
        };
        Ok(Verification {
            subject,
            stores: self.path("--stores"),
            is_layer,
            patience: self.patience()?,
        })
    }
}

fn algorithm(value: String) -> Result<Algorithm, ArgsError> {
    match value.as_str() {
        "lz4" => Ok(Algorithm::Lz4),
        "zstd" => Ok(Algorithm::Zstd),
        _ => Err(ArgsError::BadValue {
            option: "--compress",
            value,
            expected: "lz4 or zstd".into(),
        }),
    }
}

fn digest(value: String) -> Result<Digest, ArgsError> {
    value.parse().map_err(|_| ArgsError::BadValue {
        option: "--digest",
        value,
        expected: "64 lower-case hexadecimal digits".into(),
    })
}

#[cfg(test)]
mod test {
    use super::*;

    fn fault(line: &str) -> ArgsError {
        parse(line.split(' ').filter(|word| !word.is_empty()).map(str::to_owned)).expect_err(line)
    }

    fn publication(line: &str) -> Publication {
        match parse(line.split(' ').map(str::to_owned)) {
            Ok(Command::Publish(publication)) => publication,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn options_have_their_defaults() {
        let layer = publication("publish --layer /l --store repository --stores /s");
        assert_eq!(layer.content, Content::Layer("/l".into()));
        assert_eq!((layer.prefix.as_str(), layer.suffix.as_str()), ("layers/", ".lsmt"));
        assert_eq!(
            (layer.part_bytes, layer.parallel, layer.encrypt),
            (67_108_864, 4, false)
        );
        let file = publication("put-file --file /f --dir /d --encrypt --prefix x/");
        assert_eq!(
            (file.prefix.as_str(), file.suffix.as_str(), file.encrypt),
            ("x/", ".state", true)
        );
        assert_eq!(file.target, Target::Directory("/d".into()));
    }

    #[test]
    fn faults_name_the_option() {
        assert_eq!(fault(""), ArgsError::NoCommand);
        assert_eq!(fault("fly"), ArgsError::UnknownCommand("fly".into()));
        assert_eq!(fault("publish --dir /d"), ArgsError::MissingOption("--layer"));
        assert_eq!(fault("publish --layer /l"), ArgsError::OneOf("--dir", "--store"));
        assert_eq!(
            fault("publish --layer /l --dir /d --store s"),
            ArgsError::OneOf("--dir", "--store")
        );
        assert_eq!(fault("digest --layer"), ArgsError::MissingValue("--layer".into()));
        assert_eq!(
            fault("digest --layer /l --layer /m"),
            ArgsError::Twice("--layer".into())
        );
        let small = fault("publish --layer /l --dir /d --part-bytes 1048576").to_string();
        assert!(small.contains("--part-bytes") && small.contains("8388608"), "{small}");
        assert!(
            fault("publish --layer /l --dir /d --compress rar")
                .to_string()
                .contains("lz4 or zstd")
        );
        assert!(
            fault("put-file --file /l --dir /d --compress lz4")
                .to_string()
                .contains("no option --compress")
        );
        assert_eq!(fault("get --file /f"), ArgsError::MissingOption("--into"));
        assert_eq!(fault("get --into /i"), ArgsError::OneOf("--descriptor", "--file"));
        assert!(fault("verify --file /f --digest AB").to_string().contains("--digest"));
    }
}
