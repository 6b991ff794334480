//! Tar as OCI layers use it: ustar, GNU long names and sparse files, PAX.
//!
//! Owns: the format in both directions. Does not own: what entries mean in an image (whiteouts and the like). The input is
//! hostile: every length is bounded before it is used, and a malformed header is an error that names its place.

mod header;
mod pax;
mod reader;
mod sparse;
mod writer;

use std::collections::BTreeMap;
use std::io;

pub use reader::Reader;
pub use writer::Writer;

use crate::ext4::Time;

pub const RECORD_BYTES: usize = 512;
/// Most bytes of a name with its folders, as the kernel limits paths.
pub const PATH_BYTES_MAX: usize = 4096;
/// Most bytes of one PAX or GNU header that describes the next entry; attributes of a file have 64 KiB each at most.
pub const EXTENSION_BYTES_MAX: u64 = 1 << 20;
/// Most pieces of one sparse file.
pub const SPARSE_PIECES_MAX: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("cannot read the archive")]
    Read(#[source] io::Error),
    #[error("the archive ends inside of an entry, at byte {offset}")]
    Truncated { offset: u64 },
    #[error("byte {offset} of the archive: {what}")]
    Malformed { offset: u64, what: &'static str },
    #[error("byte {offset} of the archive: entries of type {type_flag:#x} are not supported")]
    UnknownType { offset: u64, type_flag: u8 },
}

/// What an entry makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Regular,
    HardLink,
    Symlink,
    CharDevice,
    BlockDevice,
    Directory,
    Fifo,
}

/// One entry, all extensions applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub kind: Kind,
    /// As it is in the archive: may be absolute, may hold `..`.
    pub path: Vec<u8>,
    pub link: Vec<u8>,
    /// Permission bits with setuid, setgid and sticky.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Time,
    pub atime: Option<Time>,
    /// Of a regular file, with its holes.
    pub size: u64,
    /// Where a sparse file has data: offset and length in bytes, in order. None: everywhere.
    pub pieces: Option<Vec<(u64, u64)>>,
    pub major: u32,
    pub minor: u32,
    /// Extended attributes, by full name.
    pub attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}
