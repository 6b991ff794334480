//! What a layer may be wrapped in: a tar with one file, a ZFile, or a ZFile in a tar, as upstream's tools and image
//! registries hold them. An envelope is told by its first bytes; names mean nothing.

use std::path::Path;
use std::sync::Arc;

use crate::blob::Blob;
use crate::error::{Damage, Error, Result};
use crate::header::is_lsmt;
use crate::tar;
use crate::zfile::{ZFile, is_zfile};

/// Enough to tell what something is.
const SNIFF_BYTES: usize = 512;

/// The bytes of a layer, out of all envelopes; `blob` itself if there is none.
pub(crate) fn open(path: &Path, blob: Arc<dyn Blob>) -> Result<Arc<dyn Blob>> {
    let Some(start) = sniff(blob.as_ref())? else {
        // Too short for anything; who opens it as a layer will say so.
        return Ok(blob);
    };
    if is_zfile(&start) {
        return Ok(Arc::new(ZFile::open(path, blob)?));
    }
    if !tar::is_tar(&start) {
        return Ok(blob);
    }
    let content = tar::locate(blob.as_ref(), path)?;
    let inner = Arc::new(Part {
        path: path.to_owned(),
        whole: blob,
        offset: content.start,
        length: content.end - content.start,
    });
    match sniff(inner.as_ref())? {
        Some(start) if is_zfile(&start) => Ok(Arc::new(ZFile::open(path, inner)?)),
        _ => Ok(inner),
    }
}

/// Whether a local file holds a layer itself, by its first bytes. False also if it cannot be read: its open will tell.
pub(crate) fn is_local(file: &std::fs::File) -> bool {
    let mut start = [0; SNIFF_BYTES];
    let read = std::os::unix::fs::FileExt::read_exact_at(file, &mut start, 0);
    read.is_ok() && (is_lsmt(&start) || is_zfile(&start) || tar::is_tar(&start))
}

fn sniff(blob: &dyn Blob) -> Result<Option<[u8; SNIFF_BYTES]>> {
    if blob.len_bytes() < SNIFF_BYTES as u64 {
        return Ok(None);
    }
    let mut start = [0; SNIFF_BYTES];
    blob.read_exact_at(&mut start, 0)?;
    Ok(Some(start))
}

/// A range of another blob. The range was checked to lie inside.
#[derive(Debug)]
struct Part {
    path: std::path::PathBuf,
    whole: Arc<dyn Blob>,
    offset: u64,
    length: u64,
}

impl Blob for Part {
    fn len_bytes(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let rest = self.length.saturating_sub(offset);
        if buf.len() as u64 > rest {
            let (offset, missing) = (offset.saturating_add(rest), buf.len() as u64 - rest);
            return Err(Error::corrupt(&self.path, Damage::ShortRead { offset, missing }));
        }
        self.whole.read_exact_at(buf, self.offset + offset)
    }

    fn will_read(&self, offset: u64, length: u64) {
        if offset < self.length {
            self.whole
                .will_read(self.offset + offset, length.min(self.length - offset));
        }
    }

    fn distrust(&self, offset: u64, length: u64) {
        if offset < self.length {
            self.whole
                .distrust(self.offset + offset, length.min(self.length - offset));
        }
    }
}
