//! What ext4 stores, as bytes: inodes, extents, directories, extended attributes, superblock.
//!
//! Owns: encoding and decoding, and a reader ([`Volume`]) that trusts nothing it reads: a guest may have written it. Does
//! not own: changes to a file system, which go by libext2fs ([`crate::ext2`]).

mod attributes;
mod dirents;
mod extents;
mod inode;
mod superblock;
mod volume;

pub use attributes::Attributes;
pub use dirents::{Dirent, INDEX_FANOUT_MAX, Leaves, build_index, build_single, entry_bytes, parse_block};
pub use extents::{EXTENT_BLOCKS_MAX, Extent, INLINE_EXTENTS, encode_inline, walk};
pub use inode::{FileType, INODE_BYTES, Inode, Time};
pub use superblock::set_superblock_time;
pub use volume::{Volume, target};

use crate::device::{BLOCK_BYTES, Device, DeviceError};

/// One block in memory.
pub type Block = [u8; BLOCK_BYTES as usize];

/// The root directory's inode.
pub const ROOT_INO: u32 = 2;

/// A file system that cannot be read, or not by us.
#[derive(Debug, thiserror::Error)]
pub enum Ext4Error {
    #[error("cannot read the disk")]
    Device(#[from] DeviceError),
    #[error("the disk holds no ext4 file system")]
    NotExt4,
    #[error("the file system uses {what}, which is not supported")]
    Unsupported { what: &'static str },
    #[error("the file system is damaged: {what} of inode {ino}")]
    Damaged { what: &'static str, ino: u32 },
}

/// Reads one block of a device.
pub fn read_block(device: &Device, block: u64) -> Result<Block, DeviceError> {
    let mut content = [0; BLOCK_BYTES as usize];
    // A block number that overflows lies outside of every device.
    device.read(&mut content, block.saturating_mul(BLOCK_BYTES))?;
    Ok(content)
}

/// Little-endian fields at an offset of a record that is long enough.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(crate) fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}
