//! Where the stored bytes of a layer come from: a local file here, a block cache or a decryption elsewhere.
//!
//! Owns the two seams and their local implementation. What is inside of the bytes (tar, ZFile, LSMT) is none of a blob's
//! business; `envelope.rs` and `layer_file.rs` look into them.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{At, Error, Result};
use crate::file_ops::read_exact;

/// Positional, thread-safe read access to the stored bytes of one layer, which never change.
pub trait Blob: Send + Sync + std::fmt::Debug {
    fn len_bytes(&self) -> u64;

    /// Fills `buf` from `offset` on.
    ///
    /// Errors: `Corrupt` with `Damage::ShortRead` where the bytes end inside the range, never zeros; `Io`; `Remote`.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), Error>;

    /// Hint: the range will be read soon. Must not block; a range beyond the end is allowed.
    fn will_read(&self, _offset: u64, _length: u64) {}

    /// Hint: the range did not verify. A cache forgets it, so that the next read brings it anew from where it came.
    fn distrust(&self, _offset: u64, _length: u64) {}

    /// Which local file is behind it, if exactly one is and the blob keeps it open.
    fn file_identity(&self) -> Option<FileIdentity> {
        None
    }

    /// The local file whose bytes are exactly the blob's, if there is one.
    fn file(&self) -> Option<&File> {
        None
    }
}

/// How a path becomes a blob. The layer that comes of it is shared by all who open the same local file.
pub trait Opener: Send + Sync + std::fmt::Debug {
    /// Errors: those of opening a file, `Remote` for what the file names.
    fn open(&self, path: &Path) -> Result<Arc<dyn Blob>, Error>;
}

/// Which file it is, whatever its name: device and inode number. Unique while somebody has the file open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    pub fn of(metadata: &Metadata) -> Self {
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }

    /// Equal to no file and to no other one: for bytes that no file of their own holds. Linux numbers devices with 32
    /// bits, so the device is none.
    pub(crate) fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        FileIdentity {
            device: u64::MAX,
            inode: NEXT.fetch_add(1, Ordering::Relaxed),
        }
    }
}

/// A local file, its length as it was at the open: what is cut off later is an error at the read.
#[derive(Debug)]
pub struct FileBlob {
    path: PathBuf,
    file: File,
    length: u64,
    identity: FileIdentity,
}

impl FileBlob {
    /// Errors: `Io`.
    pub fn open(path: &Path) -> Result<FileBlob> {
        let file = File::open(path).at(path, "open")?;
        let metadata = file.metadata().at(path, "stat")?;
        Ok(Self::of(path, file, &metadata))
    }

    /// Of a file that is open already.
    pub(crate) fn of(path: &Path, file: File, metadata: &Metadata) -> FileBlob {
        FileBlob {
            path: path.to_owned(),
            file,
            length: metadata.len(),
            identity: FileIdentity::of(metadata),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Blob for FileBlob {
    fn len_bytes(&self) -> u64 {
        self.length
    }

    #[inline]
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        read_exact(&self.file, &self.path, buf, offset)
    }

    fn file_identity(&self) -> Option<FileIdentity> {
        Some(self.identity)
    }

    fn file(&self) -> Option<&File> {
        Some(&self.file)
    }
}
