//! Reading parts of one blob, wherever it is.

use std::fmt::Debug;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;

use crate::error::{Failure, Place, StoreError};

/// Read access to the bytes of one blob. Blocking and thread-safe; not to be called on a thread of an async runtime.
pub trait Ranged: Send + Sync + Debug {
    /// Reads exactly `length` bytes from `offset` on: one attempt, no retry, ended after `timeout`. What is returned is
    /// what was asked for, by length and place; whether the content is right is the caller's to verify.
    ///
    /// Errors: [`StoreError`]; a short body, a wrong part or a replaced object is one of kind `Transient`.
    fn read(&self, offset: u64, length: u64, timeout: Duration) -> Result<Bytes, StoreError>;

    /// Reads all of a blob that has at most `limit_bytes`. Otherwise as `read`.
    fn read_whole(&self, limit_bytes: u64, timeout: Duration) -> Result<Bytes, StoreError>;
}

/// A file. Reads of a network file system that hangs hang too: `timeout` cannot end a system call.
#[derive(Debug)]
pub(crate) struct RangedFile {
    path: PathBuf,
}

impl RangedFile {
    pub fn new(path: &Path) -> RangedFile {
        RangedFile { path: path.to_owned() }
    }

    fn fail(&self, range: Option<(u64, u64)>, failure: Failure) -> StoreError {
        let place = Place {
            store: "file".into(),
            key: self.path.display().to_string(),
            range,
        };
        StoreError::new(place, failure)
    }

    fn open(&self, range: Option<(u64, u64)>) -> Result<(File, u64), StoreError> {
        let open = || {
            let file = File::open(&self.path)?;
            let length = file.metadata()?.len();
            Ok((file, length))
        };
        open().map_err(|e: std::io::Error| self.fail(range, Failure::File).caused_by(e))
    }

    /// Caller: the range is inside the file, as its length was.
    fn fill(&self, file: &File, offset: u64, length: u64, range: Option<(u64, u64)>) -> Result<Bytes, StoreError> {
        let mut buf = vec![0; length as usize];
        file.read_exact_at(&mut buf, offset)
            .map_err(|e| self.fail(range, Failure::File).caused_by(e))?;
        Ok(buf.into())
    }
}

impl Ranged for RangedFile {
    fn read(&self, offset: u64, length: u64, _timeout: Duration) -> Result<Bytes, StoreError> {
        let range = Some((offset, length));
        let (file, size) = self.open(range)?;
        let found = size.saturating_sub(offset);
        if found < length {
            let expected = length;
            return Err(self.fail(range, Failure::Truncated { expected, found }));
        }
        self.fill(&file, offset, length, range)
    }

    fn read_whole(&self, limit_bytes: u64, _timeout: Duration) -> Result<Bytes, StoreError> {
        let (file, found) = self.open(None)?;
        if found > limit_bytes {
            let limit = limit_bytes;
            return Err(self.fail(None, Failure::TooLarge { found, limit }));
        }
        self.fill(&file, 0, found, None)
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::StoreErrorKind;

    const TIMEOUT: Duration = Duration::from_secs(1);

    #[test]
    fn a_file_gives_what_was_asked_for_or_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, b"0123456789").unwrap();
        let file = RangedFile::new(&path);
        assert_eq!(&file.read(3, 4, TIMEOUT).unwrap()[..], b"3456");
        assert_eq!(&file.read_whole(10, TIMEOUT).unwrap()[..], b"0123456789");
        let short = file.read(8, 4, TIMEOUT).unwrap_err();
        assert_eq!(short.failure(), &Failure::Truncated { expected: 4, found: 2 });
        assert_eq!(
            file.read(u64::MAX, 4, TIMEOUT).unwrap_err().kind(),
            StoreErrorKind::Transient
        );
        assert_eq!(file.read_whole(9, TIMEOUT).unwrap_err().kind(), StoreErrorKind::Invalid);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(file.read(0, 1, TIMEOUT).unwrap_err().kind(), StoreErrorKind::NotFound);
    }
}
