//! The one error of this crate: which file, which step, and what the caller may do about it.
//!
//! Callers decide by [`Error::kind`], never by the text.

use std::io;
use std::path::{Path, PathBuf};

use crate::tar::TarDamage;
use crate::zfile::ZFileDamage;

/// What went wrong, with the file it happened to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused a step.
    #[error("{}: {step} failed", path.display())]
    Io {
        path: PathBuf,
        step: &'static str,
        #[source]
        source: io::Error,
    },
    /// What the file at `path` only names could not be reached or be read.
    #[error("{}: the bytes it stands for could not be read", path.display())]
    Remote {
        path: PathBuf,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The bytes of the file contradict the format, or are missing.
    #[error("{}: {damage}", path.display())]
    Corrupt { path: PathBuf, damage: Damage },
    /// A file is already where a new one was to be made.
    #[error("{}: already exists", path.display())]
    Exists { path: PathBuf },
    /// Offset or length is not a multiple of a sector.
    #[error("offset {offset} with length {length} is not a multiple of 512 bytes")]
    Unaligned { offset: u64, length: u64 },
    /// The range ends beyond the device.
    #[error("offset {offset} with length {length} is outside of {size} bytes")]
    OutOfRange { offset: u64, length: u64, size: u64 },
    /// A size that no file of this format may have.
    #[error("a size of {size} bytes is not between 512 and {limit} in steps of 512")]
    BadSize { size: u64, limit: u64 },
    /// The file's size is not the one the stack was asked to have.
    #[error("{}: has {found} bytes, which does not fit a stack of {stack} bytes", path.display())]
    SizeMismatch { path: PathBuf, found: u64, stack: u64 },
    /// More layers than an index entry's tag can name.
    #[error("{count} layers in one stack; the limit is {limit}")]
    TooManyLayers { count: usize, limit: usize },
    /// An operation that merges layers got none.
    #[error("no layer was given")]
    NoLayers,
    /// The source of an import is not a regular file.
    #[error("{}: is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    /// A write, discard or seal on a stack without an upper.
    #[error("the stack is read-only")]
    ReadOnly,
    /// A write, discard or seal of an upper that has become a layer.
    #[error("{}: is sealed", path.display())]
    Sealed { path: PathBuf },
    /// A layer was asked for, but the map file beside it says that it is a writable upper.
    #[error("{}: is a writable upper, not a sealed layer", path.display())]
    NotSealed { path: PathBuf },
    /// The writer was handed a segment at or before the end of the last one.
    #[error("{}: segment at byte {offset} comes before the end of the last one, {end}", path.display())]
    OutOfOrder { path: PathBuf, offset: u64, end: u64 },
    /// More index entries than this crate keeps in memory for one stack.
    #[error("{count} index entries; the limit is {limit}")]
    TooManySegments { count: u64, limit: u64 },
}

/// How the bytes of a file contradict the format. Entry numbers count from zero.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    #[error("{length} bytes are too few for a header and a trailer")]
    TooShort { length: u64 },
    #[error("the {part} does not carry the LSMT magic")]
    NotLsmt { part: &'static str },
    #[error("the {part} has flags {flags:#x}, which do not make it a {part} of a sealed data file")]
    Flags { part: &'static str, flags: u32 },
    #[error("format version {version} is not known")]
    Version { version: u8 },
    #[error("the header contradicts the trailer")]
    HeaderMismatch,
    #[error("the checksum of index and trailer is wrong")]
    Checksum,
    #[error("an index of {entries} entries at byte {offset} does not fit in the file")]
    IndexOutside { offset: u64, entries: u64 },
    #[error("index entry {entry} is empty")]
    EmptySegment { entry: u64 },
    #[error("index entry {entry} starts before the end of the one before it")]
    Unsorted { entry: u64 },
    #[error("index entry {entry} points outside of the data")]
    DataOutside { entry: u64 },
    #[error("index entry {entry} ends beyond the virtual size")]
    BeyondSize { entry: u64 },
    #[error("the virtual size of {size} bytes is beyond the format")]
    VirtualSize { size: u64 },
    #[error("the file ends at byte {offset}, where {missing} more bytes must be")]
    ShortRead { offset: u64, missing: u64 },
    #[error(transparent)]
    ZFile(ZFileDamage),
    #[error(transparent)]
    Tar(TarDamage),
    #[error("the map file is missing")]
    MapMissing,
    #[error("the data file is missing, but its map says that it was written")]
    DataMissing,
    #[error("the map file is damaged or belongs to another upper")]
    Map,
}

/// What a caller may decide on; equal to the kinds of the control protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    NotFound,
    Exists,
    Invalid,
    NoSpace,
    Io,
    Corrupt,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The class of the error, derived from its variant and the operating system's code.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Io { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                io::ErrorKind::AlreadyExists => ErrorKind::Exists,
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                    ErrorKind::NoSpace
                }
                _ => ErrorKind::Io,
            },
            Error::Remote { .. } => ErrorKind::Io,
            Error::Corrupt { .. } => ErrorKind::Corrupt,
            Error::Exists { .. } => ErrorKind::Exists,
            _ => ErrorKind::Invalid,
        }
    }

    pub(crate) fn corrupt(path: &Path, damage: Damage) -> Self {
        Error::Corrupt {
            path: path.to_owned(),
            damage,
        }
    }
}

/// Names the step and the file of an operating system error.
pub(crate) trait At<T> {
    fn at(self, path: &Path, step: &'static str) -> Result<T>;
}

impl<T, E: Into<io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, path: &Path, step: &'static str) -> Result<T> {
        self.map_err(|e| Error::Io {
            path: path.to_owned(),
            step,
            source: e.into(),
        })
    }
}
