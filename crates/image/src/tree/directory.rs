//! Directories in memory: read whole on first use, written whole at the end.

use std::collections::BTreeMap;

use super::{Child, Directory, Result, Tree, TreeError};
use crate::device::BLOCK_BYTES;
use crate::ext4::{
    Block, Dirent, Ext4Error, FileType, INDEX_FANOUT_MAX, Leaves, build_index, build_single, entry_bytes, parse_block,
    read_block, walk,
};

/// More subdirectories than a link count can say are said by a count of one.
const SUBDIRECTORIES_MAX: usize = 64_998;
/// What `.`, `..` and the checksum take of a directory's only block.
const SINGLE_BLOCK_FRAME: usize = 12 + 12 + 12;

impl Tree {
    /// A directory, read if it was not used before. Errors: `Read` for one that is damaged.
    pub(super) fn directory(&mut self, ino: u32) -> Result<&mut Directory> {
        if !self.directories.contains_key(&ino) {
            let directory = self.read_directory(ino)?;
            self.directories.insert(ino, directory);
        }
        self.directories
            .get_mut(&ino)
            .ok_or(TreeError::Read(Ext4Error::NotExt4))
    }

    fn read_directory(&mut self, ino: u32) -> Result<Directory> {
        let damaged = |what| TreeError::Read(Ext4Error::Damaged { what, ino });
        let inode = self.ext2.read_inode(ino)?;
        let device = self.ext2.device();
        let mut children = BTreeMap::new();
        let mut parent = None;
        for extent in walk(device, ino, &inode)? {
            for number in 0..u64::from(extent.count) {
                let block = read_block(device, extent.physical + number)?;
                // The second entry of the first block, at its fixed place.
                parent.get_or_insert_with(|| crate::ext4::u32_at(&block, 12));
                for entry in parse_block(&block).ok_or(damaged("a block of the directory"))? {
                    let child = child_of(&entry).ok_or(damaged("an entry of the directory"))?;
                    children.insert(entry.name.into(), child);
                }
            }
        }
        Ok(Directory {
            parent: parent.ok_or(damaged("the content of the directory"))?,
            children,
            changed: false,
        })
    }

    /// Writes what changed, in the order of inodes: equal trees give equal bytes.
    pub(super) fn write_directories(&mut self) -> Result<()> {
        let changed = self.directories.iter().filter(|(_, directory)| directory.changed);
        let mut changed: Vec<u32> = changed.map(|(ino, _)| *ino).collect();
        changed.sort_unstable();
        for ino in changed {
            if let Some(directory) = self.directories.remove(&ino) {
                self.write_directory(ino, &directory)?;
            }
        }
        Ok(())
    }

    fn write_directory(&mut self, ino: u32, directory: &Directory) -> Result<()> {
        let (mut blocks, indexed) = self.build_directory(ino, directory)?;
        let mut inode = self.ext2.read_inode(ino)?;
        let mut extents = walk(self.ext2.device(), ino, &inode)?;
        let held: u64 = extents.iter().map(|extent| u64::from(extent.count)).sum();
        if held != blocks.len() as u64 {
            self.ext2.free_content(ino, &mut inode)?;
            extents = self.take_blocks(0, blocks.len() as u64)?;
            inode = self.place_content(ino, inode, &extents)?;
        }
        let numbers = extents
            .iter()
            .flat_map(|extent| extent.physical..extent.physical + u64::from(extent.count));
        for (number, block) in numbers.zip(&mut blocks) {
            self.ext2.write_dir_block(ino, number, block)?;
        }
        let subdirectories = directory
            .children
            .values()
            .filter(|child| child.file_type == FileType::Directory)
            .count();
        inode.set_links(match subdirectories {
            0..=SUBDIRECTORIES_MAX => 2 + subdirectories as u16,
            _ => 1,
        });
        inode.set_size(blocks.len() as u64 * BLOCK_BYTES);
        inode.set_index(indexed);
        Ok(self.ext2.write_inode(ino, &inode)?)
    }

    /// The directory's blocks, and whether they begin with an index.
    fn build_directory(&mut self, ino: u32, directory: &Directory) -> Result<(Vec<Block>, bool)> {
        let bytes: usize = directory.children.keys().map(|name| entry_bytes(name.len())).sum();
        if bytes + SINGLE_BLOCK_FRAME <= BLOCK_BYTES as usize {
            let entries = directory.children.iter();
            let entries = entries.map(|(name, child)| (child.ino, child.file_type.dirent_code(), &name[..]));
            return Ok((vec![build_single(ino, directory.parent, entries)], false));
        }
        let mut hashed = Vec::with_capacity(directory.children.len());
        for (name, child) in &directory.children {
            hashed.push((self.ext2.name_hash(name)?, name, child));
        }
        hashed.sort_by_key(|(hash, ..)| *hash);
        let mut leaves = Leaves::default();
        for ((hash, _), name, child) in hashed {
            leaves.push(hash, child.ino, child.file_type.dirent_code(), name);
        }
        if leaves.count() > INDEX_FANOUT_MAX {
            return Err(TreeError::DirectoryTooLarge);
        }
        Ok((
            build_index(ino, directory.parent, self.ext2.stored_hash_version(), leaves),
            true,
        ))
    }
}

fn child_of(entry: &Dirent<'_>) -> Option<Child> {
    Some(Child {
        ino: entry.ino,
        file_type: FileType::of_dirent_code(entry.code)?,
        fresh: false,
    })
}
