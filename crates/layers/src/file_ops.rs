//! Every change that this crate makes to an upper, as one operation each.
//!
//! The seam exists for one reason: a test can stop at the k-th operation, or tear it, and look at what a new process
//! would find (`crash_test.rs`). Reads are not part of it; they change nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, RenameFlags};
use rustix::io::ReadWriteFlags;

use crate::error::{At, Damage, Error, Result};

/// The operations. An implementation may fail at any of them; what it did before it failed must be a state that a
/// killed process can leave behind.
pub(crate) trait FileOps: Send + Sync + std::fmt::Debug {
    /// Writes a part of `bytes` at `offset`, at least one byte; returns how many.
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// Gives the range's blocks back, where the file system can.
    fn punch(&self, file: &File, offset: u64, length: u64) -> io::Result<()>;
    fn set_len(&self, file: &File, length: u64) -> io::Result<()>;
    /// Allocates blocks, so that a later store through a mapping cannot fail.
    fn reserve(&self, file: &File, length: u64) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Gives a file its final name; `AlreadyExists` if that is taken.
    fn publish(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Sets bits of a mapped word. Atomic also when the process is killed: a word is stored at once.
    fn set_bits(&self, word: &AtomicU64, bits: u64) -> io::Result<()>;
    fn clear_bits(&self, word: &AtomicU64, bits: u64) -> io::Result<()>;
}

/// The operating system.
#[derive(Debug)]
pub(crate) struct SystemOps;

impl FileOps for SystemOps {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        file.write_at(bytes, offset)
    }

    fn punch(&self, file: &File, offset: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, flags, offset, length)) {
            // The map already says zero; a file system without holes only keeps the space.
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            outcome => Ok(outcome?),
        }
    }

    fn set_len(&self, file: &File, length: u64) -> io::Result<()> {
        file.set_len(length)
    }

    fn reserve(&self, file: &File, length: u64) -> io::Result<()> {
        Ok(rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length)
        })?)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn publish(&self, from: &Path, to: &Path) -> io::Result<()> {
        let here = rustix::fs::CWD;
        Ok(rustix::fs::renameat_with(here, from, here, to, RenameFlags::NOREPLACE)?)
    }

    // Release pairs with the acquire loads of readers in `map`: who sees the bit sees the data written before it.
    fn set_bits(&self, word: &AtomicU64, bits: u64) -> io::Result<()> {
        word.fetch_or(bits, Ordering::AcqRel);
        Ok(())
    }

    fn clear_bits(&self, word: &AtomicU64, bits: u64) -> io::Result<()> {
        word.fetch_and(!bits, Ordering::AcqRel);
        Ok(())
    }
}

/// Writes all of `bytes`; a short write goes on where it stopped.
pub(crate) fn write_all(
    ops: &dyn FileOps,
    file: &File,
    path: &Path,
    step: &'static str,
    mut bytes: &[u8],
    mut offset: u64,
) -> Result<()> {
    while !bytes.is_empty() {
        match ops.write(file, bytes, offset) {
            Ok(0) => Err(io::Error::from(io::ErrorKind::WriteZero)).at(path, step)?,
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => Err(error).at(path, step)?,
        }
    }
    Ok(())
}

/// Fills `buf` from `offset` on. The end of the file inside the range is damage: a mapped sector that the file does not
/// have must never read as zero.
pub(crate) fn read_exact(file: &File, path: &Path, buf: &mut [u8], offset: u64) -> Result<()> {
    fill(path, buf, offset, |part, at| file.read_at(part, at))
}

/// Whether a read of the file can be begun without waiting for it, as io_uring does. Where not (FUSE, NFS), io_uring may
/// hold up whoever submits.
pub(crate) fn begins_at_once(file: &File) -> bool {
    let mut byte = [0];
    let mut part = [io::IoSliceMut::new(&mut byte)];
    let outcome = rustix::io::preadv2(file, &mut part, 0, ReadWriteFlags::NOWAIT);
    // EAGAIN says that it is not in memory, and that this was found without waiting.
    matches!(outcome, Ok(_) | Err(rustix::io::Errno::AGAIN))
}

/// A short read goes on where it stopped.
fn fill(path: &Path, buf: &mut [u8], offset: u64, read: impl Fn(&mut [u8], u64) -> io::Result<usize>) -> Result<()> {
    let mut done = 0;
    while done < buf.len() {
        let at = offset + done as u64;
        match read(&mut buf[done..], at) {
            Ok(0) => {
                let missing = (buf.len() - done) as u64;
                return Err(Error::corrupt(path, Damage::ShortRead { offset: at, missing }));
            }
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => Err(error).at(path, "read")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_short_read_goes_on_at_the_right_offset() {
        let source: Vec<u8> = (0..100).collect();
        let read = |part: &mut [u8], at: u64| {
            let from = &source[at as usize..];
            let count = part.len().min(7).min(from.len());
            part[..count].copy_from_slice(&from[..count]);
            Ok(count)
        };
        let mut buf = [0; 60];
        fill(Path::new("x"), &mut buf, 30, read).unwrap();
        assert_eq!(buf, source[30..90]);
        let error = fill(Path::new("x"), &mut buf, 50, read).unwrap_err();
        let Error::Corrupt { damage, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(
            damage,
            Damage::ShortRead {
                offset: 100,
                missing: 10
            }
        );
    }
}
