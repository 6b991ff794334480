//! The block device that a conversion works on: the parents' stack below, a sparse scratch file above.
//!
//! Owns: which blocks were written, and the rule that a block is read from where it was last written. Does not own: what
//! the blocks mean, and the layer that is made of them. The scratch file has no name, so that nothing can be left behind.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use aenv_layers::Stack;
use rustix::fs::{Mode, OFlags, SeekFrom};

/// Block size of every file system here, and the unit of what a layer takes over.
pub const BLOCK_BYTES: u64 = 4096;
const BLOCK: usize = BLOCK_BYTES as usize;

#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("cannot {step} the scratch file in {}", folder.display())]
    Scratch {
        folder: PathBuf,
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot read the parent layers")]
    Parent(#[source] aenv_layers::Error),
    #[error("offset {offset} with {length} bytes is outside of the disk of {size} bytes")]
    Outside { offset: u64, length: u64, size: u64 },
}

/// A disk of which only what differs from the parent is stored.
#[derive(Debug)]
pub struct Device {
    size: u64,
    parent: Option<Stack>,
    scratch: File,
    folder: PathBuf,
    /// One bit a block.
    dirty: Vec<u64>,
}

impl Device {
    /// A disk of `size` bytes (whole blocks) over `parent`; `folder` takes the scratch file. Errors: `Scratch`.
    pub fn new(size: u64, parent: Option<Stack>, folder: &Path) -> Result<Device, DeviceError> {
        let scratch = unnamed_file(folder).map_err(|source| scratch_error(folder, "create", source))?;
        scratch
            .set_len(size)
            .map_err(|source| scratch_error(folder, "enlarge", source))?;
        let blocks = size / BLOCK_BYTES;
        Ok(Device {
            size,
            parent,
            scratch,
            folder: folder.to_owned(),
            dirty: vec![0; usize::try_from(blocks.div_ceil(64)).unwrap_or(usize::MAX)],
        })
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn blocks(&self) -> u64 {
        self.size / BLOCK_BYTES
    }

    /// For a program that writes to it by itself; see [`Device::adopt`].
    pub fn scratch(&self) -> &File {
        &self.scratch
    }

    /// Takes over all that another program wrote to the scratch file. Errors: `Scratch`.
    pub fn adopt(&mut self) -> Result<(), DeviceError> {
        let mut at = 0;
        while at < self.size {
            let start = match rustix::fs::seek(&self.scratch, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(scratch_error(&self.folder, "scan", error.into())),
            };
            let end = rustix::fs::seek(&self.scratch, SeekFrom::Hole(start))
                .map_err(|error| scratch_error(&self.folder, "scan", error.into()))?;
            self.mark(start / BLOCK_BYTES, end.min(self.size).div_ceil(BLOCK_BYTES));
            at = end;
        }
        Ok(())
    }

    /// Fills `buf`; offset and length are multiples of 512. Errors: `Outside`, `Scratch`, `Parent`.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), DeviceError> {
        self.check(offset, buf.len())?;
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let (dirty, end) = self.run(at / BLOCK_BYTES, (offset + buf.len() as u64).div_ceil(BLOCK_BYTES));
            let count = usize::try_from(end * BLOCK_BYTES - at).map_or(buf.len() - done, |n| n.min(buf.len() - done));
            let part = &mut buf[done..done + count];
            match dirty {
                true => self
                    .scratch
                    .read_exact_at(part, at)
                    .map_err(|source| scratch_error(&self.folder, "read", source))?,
                false => self.read_parent(part, at)?,
            }
            done += count;
        }
        Ok(())
    }

    /// What the parents have there; zeros where there is no parent. Errors: `Parent`.
    pub fn read_parent(&self, buf: &mut [u8], offset: u64) -> Result<(), DeviceError> {
        match &self.parent {
            Some(stack) => stack.read_at(buf, offset).map_err(DeviceError::Parent),
            None => {
                buf.fill(0);
                Ok(())
            }
        }
    }

    /// Whether the parents surely have zeros there, by their indexes alone.
    pub fn parent_is_zero(&self, offset: u64, length: u64) -> bool {
        self.parent.as_ref().is_none_or(|stack| stack.is_zero(offset, length))
    }

    /// Writes any bytes. Errors: `Outside`, `Scratch` (kind `StorageFull` where the host's disk is full), `Parent`.
    pub fn write(&mut self, data: &[u8], offset: u64) -> Result<(), DeviceError> {
        self.check(offset, data.len())?;
        let end = offset + data.len() as u64;
        // A block that is written in part is completed from below first.
        for block in [offset / BLOCK_BYTES, end / BLOCK_BYTES] {
            let whole = block * BLOCK_BYTES >= offset && (block + 1) * BLOCK_BYTES <= end;
            let touched = block * BLOCK_BYTES < end && (block + 1) * BLOCK_BYTES > offset;
            if touched && !whole && !self.is_dirty(block) {
                let mut old = [0u8; BLOCK];
                self.read_parent(&mut old, block * BLOCK_BYTES)?;
                self.write_scratch(&old, block * BLOCK_BYTES)?;
                self.mark(block, block + 1);
            }
        }
        self.write_scratch(data, offset)?;
        self.mark(offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        Ok(())
    }

    /// The next run of written blocks at or after `from`: first and one past the last.
    pub fn next_dirty(&self, from: u64) -> Option<(u64, u64)> {
        if from >= self.blocks() {
            return None;
        }
        let (dirty, end) = self.run(from, self.blocks());
        let start = if dirty { from } else { end };
        (start < self.blocks()).then(|| (start, self.run(start, self.blocks()).1))
    }

    /// Forgets that the blocks were written: their content no longer matters.
    pub fn forget(&mut self, start: u64, end: u64) {
        for block in start..end.min(self.blocks()) {
            // Whole words at a time: free space is most of a disk.
            if block % 64 == 0 && self.dirty[(block / 64) as usize] == 0 {
                continue;
            }
            self.dirty[(block / 64) as usize] &= !(1 << (block % 64));
        }
    }

    fn write_scratch(&self, data: &[u8], offset: u64) -> Result<(), DeviceError> {
        self.scratch
            .write_all_at(data, offset)
            .map_err(|source| scratch_error(&self.folder, "write", source))
    }

    fn check(&self, offset: u64, length: usize) -> Result<(), DeviceError> {
        let length = length as u64;
        match offset.checked_add(length) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(DeviceError::Outside {
                offset,
                length,
                size: self.size,
            }),
        }
    }

    fn is_dirty(&self, block: u64) -> bool {
        self.dirty[(block / 64) as usize] >> (block % 64) & 1 == 1
    }

    fn mark(&mut self, start: u64, end: u64) {
        for block in start..end {
            self.dirty[(block / 64) as usize] |= 1 << (block % 64);
        }
    }

    /// Whether `block` is dirty, and up to where its neighbours are the same (at most `limit`).
    fn run(&self, block: u64, limit: u64) -> (bool, u64) {
        let dirty = self.is_dirty(block);
        let flip = if dirty { 0 } else { u64::MAX };
        let mut at = block;
        while at < limit {
            // Bits that are one where the state is the other one.
            let other = (!self.dirty[(at / 64) as usize] ^ flip) >> (at % 64);
            if other != 0 {
                return (dirty, (at + u64::from(other.trailing_zeros())).min(limit));
            }
            at = (at / 64 + 1) * 64;
        }
        (dirty, limit)
    }
}

/// A file without a name in `folder`: gone with the last descriptor, however the process ends.
pub fn unnamed_file(folder: &Path) -> io::Result<File> {
    let folder = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::from_raw_mode(0o600)) {
        Ok(file) => Ok(File::from(file)),
        // Some file systems (overlay of older kernels, FUSE) cannot do this: for a moment it has a name then.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => named_for_a_moment(folder),
        Err(error) => Err(error.into()),
    }
}

fn named_for_a_moment(folder: &Path) -> io::Result<File> {
    let path = folder.join(format!(".scratch.{}.partial", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

fn scratch_error(folder: &Path, step: &'static str, source: io::Error) -> DeviceError {
    DeviceError::Scratch {
        folder: folder.to_owned(),
        step,
        source,
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn device(blocks: u64) -> Device {
        Device::new(blocks * BLOCK_BYTES, None, &std::env::temp_dir()).unwrap()
    }

    #[test]
    fn a_partial_write_keeps_the_rest_of_the_block() {
        let mut device = device(4);
        device.write(&[7; 8192], 0).unwrap();
        device.write(&[9; 10], 4090).unwrap();
        let mut block = [0; 8192];
        device.read(&mut block, 0).unwrap();
        assert_eq!(block[4089..4101], [7, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 7]);
    }

    #[test]
    fn runs_of_written_blocks_are_found_over_word_borders() {
        let mut device = device(300);
        device.write(&[1; 4096 * 70], 60 * BLOCK_BYTES).unwrap();
        device.write(&[1; 1], 299 * BLOCK_BYTES).unwrap();
        assert_eq!(device.next_dirty(0), Some((60, 130)));
        assert_eq!(device.next_dirty(130), Some((299, 300)));
        assert_eq!(device.next_dirty(300), None);
        device.forget(61, 299);
        assert_eq!(device.next_dirty(0), Some((60, 61)));
    }

    #[test]
    fn a_file_that_had_a_name_leaves_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = named_for_a_moment(folder.path()).unwrap();
        file.write_all_at(b"x", 100).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_end_of_the_disk_is_a_border() {
        let mut device = device(2);
        assert!(matches!(device.write(&[0; 2], 8191), Err(DeviceError::Outside { .. })));
        assert!(matches!(
            device.read(&mut [0; 512], u64::MAX),
            Err(DeviceError::Outside { .. })
        ));
    }
}
