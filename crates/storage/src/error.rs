//! The one error of this crate, with the kind that the server decides by.

use std::io;
use std::path::{Path, PathBuf};

use aenv_layers::ErrorKind;
use aenv_store::{BlockListError, BlockMismatch, CipherError, DescriptorError, Digest, StoreError, StoreErrorKind};

/// Why a command did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    #[error(transparent)]
    Layer(aenv_layers::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    #[error("{}: {step} failed", path.display())]
    File {
        path: PathBuf,
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{}: compressing failed", path.display())]
    Compress {
        path: PathBuf,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{}: changed while it was published", path.display())]
    Changed { path: PathBuf },
    #[error("encryption was asked for without a key (snapshot.encryption_key_file)")]
    NoKey,
    #[error("{}: is encrypted, and no key is configured (snapshot.encryption_key_file)", path.display())]
    Encrypted { path: PathBuf },
    #[error("{}: names a store and no configuration of stores was given", path.display())]
    NoStores { path: PathBuf },
    #[error("{key}: {size_bytes} bytes with the tag {etag:?} were stored, and the store now has {found}")]
    NotStored {
        key: String,
        size_bytes: u64,
        etag: Option<String>,
        found: String,
    },
    #[error("{key}: the store forgot {rounds} uploads in a row")]
    Forgotten { key: String, rounds: usize },
    #[error("{}: another process has been uploading this for more than {waited_s} s", path.display())]
    Busy { path: PathBuf, waited_s: u64 },
    #[error("{}: the content has the digest {found} and not {expected}", path.display())]
    WrongDigest {
        path: PathBuf,
        expected: Digest,
        found: Digest,
    },
    #[error("{}: has {found} bytes and not {expected}", path.display())]
    WrongSize { path: PathBuf, expected: u64, found: u64 },
    #[error("{}: its block list has the digest {found} and not {expected}", path.display())]
    WrongBlocks {
        path: PathBuf,
        expected: Digest,
        found: Digest,
    },
    #[error("{}: its block list is damaged", path.display())]
    BlockList {
        path: PathBuf,
        #[source]
        source: BlockListError,
    },
    #[error("{}: damaged", path.display())]
    Block {
        path: PathBuf,
        #[source]
        source: BlockMismatch,
    },
    #[error("{}: cannot be decrypted with the key of snapshot.encryption_key_file", path.display())]
    Cipher {
        path: PathBuf,
        #[source]
        source: CipherError,
    },
}

/// What this program's own blobs wrapped up for the layers crate comes out again, with its kind.
impl From<aenv_layers::Error> for Failed {
    fn from(error: aenv_layers::Error) -> Failed {
        let (path, source) = match error {
            aenv_layers::Error::Remote { path, source } => (path, source),
            error => return Failed::Layer(error),
        };
        let source = match source.downcast::<BlockMismatch>() {
            Ok(source) => return Failed::Block { path, source: *source },
            Err(source) => source,
        };
        let source = match source.downcast::<CipherError>() {
            Ok(source) => return Failed::Cipher { path, source: *source },
            Err(source) => source,
        };
        match source.downcast::<StoreError>() {
            Ok(error) => Failed::Store(*error),
            Err(source) => Failed::Layer(aenv_layers::Error::Remote { path, source }),
        }
    }
}

impl Failed {
    /// The class of the error: the kinds of blockd's protocol and those of a store.
    pub fn kind(&self) -> &'static str {
        match self {
            Failed::Layer(error) => layer_kind(error.kind()),
            Failed::Store(error) => match error.kind() {
                StoreErrorKind::Transient => "transient",
                StoreErrorKind::NotFound => "not_found",
                StoreErrorKind::Denied => "denied",
                StoreErrorKind::Invalid => "invalid",
            },
            Failed::Descriptor(DescriptorError::Read { source, .. }) | Failed::File { source, .. } => io_kind(source),
            Failed::Descriptor(_) | Failed::NoKey | Failed::Encrypted { .. } | Failed::NoStores { .. } => "invalid",
            Failed::Compress { .. } => "io",
            Failed::Changed { .. } | Failed::Busy { .. } => "busy",
            Failed::Forgotten { .. } => "transient",
            Failed::Cipher {
                source: CipherError::WrongKey,
                ..
            } => "invalid",
            Failed::Cipher { .. }
            | Failed::NotStored { .. }
            | Failed::WrongDigest { .. }
            | Failed::WrongSize { .. }
            | Failed::WrongBlocks { .. }
            | Failed::BlockList { .. }
            | Failed::Block { .. } => "corrupt",
        }
    }
}

fn layer_kind(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => "not_found",
        ErrorKind::Exists => "exists",
        ErrorKind::Invalid => "invalid",
        ErrorKind::NoSpace => "no_space",
        ErrorKind::Io => "io",
        ErrorKind::Corrupt => "corrupt",
    }
}

fn io_kind(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "not_found",
        io::ErrorKind::AlreadyExists => "exists",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => "no_space",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "denied",
        _ => "io",
    }
}

/// Names the file and the step of an error of the operating system.
pub(crate) trait At<T> {
    fn at(self, path: &Path, step: &'static str) -> Result<T, Failed>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, path: &Path, step: &'static str) -> Result<T, Failed> {
        self.map_err(|e| Failed::File {
            path: path.to_owned(),
            step,
            source: e.into(),
        })
    }
}

/// An error and all its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        let words = source.to_string();
        // Some libraries repeat their cause in their own text.
        if !text.ends_with(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = source.source();
    }
    text
}
