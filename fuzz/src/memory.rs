//! Bytes in memory, as a file with a path and as a blob.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::path::{Path, PathBuf};

use aenv_layers::{Blob, Damage, Error};
use rustix::fs::MemfdFlags;

/// Anonymous memory that others open by its path.
#[derive(Debug)]
pub struct MemoryFile {
    /// Held open: the path is one of this process's descriptors.
    _file: File,
    path: PathBuf,
}

impl MemoryFile {
    /// Panics where the kernel refuses: a fuzzer that cannot make its input has nothing to report.
    pub fn new(bytes: &[u8]) -> MemoryFile {
        let memory = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memfd_create");
        // SAFETY: the descriptor was just made and is owned by nobody else.
        let mut file = unsafe { File::from_raw_fd(memory.into_raw_fd()) };
        file.write_all(bytes).expect("write to memory");
        file.seek(SeekFrom::Start(0)).expect("seek in memory");
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        MemoryFile { _file: file, path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Bytes that are read without a file.
#[derive(Debug)]
pub struct MemoryBlob(pub Vec<u8>);

impl Blob for MemoryBlob {
    fn len_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let bytes = usize::try_from(offset)
            .ok()
            .and_then(|at| self.0.get(at..)?.get(..buf.len()));
        let Some(bytes) = bytes else {
            let missing = buf.len() as u64;
            let damage = Damage::ShortRead { offset, missing };
            return Err(Error::Corrupt {
                path: PathBuf::from("memory"),
                damage,
            });
        };
        buf.copy_from_slice(bytes);
        Ok(())
    }
}
