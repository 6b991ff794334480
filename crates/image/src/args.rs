//! The command line of `aenv-image`: a command, then options; an option takes all words up to the next one.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::str::FromStr;

use aenv_image::{Compression, Digest, Request, Source, parse_uuid};

pub const USAGE: &str = "usage:
  aenv-image apply --size-bytes N [--parent LAYER...] --tar FILE|- [--compression none|gzip|zstd|auto]
      [--expect-diff-id sha256:HEX] [--expect-blob sha256:HEX] --out LAYER [--uuid UUID] [--epoch SECONDS] [--max-bytes N]
  aenv-image dump --layer LAYER... --size-bytes N --out-tar FILE|- [--scratch DIR] [--max-bytes N]
  aenv-image check --layer LAYER... [--size-bytes N] [--scratch DIR]
LAYERs are given bottom first.";

/// What to do.
#[derive(Debug)]
pub enum Command {
    Apply(Request),
    /// No path: the archive goes to standard output.
    Dump {
        source: Source,
        out: Option<PathBuf>,
    },
    /// No size: the top layer's.
    Check {
        layers: Vec<PathBuf>,
        size_bytes: Option<u64>,
        scratch: PathBuf,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum ArgumentError {
    #[error("a command is missing")]
    NoCommand,
    #[error("unknown command {}", .0.display())]
    Command(OsString),
    #[error("unexpected argument {}", .0.display())]
    Unexpected(OsString),
    #[error("--{0} is missing")]
    Missing(&'static str),
    #[error("--{0} takes one value")]
    OneValue(&'static str),
    #[error("--{0}: the value cannot be read")]
    Value(&'static str),
}

type Result<T> = std::result::Result<T, ArgumentError>;

pub fn parse(mut words: impl Iterator<Item = OsString>) -> Result<Command> {
    let command = words.next().ok_or(ArgumentError::NoCommand)?;
    let mut options = Options::read(words)?;
    let parsed = match command.as_bytes() {
        b"apply" => apply(&mut options)?,
        b"dump" => dump(&mut options)?,
        b"check" => check(&mut options)?,
        _ => return Err(ArgumentError::Command(command)),
    };
    options.finish()?;
    Ok(parsed)
}

fn apply(options: &mut Options) -> Result<Command> {
    let size_bytes = options
        .value("size-bytes")?
        .ok_or(ArgumentError::Missing("size-bytes"))?;
    Ok(Command::Apply(Request {
        size_bytes,
        parents: options.many("parent").unwrap_or_default(),
        tar: options.file("tar")?,
        compression: options
            .parsed("compression", |text| Compression::from_str(text).ok())?
            .unwrap_or(Compression::Auto),
        expect_diff_id: options.parsed("expect-diff-id", |text| Digest::from_str(text).ok())?,
        expect_blob: options.parsed("expect-blob", |text| Digest::from_str(text).ok())?,
        out: PathBuf::from(options.one("out")?.ok_or(ArgumentError::Missing("out"))?),
        uuid: options.parsed("uuid", parse_uuid)?,
        epoch_s: options.value("epoch")?.unwrap_or(0),
        // No archive of a disk's files is larger than the disk, but for what holes and padding make of it.
        max_bytes: options.value("max-bytes")?.unwrap_or(size_bytes.saturating_mul(2)),
    }))
}

fn dump(options: &mut Options) -> Result<Command> {
    let size_bytes: u64 = options
        .value("size-bytes")?
        .ok_or(ArgumentError::Missing("size-bytes"))?;
    let source = Source {
        layers: options.layers()?,
        size_bytes,
        scratch: options.scratch()?,
        // Guests keep some files that are mostly holes.
        max_bytes: options.value("max-bytes")?.unwrap_or(size_bytes.saturating_mul(4)),
    };
    let out = options.file("out-tar")?;
    Ok(Command::Dump { source, out })
}

fn check(options: &mut Options) -> Result<Command> {
    Ok(Command::Check {
        layers: options.layers()?,
        size_bytes: options.value("size-bytes")?,
        scratch: options.scratch()?,
    })
}

/// Options that were given and not taken yet.
struct Options {
    given: HashMap<Vec<u8>, Vec<OsString>>,
}

impl Options {
    fn read(words: impl Iterator<Item = OsString>) -> Result<Options> {
        let mut given: HashMap<Vec<u8>, Vec<OsString>> = HashMap::new();
        let mut current: Option<Vec<u8>> = None;
        for word in words {
            match (word.as_bytes().strip_prefix(b"--"), &current) {
                (Some(name), _) => {
                    given.entry(name.to_vec()).or_default();
                    current = Some(name.to_vec());
                }
                (None, Some(name)) => given.entry(name.clone()).or_default().push(word),
                (None, None) => return Err(ArgumentError::Unexpected(word)),
            }
        }
        Ok(Options { given })
    }

    fn one(&mut self, name: &'static str) -> Result<Option<OsString>> {
        match self.given.remove(name.as_bytes()) {
            None => Ok(None),
            Some(mut values) if values.len() == 1 => Ok(values.pop()),
            Some(_) => Err(ArgumentError::OneValue(name)),
        }
    }

    fn many(&mut self, name: &str) -> Option<Vec<PathBuf>> {
        let values = self.given.remove(name.as_bytes())?;
        Some(values.into_iter().map(PathBuf::from).collect())
    }

    fn layers(&mut self) -> Result<Vec<PathBuf>> {
        let layers = self.many("layer").filter(|layers| !layers.is_empty());
        layers.ok_or(ArgumentError::Missing("layer"))
    }

    fn scratch(&mut self) -> Result<PathBuf> {
        Ok(self.one("scratch")?.map_or_else(std::env::temp_dir, PathBuf::from))
    }

    /// A file that must be named; none for `-`.
    fn file(&mut self, name: &'static str) -> Result<Option<PathBuf>> {
        let file = self.one(name)?.ok_or(ArgumentError::Missing(name))?;
        Ok((file != "-").then(|| PathBuf::from(file)))
    }

    fn parsed<T>(&mut self, name: &'static str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
        let Some(word) = self.one(name)? else {
            return Ok(None);
        };
        match word.to_str().and_then(parse) {
            Some(value) => Ok(Some(value)),
            None => Err(ArgumentError::Value(name)),
        }
    }

    fn value<T: FromStr>(&mut self, name: &'static str) -> Result<Option<T>> {
        self.parsed(name, |text| text.parse().ok())
    }

    fn finish(self) -> Result<()> {
        match self.given.into_keys().min() {
            None => Ok(()),
            Some(name) => Err(ArgumentError::Unexpected(OsString::from_vec(
                [b"--", &name[..]].concat(),
            ))),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn parse_line(line: &str) -> Result<Command> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn parents_may_be_given_in_one_option_or_several() {
        for line in ["--parent a b", "--parent a --parent b"] {
            let line = format!("apply --size-bytes 1 {line} --tar - --out c");
            let Ok(Command::Apply(request)) = parse_line(&line) else {
                panic!("not understood: {line}");
            };
            assert_eq!(request.parents, [PathBuf::from("a"), PathBuf::from("b")]);
            assert_eq!(request.tar, None);
        }
    }

    #[test]
    fn what_is_missing_or_unknown_is_named() {
        assert!(matches!(
            parse_line("apply --size-bytes 1 --tar -"),
            Err(ArgumentError::Missing("out"))
        ));
        assert!(matches!(
            parse_line("check --size-bytes 1"),
            Err(ArgumentError::Missing("layer"))
        ));
        assert!(matches!(
            parse_line("check --layer a --what"),
            Err(ArgumentError::Unexpected(_))
        ));
        assert!(matches!(
            parse_line("apply --size-bytes 1 --tar - --out c --expect-blob sha256:ab"),
            Err(ArgumentError::Value("expect-blob"))
        ));
    }
}
