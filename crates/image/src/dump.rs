//! Writes the files of a disk as one tar archive, for an image's export: parents before children, names in byte order.
//!
//! Owns: the order and what is left out (sockets, the folder of e2fsck while it is empty). The disk may be one that a guest
//! wrote: it is read by our own reader, and by e2fsck in a process of its own where the journal must be replayed first.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use aenv_layers::Stack;

use crate::device::{BLOCK_BYTES, Device, DeviceError};
use crate::ext4::{Attributes, Ext4Error, Extent, FileType, Inode, ROOT_INO, Volume};
use crate::programs::{ProgramError, replay_journal};
use crate::tar::{Entry, Kind, PATH_BYTES_MAX, Writer};
use crate::tree::RESCUE_FOLDER;

/// Files of one disk.
const FILES_MAX: u64 = 20_000_000;
const CHUNK_BYTES: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    #[error("cannot open the layers")]
    Layers(#[source] aenv_layers::Error),
    #[error("cannot prepare the disk")]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Read(#[from] Ext4Error),
    #[error("cannot write the archive")]
    Write(#[from] io::Error),
    #[error("{}: a path has more than {PATH_BYTES_MAX} bytes", String::from_utf8_lossy(path))]
    PathTooLong { path: Vec<u8> },
    #[error("the disk has more than {FILES_MAX} files")]
    TooMany,
    #[error(
        "{}: with it the files are larger than the limit of {limit} bytes",
        String::from_utf8_lossy(path)
    )]
    TooLarge { path: Vec<u8>, limit: u64 },
}

/// Which disk to write out.
#[derive(Debug, Clone)]
pub struct Source {
    /// Bottom first.
    pub layers: Vec<PathBuf>,
    pub size_bytes: u64,
    /// Most bytes of files, holes counted: a guest may have made a file of any size that takes no room.
    pub max_bytes: u64,
    /// Takes a copy of the disk where its journal must be replayed; nothing is left in it.
    pub scratch: PathBuf,
}

/// What was written.
#[derive(Debug, Clone, Copy, Default)]
pub struct DumpReport {
    pub files: u64,
    /// Of regular files, with their holes.
    pub content_bytes: u64,
    pub skipped_sockets: u64,
    /// Extended attributes that no archive can hold: those with a `=` in their names.
    pub skipped_attributes: u64,
}

/// Writes the tree of the disk to `sink`. Errors: see [`DumpError`]; what was written is no archive then.
pub fn dump<W: Write>(source: &Source, sink: W) -> Result<DumpReport, DumpError> {
    let device = open(source)?;
    let volume = Volume::open(&device)?;
    let mut dump = Dump {
        volume: &volume,
        writer: Writer::new(sink),
        linked: HashMap::new(),
        entered: HashSet::from([ROOT_INO]),
        max_bytes: source.max_bytes,
        report: DumpReport::default(),
        buffer: vec![0; CHUNK_BYTES],
    };
    dump.tree()?;
    let report = dump.report;
    dump.writer.finish()?;
    Ok(report)
}

fn open(source: &Source) -> Result<Device, DumpError> {
    let device = stacked(&source.layers, source.size_bytes, &source.scratch)?;
    if !Volume::open(&device)?.needs_recovery() {
        return Ok(device);
    }
    let mut device = device;
    materialise(&mut device)?;
    replay_journal(device.scratch())?;
    device.adopt()?;
    Ok(device)
}

/// The disk that layers make, changes to it going to an unnamed file in `scratch`.
pub fn stacked(layers: &[PathBuf], size_bytes: u64, scratch: &Path) -> Result<Device, DumpError> {
    let stack = Stack::open(layers, None, size_bytes).map_err(DumpError::Layers)?;
    Ok(Device::new(size_bytes, Some(stack), scratch)?)
}

/// Copies all that is not zero into the scratch file, for programs that read it.
pub fn materialise(device: &mut Device) -> Result<(), DeviceError> {
    let mut chunk = vec![0; CHUNK_BYTES];
    for at in (0..device.size()).step_by(CHUNK_BYTES) {
        let count = usize::try_from(device.size() - at).map_or(CHUNK_BYTES, |rest| rest.min(CHUNK_BYTES));
        if device.parent_is_zero(at, count as u64) {
            continue;
        }
        device.read(&mut chunk[..count], at)?;
        let blocks = chunk[..count].chunks(BLOCK_BYTES as usize);
        for (number, block) in blocks
            .enumerate()
            .filter(|(_, block)| block.iter().any(|&byte| byte != 0))
        {
            device.write(block, at + number as u64 * BLOCK_BYTES)?;
        }
    }
    Ok(())
}

struct Dump<'a, W: Write> {
    volume: &'a Volume<'a>,
    writer: Writer<W>,
    /// First name of each inode that has several.
    linked: HashMap<u32, Vec<u8>>,
    /// Directories that were listed: a damaged one may contain itself.
    entered: HashSet<u32>,
    max_bytes: u64,
    report: DumpReport,
    buffer: Vec<u8>,
}

impl<W: Write> Dump<'_, W> {
    fn tree(&mut self) -> Result<(), DumpError> {
        let root = self.volume.inode(ROOT_INO)?;
        self.entry(b"./", ROOT_INO, &root)?;
        let mut todo = self.children(b"", ROOT_INO, &root)?;
        while let Some((path, ino)) = todo.pop() {
            let inode = self.volume.inode(ino)?;
            if inode.file_type() != Some(FileType::Directory) {
                self.entry(&path, ino, &inode)?;
                continue;
            }
            if !self.entered.insert(ino) {
                let what = "a second name for the directory";
                return Err(Ext4Error::Damaged { what, ino }.into());
            }
            let children = self.children(&path, ino, &inode)?;
            if path == RESCUE_FOLDER && children.is_empty() {
                continue;
            }
            self.entry(&[&path[..], b"/"].concat(), ino, &inode)?;
            todo.extend(children);
        }
        Ok(())
    }

    /// Paths and inodes of a directory, the last one first.
    fn children(&self, folder: &[u8], ino: u32, inode: &Inode) -> Result<Vec<(Vec<u8>, u32)>, DumpError> {
        let mut entries = self.volume.entries(ino, inode)?;
        entries.sort_unstable_by(|one, other| other.cmp(one));
        let separator: &[u8] = if folder.is_empty() { b"" } else { b"/" };
        let mut children = Vec::with_capacity(entries.len());
        for (name, ino) in entries {
            let path = [folder, separator, &name].concat();
            if path.len() >= PATH_BYTES_MAX {
                return Err(DumpError::PathTooLong { path });
            }
            children.push((path, ino));
        }
        Ok(children)
    }

    fn entry(&mut self, path: &[u8], ino: u32, inode: &Inode) -> Result<(), DumpError> {
        let damaged = |what| Ext4Error::Damaged { what, ino };
        self.report.files += 1;
        if self.report.files > FILES_MAX {
            return Err(DumpError::TooMany);
        }
        let kind = match inode.file_type().ok_or(damaged("the type"))? {
            FileType::Regular => Kind::Regular,
            FileType::Directory => Kind::Directory,
            FileType::Symlink => Kind::Symlink,
            FileType::CharDevice => Kind::CharDevice,
            FileType::BlockDevice => Kind::BlockDevice,
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => {
                self.report.files -= 1;
                self.report.skipped_sockets += 1;
                return Ok(());
            }
        };
        let mut entry = self.describe(path, kind, ino, inode)?;
        if kind != Kind::Directory && inode.links() > 1 {
            if let Some(first) = self.linked.get(&ino) {
                entry = Entry {
                    kind: Kind::HardLink,
                    link: first.clone(),
                    size: 0,
                    ..entry
                };
                return Ok(self.writer.entry(&entry)?);
            }
            self.linked.insert(ino, path.to_vec());
        }
        if self.report.content_bytes.saturating_add(entry.size) > self.max_bytes {
            let (path, limit) = (path.to_vec(), self.max_bytes);
            return Err(DumpError::TooLarge { path, limit });
        }
        self.writer.entry(&entry)?;
        if kind == Kind::Regular {
            self.content(ino, inode)?;
        }
        Ok(())
    }

    fn attributes(&mut self, ino: u32, inode: &Inode) -> Result<Attributes, DumpError> {
        let mut attributes = self.volume.attributes(ino, inode)?;
        let found = attributes.len();
        attributes.retain(|name, _| !name.contains(&b'='));
        self.report.skipped_attributes += (found - attributes.len()) as u64;
        Ok(attributes)
    }

    fn describe(&mut self, path: &[u8], kind: Kind, ino: u32, inode: &Inode) -> Result<Entry, DumpError> {
        let link = match kind {
            Kind::Symlink => self.volume.target(ino, inode)?,
            _ => Vec::new(),
        };
        let (major, minor) = match kind {
            Kind::CharDevice | Kind::BlockDevice => inode.device(),
            _ => (0, 0),
        };
        Ok(Entry {
            kind,
            path: path.to_vec(),
            link,
            mode: inode.mode() & 0o7777,
            uid: inode.uid(),
            gid: inode.gid(),
            mtime: inode.mtime(),
            atime: None,
            size: if kind == Kind::Regular { inode.size() } else { 0 },
            pieces: None,
            major,
            minor,
            attributes: self.attributes(ino, inode)?,
        })
    }

    /// The file's bytes, holes as zeros.
    fn content(&mut self, ino: u32, inode: &Inode) -> Result<(), DumpError> {
        let size = inode.size();
        self.report.content_bytes += size;
        let mut at = 0;
        for extent in self.volume.extents(ino, inode)? {
            let start = u64::from(extent.logical) * BLOCK_BYTES;
            let end = (start + u64::from(extent.count) * BLOCK_BYTES).min(size);
            self.zeros(start.min(size).saturating_sub(at))?;
            at = at.max(start.min(size));
            while at < end {
                at += self.part(&extent, at - start, end - at)?;
            }
        }
        self.zeros(size - at)
    }

    fn part(&mut self, extent: &Extent, skip: u64, rest: u64) -> Result<u64, DumpError> {
        let count = rest.min(CHUNK_BYTES as u64) as usize;
        // Reads whole sectors; the file may end inside of one.
        let whole = count.next_multiple_of(512);
        self.volume.read_extent(extent, skip, &mut self.buffer[..whole])?;
        self.writer.data(&self.buffer[..count])?;
        Ok(count as u64)
    }

    fn zeros(&mut self, mut count: u64) -> Result<(), DumpError> {
        let zeros = [0; 64 << 10];
        while count > 0 {
            let part = count.min(zeros.len() as u64);
            self.writer.data(&zeros[..part as usize])?;
            count -= part;
        }
        Ok(())
    }
}
