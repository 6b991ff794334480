//! The tree of files of an image under construction: names in memory, inodes and content on the file system.
//!
//! Owns: the directories that were touched, which are read once and written once at the end ([`Tree::finish`]), link counts,
//! and what of the tree this layer made (a whiteout hides only what lower layers made). Does not own: the archive
//! ([`crate::apply`]) and the bytes on disk ([`crate::ext4`]).
//!
//! Linking by the library would search a directory from its start for each name: quadratic, which 10,000 files in one
//! directory already show.

mod directory;
mod nodes;
mod path;
mod remove;

use std::collections::{BTreeMap, HashMap};

pub use nodes::Attributes;
pub use path::{ImagePath, Missing, PathError};

use crate::device::{Device, DeviceError};
use crate::ext2::{Ext2, Ext2Error};
use crate::ext4::{Ext4Error, FileType, ROOT_INO};
use crate::space::Space;

/// Links to one file, the kernel's limit.
pub const LINKS_MAX: u16 = 65000;
/// e2fsck wants the folder for what it rescues; no layer may take it away.
pub(crate) const RESCUE_FOLDER: &[u8] = b"lost+found";

#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    #[error(transparent)]
    Change(#[from] Ext2Error),
    #[error(transparent)]
    Read(#[from] Ext4Error),
    #[error("cannot use the disk")]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Path(#[from] PathError),
    /// The disk of the image is too small.
    #[error("the image's disk is full: {blocks} more blocks of 4096 bytes are needed here")]
    NoBlocks { blocks: u64 },
    #[error("the image's disk is full: no inode is free")]
    NoInodes,
    #[error("a file has more than {LINKS_MAX} links")]
    TooManyLinks,
    #[error("a hard link's target is not there")]
    LinkTargetMissing,
    #[error("a hard link's target is a directory")]
    LinkToDirectory,
    #[error("a directory has more entries than its index can hold")]
    DirectoryTooLarge,
    #[error("a symbolic link has a target of {bytes} bytes; 1 to 4095 are possible")]
    TargetLength { bytes: usize },
    #[error("a file of {bytes} bytes is larger than ext4 can hold")]
    FileTooLarge { bytes: u64 },
    #[error("the device {major}:{minor} has larger numbers than ext4 can hold")]
    DeviceNumbers { major: u32, minor: u32 },
    #[error("{} must stay a directory", String::from_utf8_lossy(RESCUE_FOLDER))]
    RescueFolder,
}

pub type Result<T, E = TreeError> = std::result::Result<T, E>;

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Child {
    pub ino: u32,
    pub file_type: FileType,
    /// Made or touched by the layer that is being applied.
    pub fresh: bool,
}

#[derive(Debug)]
pub(crate) struct Directory {
    parent: u32,
    children: BTreeMap<Box<[u8]>, Child>,
    changed: bool,
}

/// A file system that a layer is being applied to.
#[derive(Debug)]
pub struct Tree {
    pub(crate) ext2: Ext2,
    space: Space,
    directories: HashMap<u32, Directory>,
    /// For what has no time in the archive.
    epoch_s: u32,
}

impl Tree {
    /// `epoch_s` (seconds since 1970) dates folders that the archive does not name.
    pub fn new(ext2: Ext2, epoch_s: u32) -> Tree {
        Tree {
            ext2,
            space: Space::default(),
            directories: HashMap::new(),
            epoch_s,
        }
    }

    /// Writes all changed directories and the file system's own records. The result reads and writes no more through the
    /// library; blocks that are free are taken for unwritten.
    pub fn finish(mut self) -> Result<Ext2> {
        self.write_directories()?;
        self.ext2.flush(self.epoch_s)?;
        let mut at = 0;
        while let Some((start, count)) = self.ext2.free_run(at, u64::MAX)? {
            self.ext2.device_mut().forget(start, start + count);
            at = start + count;
        }
        Ok(self.ext2)
    }

    /// Where content goes.
    pub fn device_mut(&mut self) -> &mut Device {
        self.ext2.device_mut()
    }

    fn child(&mut self, directory: u32, name: &[u8]) -> Result<Option<Child>> {
        Ok(self.directory(directory)?.children.get(name).copied())
    }

    fn set_child(&mut self, directory: u32, name: &[u8], child: Child) -> Result<()> {
        if directory == ROOT_INO && name == RESCUE_FOLDER && child.file_type != FileType::Directory {
            return Err(TreeError::RescueFolder);
        }
        let found = self.directory(directory)?;
        found.children.insert(name.into(), child);
        found.changed = true;
        Ok(())
    }
}
