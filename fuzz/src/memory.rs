//! A file that has a path but no disk behind it.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;

/// Anonymous memory that others open by its path.
#[derive(Debug)]
pub struct MemoryFile {
    file: File,
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
        MemoryFile { file, path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Cuts the file, as if somebody did so under an open layer.
    pub fn cut(&self, length: u64) {
        self.file.set_len(length).expect("truncate memory");
    }
}
