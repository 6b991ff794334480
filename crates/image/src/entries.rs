//! The entries of one layer's archive, applied to the tree in their order.

use std::collections::BTreeMap;
use std::io::Read;

use crate::device::{BLOCK_BYTES, DeviceError};
use crate::ext2::Ext2Error;
use crate::ext4::{Extent, FileType};
use crate::input::Input;
use crate::tar::{Entry, Kind, Reader, TarError};
use crate::tree::{Attributes, ImagePath, Missing, PathError, Tree, TreeError};

/// Entries of one layer.
pub const ENTRIES_MAX: u64 = 10_000_000;
/// Content that is written at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// Entries between two reports of progress.
const REPORT_EVERY: u64 = 64;
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// AUFS kept its own files under this prefix; some old layers carry them.
const AUFS: &[u8] = b".wh..wh.";

#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    #[error(transparent)]
    Tar(#[from] TarError),
    #[error("entry {}", String::from_utf8_lossy(path))]
    Apply {
        path: Vec<u8>,
        #[source]
        source: TreeError,
    },
    #[error("entry {}: a whiteout that names nothing", String::from_utf8_lossy(path))]
    EmptyWhiteout { path: Vec<u8> },
    #[error("the root must stay a directory")]
    RootReplaced,
    #[error("the archive has more than {ENTRIES_MAX} entries")]
    TooMany,
}

/// What the entries did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub files: u64,
    pub whiteouts: u64,
    pub skipped_attributes: u64,
    /// What the disk lacks, where it was full. The tree is of no use then.
    pub missing_bytes: u64,
}

/// An archive that is being applied.
#[derive(Debug)]
pub struct Entries {
    reader: Reader<Input>,
    tree: Tree,
    counts: Counts,
    buffer: Vec<u8>,
}

impl Entries {
    pub fn new(reader: Reader<Input>, tree: Tree) -> Entries {
        Entries {
            reader,
            tree,
            counts: Counts::default(),
            buffer: vec![0; CHUNK_BYTES as usize],
        }
    }

    pub fn into_parts(self) -> (Reader<Input>, Tree) {
        (self.reader, self.tree)
    }

    /// Applies all entries. A full disk is no error here: the rest is only counted then, so that the caller can say how
    /// much is missing.
    pub fn apply_all(&mut self, progress: &mut dyn FnMut(&Input)) -> Result<Counts, EntryError> {
        let mut number = 0;
        while let Some(entry) = self.reader.next_entry()? {
            number += 1;
            if number > ENTRIES_MAX {
                return Err(EntryError::TooMany);
            }
            if number % REPORT_EVERY == 0 {
                progress(self.reader.get_ref());
            }
            if self.counts.missing_bytes > 0 {
                self.counts.missing_bytes += needs(&entry);
                continue;
            }
            match self.apply(&entry) {
                Err(EntryError::Apply { source, path }) => match shortage(&source) {
                    Some(bytes) => self.counts.missing_bytes += bytes,
                    None => return Err(EntryError::Apply { path, source }),
                },
                other => other?,
            }
        }
        Ok(self.counts)
    }

    fn apply(&mut self, entry: &Entry) -> Result<(), EntryError> {
        let named = |source| EntryError::Apply {
            path: entry.path.clone(),
            source,
        };
        let path = ImagePath::parse(&entry.path).map_err(|error| named(error.into()))?;
        let Some((folder, name)) = path.split() else {
            if entry.kind != Kind::Directory {
                return Err(EntryError::RootReplaced);
            }
            self.counts.files += 1;
            let attributes = self.attributes(entry);
            return self.tree.put_directory(None, &attributes).map_err(named);
        };
        if name.starts_with(WHITEOUT) {
            self.counts.whiteouts += 1;
            if name == WHITEOUT {
                let path = entry.path.clone();
                return Err(EntryError::EmptyWhiteout { path });
            }
            return self.whiteout(folder, name).map_err(named);
        }
        self.counts.files += 1;
        self.put(entry, folder, name).map_err(|error| match error {
            PutError::Tree(source) => named(source),
            PutError::Tar(error) => error.into(),
        })
    }

    fn whiteout(&mut self, folder: &[Vec<u8>], name: &[u8]) -> Result<(), TreeError> {
        let Some(directory) = self.tree.resolve(folder, Missing::Stop)? else {
            return Ok(());
        };
        match name {
            OPAQUE => self.tree.hide_children(directory),
            name if name.starts_with(AUFS) => Ok(()),
            name => self.tree.hide(directory, &name[WHITEOUT.len()..]),
        }
    }

    fn put(&mut self, entry: &Entry, folder: &[Vec<u8>], name: &[u8]) -> Result<(), PutError> {
        let attributes = self.attributes(entry);
        // Never none with `Create`.
        let Some(directory) = self.tree.resolve(folder, Missing::Create)? else {
            return Ok(());
        };
        let numbers = (entry.major, entry.minor);
        match entry.kind {
            Kind::Directory => self.tree.put_directory(Some((directory, name)), &attributes)?,
            Kind::Regular => return self.put_file(entry, directory, name, &attributes),
            Kind::Symlink => self.tree.put_symlink(directory, name, &attributes, &entry.link)?,
            Kind::CharDevice => self
                .tree
                .put_special(directory, name, &attributes, FileType::CharDevice, numbers)?,
            Kind::BlockDevice => self
                .tree
                .put_special(directory, name, &attributes, FileType::BlockDevice, numbers)?,
            Kind::Fifo => self
                .tree
                .put_special(directory, name, &attributes, FileType::Fifo, (0, 0))?,
            Kind::HardLink => self.put_hard_link(entry, directory, name)?,
        }
        Ok(())
    }

    fn put_hard_link(&mut self, entry: &Entry, directory: u32, name: &[u8]) -> Result<(), TreeError> {
        let target = ImagePath::parse(&entry.link)?;
        let (folder, last) = target.split().ok_or(PathError::Root)?;
        let found = self
            .tree
            .resolve(folder, Missing::Stop)?
            .ok_or(TreeError::LinkTargetMissing)?;
        self.tree.put_hard_link(directory, name, (found, last))
    }

    fn put_file(
        &mut self,
        entry: &Entry,
        directory: u32,
        name: &[u8],
        attributes: &Attributes,
    ) -> Result<(), PutError> {
        let whole = [(0, entry.size)];
        let pieces = entry.pieces.as_deref().unwrap_or(&whole);
        let extents = self.tree.put_file(directory, name, attributes, entry.size, pieces)?;
        let mut next = 0;
        for extent in &extents {
            let start = u64::from(extent.logical) * BLOCK_BYTES;
            let end = start + u64::from(extent.count) * BLOCK_BYTES;
            let mut at = start;
            while at < end {
                let count = (end - at).min(CHUNK_BYTES);
                next = fill(&mut self.reader, &mut self.buffer[..count as usize], at, pieces, next)?;
                self.write(extent, at - start, count as usize)?;
                at += count;
            }
        }
        Ok(())
    }

    fn write(&mut self, extent: &Extent, skip: u64, count: usize) -> Result<(), DeviceError> {
        let offset = extent.physical * BLOCK_BYTES + skip;
        self.tree.device_mut().write(&self.buffer[..count], offset)
    }

    fn attributes(&mut self, entry: &Entry) -> Attributes {
        let mut extended = BTreeMap::new();
        for (name, value) in &entry.attributes {
            match may_carry(name) {
                true => drop(extended.insert(name.clone(), value.clone())),
                false => self.counts.skipped_attributes += 1,
            }
        }
        Attributes {
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            mtime: entry.mtime,
            atime: entry.atime.unwrap_or(entry.mtime),
            extended,
        }
    }
}

enum PutError {
    Tree(TreeError),
    Tar(TarError),
}

impl<E: Into<TreeError>> From<E> for PutError {
    fn from(error: E) -> Self {
        PutError::Tree(error.into())
    }
}

/// Fills a part of a file from byte `at` on: data from the pieces from `next` on, zeros between them. Answers the first
/// piece that has not ended.
fn fill<R: Read>(
    reader: &mut Reader<R>,
    buffer: &mut [u8],
    at: u64,
    pieces: &[(u64, u64)],
    mut next: usize,
) -> Result<usize, PutError> {
    let end = at + buffer.len() as u64;
    let mut filled = 0;
    while let Some(&(offset, length)) = pieces.get(next)
        && offset < end
    {
        let (from, to) = (offset.max(at), (offset + length).min(end));
        if from < to {
            let (from, to) = ((from - at) as usize, (to - at) as usize);
            buffer[filled..from].fill(0);
            reader.read_data(&mut buffer[from..to]).map_err(PutError::Tar)?;
            filled = to;
        }
        if offset + length > end {
            break;
        }
        next += 1;
    }
    buffer[filled..].fill(0);
    Ok(next)
}

/// Bytes of the disk that an entry takes.
fn needs(entry: &Entry) -> u64 {
    let whole = [(0, entry.size)];
    let pieces = entry.pieces.as_deref().unwrap_or(&whole);
    let lengths = pieces
        .iter()
        .map(|(_, length)| length.div_ceil(BLOCK_BYTES) * BLOCK_BYTES);
    lengths.fold(0, u64::saturating_add)
}

/// How much an error says is missing, if it says that the disk is full.
fn shortage(error: &TreeError) -> Option<u64> {
    match error {
        TreeError::NoBlocks { blocks } => Some(blocks.saturating_mul(BLOCK_BYTES)),
        TreeError::Change(Ext2Error::NoBlocks) => Some(BLOCK_BYTES),
        // There is one for each 16 KiB of disk.
        TreeError::NoInodes => Some(16 << 10),
        _ => None,
    }
}

/// Labels of the host that made the image, and marks of its overlay file system, mean nothing in a guest. Of others only
/// the kinds that ext4 can hold.
fn may_carry(name: &[u8]) -> bool {
    const HELD: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
    const HOST: [&[u8]; 2] = [b"security.selinux", b"trusted.overlay."];
    let held = HELD
        .iter()
        .any(|prefix| name.starts_with(prefix) && name.len() > prefix.len());
    (held && !HOST.iter().any(|prefix| name.starts_with(prefix))) || ACLS.contains(&name)
}
