//! Every change that this crate makes to the folder, as one operation each.
//!
//! The seam exists so that a test can stop at the k-th operation, or tear it, and look at what a new process would find
//! (`crash_test.rs`). Reads are not part of it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::FallocateFlags;

/// An implementation may fail at any operation; what it did before must be a state that a killed process can leave.
pub(crate) trait FileOps: Send + Sync + std::fmt::Debug {
    /// Writes a part of `bytes` at `offset`, at least one byte; returns how many.
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// Stores a word of a map. Eight aligned bytes within a page are written at once.
    fn write_word(&self, file: &File, word: u64, offset: u64) -> io::Result<()>;
    fn punch(&self, file: &File, offset: u64, length: u64) -> io::Result<()>;
    fn set_len(&self, file: &File, length: u64) -> io::Result<()>;
    /// An empty file of that name for reading and writing, in place of what was there.
    fn create(&self, path: &Path) -> io::Result<File>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file that may be gone.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The operating system.
#[derive(Debug)]
pub(crate) struct SystemOps;

impl FileOps for SystemOps {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        file.write_at(bytes, offset)
    }

    fn write_word(&self, file: &File, word: u64, offset: u64) -> io::Result<()> {
        file.write_all_at(&word.to_le_bytes(), offset)
    }

    fn punch(&self, file: &File, offset: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(file, flags, offset, length)
        })?)
    }

    fn set_len(&self, file: &File, length: u64) -> io::Result<()> {
        file.set_len(length)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

pub(crate) fn write_all(ops: &dyn FileOps, file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match ops.write(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
