//! Reads a file system that nobody vouches for: every number is checked before it is used, and nothing loops for ever.

use super::superblock::Superblock;
use super::{Attributes, Ext4Error, Extent, FileType, Inode, attributes, parse_block, read_block, u32_at, walk};
use crate::device::{BLOCK_BYTES, Device};
use crate::ext4::inode::INODE_BYTES;

/// Entries of one directory that a reader keeps in memory.
const DIRECTORY_ENTRIES_MAX: usize = 10_000_000;

/// An ext4 file system that is only read.
#[derive(Debug)]
pub struct Volume<'a> {
    device: &'a Device,
    superblock: Superblock,
}

impl<'a> Volume<'a> {
    /// Errors: `NotExt4`, `Unsupported`, `Device`.
    pub fn open(device: &'a Device) -> Result<Volume<'a>, Ext4Error> {
        let mut bytes = [0; 1024];
        device.read(&mut bytes, 1024)?;
        let superblock = Superblock::parse(&bytes)?;
        Ok(Volume { device, superblock })
    }

    /// Whether the journal must be replayed before a reader sees the truth.
    pub fn needs_recovery(&self) -> bool {
        self.superblock.needs_recovery
    }

    /// Errors: `Damaged` for a number that is none, `Device`.
    pub fn inode(&self, ino: u32) -> Result<Inode, Ext4Error> {
        if ino == 0 || ino > self.superblock.inodes {
            let what = "the number";
            return Err(Ext4Error::Damaged { what, ino });
        }
        let (group, index) = (
            (ino - 1) / self.superblock.inodes_per_group,
            (ino - 1) % self.superblock.inodes_per_group,
        );
        let at = BLOCK_BYTES + u64::from(group) * u64::from(self.superblock.descriptor_bytes);
        let descriptors = read_block(self.device, at / BLOCK_BYTES)?;
        let descriptor = &descriptors[(at % BLOCK_BYTES) as usize..][..usize::from(self.superblock.descriptor_bytes)];
        let high = if descriptor.len() >= 64 {
            u64::from(u32_at(descriptor, 0x28))
        } else {
            0
        };
        let table = u64::from(u32_at(descriptor, 8)) | high << 32;
        let offset = u64::from(index) * u64::from(self.superblock.inode_bytes);
        let block = read_block(self.device, table.saturating_add(offset / BLOCK_BYTES))?;
        let size = usize::from(self.superblock.inode_bytes).min(INODE_BYTES);
        let mut bytes = [0; INODE_BYTES];
        bytes[..size].copy_from_slice(&block[(offset % BLOCK_BYTES) as usize..][..size]);
        Ok(Inode::from_bytes(bytes))
    }

    /// Errors: those of [`walk`], `Unsupported` for encrypted content.
    pub fn extents(&self, ino: u32, inode: &Inode) -> Result<Vec<Extent>, Ext4Error> {
        if inode.is_encrypted() {
            return Err(Ext4Error::Unsupported { what: "encryption" });
        }
        walk(self.device, ino, inode)
    }

    /// Names and inodes of a directory in no order. Errors: `Damaged`, `Unsupported`, `Device`.
    pub fn entries(&self, ino: u32, inode: &Inode) -> Result<Vec<(Vec<u8>, u32)>, Ext4Error> {
        let damaged = |what| Ext4Error::Damaged { what, ino };
        let mut found = Vec::new();
        for extent in self.extents(ino, inode)? {
            for number in 0..u64::from(extent.count) {
                let block = read_block(self.device, extent.physical + number)?;
                let entries = parse_block(&block).ok_or(damaged("a block of the directory"))?;
                found.extend(entries.into_iter().map(|entry| (entry.name.to_vec(), entry.ino)));
                if found.len() > DIRECTORY_ENTRIES_MAX {
                    return Err(damaged("the size of the directory"));
                }
            }
        }
        Ok(found)
    }

    /// A symbolic link's target. Errors: `Damaged`, `Device`.
    pub fn target(&self, ino: u32, inode: &Inode) -> Result<Vec<u8>, Ext4Error> {
        target(self.device, ino, inode)
    }

    pub fn attributes(&self, ino: u32, inode: &Inode) -> Result<Attributes, Ext4Error> {
        attributes::read(self.device, ino, inode, self.superblock.inode_bytes)
    }

    /// Reads a part of a file that lies in one extent. Errors: `Device`.
    pub fn read_extent(&self, extent: &Extent, skip_bytes: u64, buf: &mut [u8]) -> Result<(), Ext4Error> {
        match extent.unwritten {
            true => buf.fill(0),
            false => self.device.read(buf, extent.physical * BLOCK_BYTES + skip_bytes)?,
        }
        Ok(())
    }
}

/// A symbolic link's target, in the inode or in a block of its own. Errors: `Damaged`, `Device`.
pub fn target(device: &Device, ino: u32, inode: &Inode) -> Result<Vec<u8>, Ext4Error> {
    let damaged = Ext4Error::Damaged {
        what: "the target of the link",
        ino,
    };
    let size = match usize::try_from(inode.size()) {
        Ok(size) if size < BLOCK_BYTES as usize && inode.file_type() == Some(FileType::Symlink) => size,
        _ => return Err(damaged),
    };
    if !inode.has_extents() {
        return inode.content().get(..size).map(<[u8]>::to_vec).ok_or(damaged);
    }
    match walk(device, ino, inode)?.first() {
        Some(extent) if extent.logical == 0 && !extent.unwritten => {
            Ok(read_block(device, extent.physical)?[..size].to_vec())
        }
        _ => Err(damaged),
    }
}
