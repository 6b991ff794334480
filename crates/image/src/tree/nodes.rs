//! Makes files, directories, links and devices, and changes what an existing directory carries.

use std::collections::BTreeMap;

use super::{Child, Directory, LINKS_MAX, Result, Tree, TreeError};
use crate::device::BLOCK_BYTES;
use crate::ext2::attribute_name;
use crate::ext4::{Extent, FileType, INLINE_EXTENTS, Inode, ROOT_INO, Time, encode_inline};

/// Targets of links that fit in the inode, with a NUL behind.
const SHORT_TARGET_MAX: usize = 59;
/// Blocks of the largest file: their numbers have 32 bits.
const FILE_BLOCKS_MAX: u64 = u32::MAX as u64;
const DEVICE_MAJOR_MAX: u32 = (1 << 12) - 1;
const DEVICE_MINOR_MAX: u32 = (1 << 20) - 1;
/// Sectors of 512 bytes in a block.
const BLOCK_SECTORS: u64 = BLOCK_BYTES / 512;

/// What every file has beside its content.
#[derive(Debug, Clone)]
pub struct Attributes {
    /// Permission bits, without the type.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Time,
    pub atime: Time,
    /// By full name, no NUL in it.
    pub extended: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Tree {
    /// A folder that no archive names belongs to root.
    pub(super) fn implied_attributes(&self) -> Attributes {
        let time = Time {
            seconds: i64::from(self.epoch_s),
            nanoseconds: 0,
        };
        Attributes {
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime: time,
            atime: time,
            extended: BTreeMap::new(),
        }
    }

    /// Makes the directory, or gives the one that is there these attributes; anything else there makes way. The root is
    /// named by none.
    pub fn put_directory(&mut self, place: Option<(u32, &[u8])>, attributes: &Attributes) -> Result<()> {
        let Some((directory, name)) = place else {
            return self.change(ROOT_INO, attributes);
        };
        match self.child(directory, name)? {
            Some(child) if child.file_type == FileType::Directory => {
                self.change(child.ino, attributes)?;
                self.touch(directory, name)
            }
            found => {
                if found.is_some() {
                    self.remove(directory, name)?;
                }
                self.make_directory(directory, name, attributes).map(drop)
            }
        }
    }

    pub(super) fn make_directory(&mut self, directory: u32, name: &[u8], attributes: &Attributes) -> Result<u32> {
        let inode = Inode::new(FileType::Directory, 2);
        let ino = self.add(directory, name, FileType::Directory, inode, attributes)?;
        let made = Directory {
            parent: directory,
            children: BTreeMap::new(),
            changed: true,
        };
        self.directories.insert(ino, made);
        Ok(ino)
    }

    /// Makes a file of `size` bytes in the place of whatever is there, with blocks for `pieces` (offset and length in
    /// bytes, in order); the rest is holes. Answers where the content goes: the caller writes all of it.
    pub fn put_file(
        &mut self,
        directory: u32,
        name: &[u8],
        attributes: &Attributes,
        size: u64,
        pieces: &[(u64, u64)],
    ) -> Result<Vec<Extent>> {
        if size.div_ceil(BLOCK_BYTES) > FILE_BLOCKS_MAX {
            return Err(TreeError::FileTooLarge { bytes: size });
        }
        self.clear(directory, name)?;
        let mut extents: Vec<Extent> = Vec::new();
        for (start, count) in block_runs(pieces) {
            for extent in self.take_blocks(start, count)? {
                match extents.last_mut() {
                    Some(last) if joins(last, &extent) => last.count += extent.count,
                    _ => extents.push(extent),
                }
            }
        }
        let mut inode = Inode::new(FileType::Regular, 1);
        inode.set_size(size);
        let ino = self.add_placed(directory, name, inode, attributes, &extents)?;
        self.set_extended(ino, attributes, false)?;
        Ok(extents)
    }

    pub fn put_symlink(&mut self, directory: u32, name: &[u8], attributes: &Attributes, target: &[u8]) -> Result<()> {
        if target.is_empty() || target.len() >= BLOCK_BYTES as usize || target.contains(&0) {
            return Err(TreeError::TargetLength { bytes: target.len() });
        }
        self.clear(directory, name)?;
        // Linux gives every link all bits, whatever the archive says.
        let attributes = &Attributes {
            mode: 0o777,
            ..attributes.clone()
        };
        let mut inode = Inode::new(FileType::Symlink, 1);
        if target.len() <= SHORT_TARGET_MAX {
            inode.set_short_target(target);
            return self
                .add(directory, name, FileType::Symlink, inode, attributes)
                .map(drop);
        }
        let extents = self.take_blocks(0, 1)?;
        let mut block = target.to_vec();
        block.resize(BLOCK_BYTES as usize, 0);
        self.ext2
            .device_mut()
            .write(&block, extents[0].physical * BLOCK_BYTES)?;
        inode.set_size(target.len() as u64);
        let ino = self.add_placed(directory, name, inode, attributes, &extents)?;
        self.set_extended(ino, attributes, false)
    }

    /// A device or fifo.
    pub fn put_special(
        &mut self,
        directory: u32,
        name: &[u8],
        attributes: &Attributes,
        file_type: FileType,
        (major, minor): (u32, u32),
    ) -> Result<()> {
        if major > DEVICE_MAJOR_MAX || minor > DEVICE_MINOR_MAX {
            return Err(TreeError::DeviceNumbers { major, minor });
        }
        self.clear(directory, name)?;
        let mut inode = Inode::new(file_type, 1);
        inode.set_device(major, minor);
        self.add(directory, name, file_type, inode, attributes).map(drop)
    }

    /// A second name for the file at `target`, which may be one of a lower layer.
    pub fn put_hard_link(&mut self, directory: u32, name: &[u8], target: (u32, &[u8])) -> Result<()> {
        let found = self.child(target.0, target.1)?.ok_or(TreeError::LinkTargetMissing)?;
        if found.file_type == FileType::Directory {
            return Err(TreeError::LinkToDirectory);
        }
        if (directory, name) == target {
            return self.touch(directory, name);
        }
        let mut inode = self.ext2.read_inode(found.ino)?;
        if inode.links() >= LINKS_MAX {
            return Err(TreeError::TooManyLinks);
        }
        inode.set_links(inode.links() + 1);
        self.ext2.write_inode(found.ino, &inode)?;
        // After the count: what is in the way may be the file's only other name.
        self.clear(directory, name)?;
        self.set_child(directory, name, Child { fresh: true, ..found })
    }

    /// Removes what is in the way of a new file.
    fn clear(&mut self, directory: u32, name: &[u8]) -> Result<()> {
        match self.child(directory, name)? {
            Some(_) => self.remove(directory, name),
            None => Ok(()),
        }
    }

    /// Gives an existing inode other attributes, all of them.
    fn change(&mut self, ino: u32, attributes: &Attributes) -> Result<()> {
        let mut inode = self.ext2.read_inode(ino)?;
        describe(&mut inode, attributes);
        self.ext2.write_inode(ino, &inode)?;
        self.set_extended(ino, attributes, true)
    }

    fn add(
        &mut self,
        directory: u32,
        name: &[u8],
        file_type: FileType,
        mut inode: Inode,
        attributes: &Attributes,
    ) -> Result<u32> {
        describe(&mut inode, attributes);
        let ino = self.take_inode(directory, &inode)?;
        self.ext2.write_inode(ino, &inode)?;
        self.set_extended(ino, attributes, false)?;
        let fresh = true;
        self.set_child(directory, name, Child { ino, file_type, fresh })?;
        Ok(ino)
    }

    /// As `add` for an inode with content; its extended attributes are the caller's to set, after the content.
    fn add_placed(
        &mut self,
        directory: u32,
        name: &[u8],
        mut inode: Inode,
        attributes: &Attributes,
        extents: &[Extent],
    ) -> Result<u32> {
        describe(&mut inode, attributes);
        let ino = self.take_inode(directory, &inode)?;
        let file_type = inode.file_type().unwrap_or(FileType::Regular);
        let inode = self.place_content(ino, inode, extents)?;
        self.ext2.write_inode(ino, &inode)?;
        let fresh = true;
        self.set_child(directory, name, Child { ino, file_type, fresh })?;
        Ok(ino)
    }

    fn take_inode(&mut self, directory: u32, inode: &Inode) -> Result<u32> {
        let is_dir = inode.file_type() == Some(FileType::Directory);
        match self.ext2.new_inode(directory, inode.mode(), is_dir) {
            Err(crate::ext2::Ext2Error::NoInode) => Err(TreeError::NoInodes),
            other => Ok(other?),
        }
    }

    pub(super) fn take_blocks(&mut self, logical: u32, count: u64) -> Result<Vec<Extent>> {
        let missing = count.saturating_sub(self.ext2.free_blocks()).max(1);
        let taken = self.space.take(&mut self.ext2, logical, count)?;
        taken.ok_or(TreeError::NoBlocks { blocks: missing })
    }

    /// Lists the extents in an inode that has no content now; the answer is what is to be written next.
    pub(super) fn place_content(&mut self, ino: u32, mut inode: Inode, extents: &[Extent]) -> Result<Inode> {
        let blocks: u64 = extents.iter().map(|extent| u64::from(extent.count)).sum();
        // Beside the content there may be a block of extended attributes, of a directory that is written again.
        let attributes = if inode.has_attribute_block() { BLOCK_SECTORS } else { 0 };
        inode.set_sectors(blocks * BLOCK_SECTORS + attributes);
        if extents.len() <= INLINE_EXTENTS {
            inode.set_inline_extents(&encode_inline(extents));
            return Ok(inode);
        }
        inode.set_inline_extents(&encode_inline(&[]));
        self.ext2.write_inode(ino, &inode)?;
        self.ext2.insert_extents(ino, extents)?;
        // The library has counted the blocks of the tree.
        Ok(self.ext2.read_inode(ino)?)
    }

    fn set_extended(&mut self, ino: u32, attributes: &Attributes, replace: bool) -> Result<()> {
        if attributes.extended.is_empty() && !replace {
            return Ok(());
        }
        let named = attributes.extended.iter();
        let named: Vec<_> = named
            .filter_map(|(name, value)| Some((attribute_name(name)?, &value[..])))
            .collect();
        Ok(self
            .ext2
            .set_attributes(ino, named.iter().map(|(name, value)| (&name[..], *value)))?)
    }
}

fn describe(inode: &mut Inode, attributes: &Attributes) {
    let file_type = inode.file_type().map_or(0, FileType::mode_bits);
    inode.set_mode(file_type | attributes.mode & 0o7777);
    inode.set_owner(attributes.uid, attributes.gid);
    inode.set_times(attributes.atime, attributes.mtime);
}

/// Blocks that the pieces of a file touch: first and count, neighbours joined.
fn block_runs(pieces: &[(u64, u64)]) -> Vec<(u32, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &(offset, length) in pieces.iter().filter(|(_, length)| *length > 0) {
        let (start, end) = (offset / BLOCK_BYTES, (offset + length).div_ceil(BLOCK_BYTES));
        match runs.last_mut() {
            Some((first, count)) if start <= *first + *count => *count = (*count).max(end - *first),
            _ => runs.push((start, end - start)),
        }
    }
    runs.into_iter().map(|(start, count)| (start as u32, count)).collect()
}

fn joins(last: &Extent, next: &Extent) -> bool {
    last.logical + last.count == next.logical
        && last.physical + u64::from(last.count) == next.physical
        && last.count + next.count <= crate::ext4::EXTENT_BLOCKS_MAX
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn pieces_that_share_a_block_get_one_run() {
        assert_eq!(
            block_runs(&[(0, 1), (100, 4000), (16384, 1), (1 << 30, 0)]),
            [(0, 2), (4, 1)]
        );
    }
}
