//! Blob descriptors: the small file that stands for a layer which is no plain file.
//!
//! JSON of at most 64 KiB that begins with `{"aenv_blob":1`. Strict: an unknown field, a missing one or a value out of
//! its range is an error, since what is not understood here would later be wrong bytes in a guest.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::block_list::BLOCK_BYTES;
use crate::{Digest, Source};

/// Longest descriptor.
pub const DESCRIPTOR_BYTES_MAX: u64 = 64 << 10;
/// Largest blob: what an LSMT file can address.
pub const BLOB_BYTES_MAX: u64 = 1 << 59;

const VERSION: u32 = 1;
const PREFIX: &[u8] = b"{\"aenv_blob\":1";

/// What is known of a blob: its name, its size, where its bytes are and how they are verified and read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Descriptor {
    aenv_blob: u32,
    /// SHA-256 of the stored bytes.
    pub digest: Digest,
    /// Stored bytes.
    pub size_bytes: u64,
    pub source: Source,
    /// Unit of the block list and of the cache.
    pub block_bytes: u32,
    /// The block list; none for what was not published by a node (a registry's artifact).
    pub blocks: Option<Source>,
    /// SHA-256 of the block list.
    pub blocks_digest: Option<Digest>,
    pub encryption: Option<Encryption>,
}

/// How the stored bytes are encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Encryption {
    #[serde(rename = "aes-256-gcm")]
    Aes256Gcm,
}

/// A file that is no descriptor.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    #[error("{}: cannot be read", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{}: more than {DESCRIPTOR_BYTES_MAX} bytes, which no descriptor has", path.display())]
    TooLong { path: PathBuf },
    #[error("{}: is no blob descriptor of version {VERSION}", path.display())]
    NotADescriptor { path: PathBuf },
    #[error("{}: is no valid blob descriptor", path.display())]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{}: {what}", path.display())]
    Field { path: PathBuf, what: String },
}

impl Descriptor {
    /// A descriptor of this version. `blocks` is the place and the digest of the block list.
    pub fn new(
        digest: Digest,
        size_bytes: u64,
        source: Source,
        blocks: Option<(Source, Digest)>,
        encryption: Option<Encryption>,
    ) -> Descriptor {
        let (blocks, blocks_digest) = blocks.unzip();
        Descriptor {
            aenv_blob: VERSION,
            digest,
            size_bytes,
            source,
            block_bytes: BLOCK_BYTES,
            blocks,
            blocks_digest,
            encryption,
        }
    }

    /// Whether a file that begins with `start` claims to be a descriptor; at least 14 bytes are needed to tell.
    pub fn is_start(start: &[u8]) -> bool {
        start.starts_with(PREFIX)
    }

    /// Reads and checks the descriptor at `path`. Errors: as named by [`DescriptorError`], all naming the file.
    pub fn read(path: &Path) -> Result<Descriptor, DescriptorError> {
        let failed = |source| DescriptorError::Read {
            path: path.to_owned(),
            source,
        };
        let file = std::fs::File::open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(DESCRIPTOR_BYTES_MAX + 1)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        Descriptor::parse(path, &bytes)
    }

    /// As [`Descriptor::read`], from bytes; `path` is for the errors.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Descriptor, DescriptorError> {
        let path = || path.to_owned();
        if bytes.len() as u64 > DESCRIPTOR_BYTES_MAX {
            return Err(DescriptorError::TooLong { path: path() });
        }
        if !Descriptor::is_start(bytes) {
            return Err(DescriptorError::NotADescriptor { path: path() });
        }
        let descriptor: Descriptor =
            serde_json::from_slice(bytes).map_err(|source| DescriptorError::Json { path: path(), source })?;
        match descriptor.fault() {
            Some(what) => Err(DescriptorError::Field { path: path(), what }),
            None => Ok(descriptor),
        }
    }

    /// The bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        // Only maps with keys that are no strings cannot be written as JSON; there are none here.
        serde_json::to_vec(self).expect("a descriptor is JSON")
    }

    fn fault(&self) -> Option<String> {
        let block_bytes = BLOCK_BYTES;
        if self.aenv_blob != VERSION {
            return Some(format!("version {} is not known", self.aenv_blob));
        }
        if self.size_bytes == 0 || self.size_bytes > BLOB_BYTES_MAX {
            return Some(format!("size_bytes {} is not in 1..={BLOB_BYTES_MAX}", self.size_bytes));
        }
        if self.block_bytes != block_bytes {
            return Some(format!("block_bytes is {} and not {block_bytes}", self.block_bytes));
        }
        if self.blocks.is_some() != self.blocks_digest.is_some() {
            return Some("blocks and blocks_digest come together or not at all".into());
        }
        None
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const GOLDEN: &str = concat!(
        r#"{"aenv_blob":1,"digest":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size_bytes":70000,"#,
        r#""source":{"kind":"object","store":"repository","key":"layers/e3.lsmt"},"block_bytes":65536,"#,
        r#""blocks":{"kind":"object","store":"repository","key":"layers/e3.blocks"},"#,
        r#""blocks_digest":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","encryption":"aes-256-gcm"}"#
    );

    fn parse(text: &str) -> Result<Descriptor, DescriptorError> {
        Descriptor::parse(Path::new("/b/x.blob"), text.as_bytes())
    }

    fn object(key: &str) -> Source {
        Source::Object {
            store: "repository".into(),
            key: key.into(),
        }
    }

    #[test]
    fn the_file_has_the_bytes_of_the_contract() {
        let digest = Digest::of(b"");
        let blocks = Some((object("layers/e3.blocks"), digest));
        let encryption = Some(Encryption::Aes256Gcm);
        let descriptor = Descriptor::new(digest, 70000, object("layers/e3.lsmt"), blocks, encryption);
        assert_eq!(String::from_utf8(descriptor.encode()).unwrap(), GOLDEN);
        assert_eq!(parse(GOLDEN).unwrap(), descriptor);
    }

    #[test]
    fn every_kind_of_source_is_read() {
        let sources = [
            r#"{"kind":"file","path":"/r/layers/e3.lsmt"}"#,
            r#"{"kind":"registry","registry":"r:5000","repository":"a/b","digest":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}"#,
        ];
        for source in sources {
            let text = GOLDEN.replacen(
                r#"{"kind":"object","store":"repository","key":"layers/e3.lsmt"}"#,
                source,
                1,
            );
            assert_eq!(serde_json::to_string(&parse(&text).unwrap().source).unwrap(), source);
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_the_name_of_the_file() {
        let cases = [
            ("", ""),
            ("\"aenv_blob\":1", "\"aenv_blob\":2"),
            ("\"aenv_blob\":1", "\"aenv_blob\":12"),
            ("70000", "0"),
            ("70000", "18446744073709551615"),
            ("65536", "4096"),
            ("aes-256-gcm", "rot13"),
            ("\"kind\":\"object\"", "\"kind\":\"ftp\""),
            ("\"store\":\"repository\"", "\"store\":\"repository\",\"more\":1"),
            ("\"size_bytes\"", "\"more\":1,\"size_bytes\""),
            (
                "{\"kind\":\"object\",\"store\":\"repository\",\"key\":\"layers/e3.blocks\"}",
                "null",
            ),
        ];
        for (from, to) in cases {
            let text = if from.is_empty() {
                String::new()
            } else {
                GOLDEN.replace(from, to)
            };
            let error = parse(&text).expect_err(&text).to_string();
            assert!(error.starts_with("/b/x.blob: "), "{error}");
        }
        let long = GOLDEN.replace("layers/e3.lsmt", &"x".repeat(70_000));
        assert!(matches!(parse(&long), Err(DescriptorError::TooLong { .. })));
    }
}
