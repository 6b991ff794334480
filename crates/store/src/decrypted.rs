//! The plain bytes of an encrypted layer, decrypted as they are read.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_layers::{Blob, Damage, Error, FileIdentity};

use crate::cipher::{CHUNK_BYTES, Cipher, CipherError, FileKey, HEADER_BYTES, MAGIC, TAG_BYTES};

const STORED_CHUNK_BYTES: u64 = (CHUNK_BYTES + TAG_BYTES) as u64;

/// A blob over the stored bytes of another one. A chunk that does not verify is an error, never bytes.
#[derive(Debug)]
pub struct DecryptedBlob {
    path: PathBuf,
    stored: Arc<dyn Blob>,
    key: FileKey,
    shape: Shape,
}

/// How the chunks lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    plain_bytes: u64,
    chunks: u64,
}

impl Shape {
    /// The shape of `stored_bytes` bytes; none if no encrypted file has that length.
    fn of(stored_bytes: u64) -> Option<Shape> {
        let body = stored_bytes.checked_sub(HEADER_BYTES)?;
        let chunks = body.div_ceil(STORED_CHUNK_BYTES);
        let last = body - chunks.checked_sub(1)? * STORED_CHUNK_BYTES;
        // Only a file without any content has a chunk without any.
        let least = TAG_BYTES as u64 + u64::from(chunks > 1);
        (last >= least).then(|| Shape {
            plain_bytes: body - chunks * TAG_BYTES as u64,
            chunks,
        })
    }

    /// Stored bytes of a chunk, tag included.
    fn stored_bytes(&self, chunk: u64) -> usize {
        let start = chunk * CHUNK_BYTES as u64;
        let plain = (self.plain_bytes - start).min(CHUNK_BYTES as u64);
        plain as usize + TAG_BYTES
    }
}

impl DecryptedBlob {
    /// Whether bytes that begin with `start` claim to be encrypted; at least 8 are needed to tell.
    pub fn is_start(start: &[u8]) -> bool {
        start.starts_with(MAGIC)
    }

    /// Opens the encrypted bytes `stored`; `path` is for the errors. Reads the header and the last chunk, so that a wrong
    /// key and a file that was cut off are found here.
    ///
    /// Errors: `Remote` with a [`CipherError`]; those of `stored`.
    pub fn open(path: &Path, stored: Arc<dyn Blob>, cipher: &Cipher) -> Result<DecryptedBlob, Error> {
        let length = stored.len_bytes();
        let shape = Shape::of(length).ok_or_else(|| fail(path, CipherError::Length { length }))?;
        let mut header = Box::new([0; HEADER_BYTES as usize]);
        stored.read_exact_at(header.as_mut(), 0)?;
        let key = cipher.open_header(&header).map_err(|e| fail(path, e))?;
        let blob = DecryptedBlob {
            path: path.to_owned(),
            stored,
            key,
            shape,
        };
        blob.with_chunk(shape.chunks - 1, &mut Vec::new(), |_| ())?;
        Ok(blob)
    }

    /// Where the chunks that hold a range of plain bytes are stored; none if it has no bytes.
    fn stored_range(&self, offset: u64, length: u64) -> Option<Range<u64>> {
        if length == 0 || offset >= self.shape.plain_bytes {
            return None;
        }
        let end = offset.saturating_add(length).min(self.shape.plain_bytes);
        let stored = |chunk: u64| HEADER_BYTES + chunk * STORED_CHUNK_BYTES;
        Some(stored(offset / CHUNK_BYTES as u64)..stored(end.div_ceil(CHUNK_BYTES as u64)))
    }

    /// Reads and decrypts a chunk into `scratch` and shows its plain bytes.
    fn with_chunk<T>(&self, chunk: u64, scratch: &mut Vec<u8>, show: impl FnOnce(&[u8]) -> T) -> Result<T, Error> {
        scratch.resize(self.shape.stored_bytes(chunk), 0);
        let offset = HEADER_BYTES + chunk * STORED_CHUNK_BYTES;
        self.stored.read_exact_at(scratch, offset)?;
        let last = chunk + 1 == self.shape.chunks;
        let plain = self.key.open(chunk, last, scratch);
        plain.map(|plain| show(plain)).map_err(|e| fail(&self.path, e))
    }
}

impl Blob for DecryptedBlob {
    fn len_bytes(&self) -> u64 {
        self.shape.plain_bytes
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let available = self.shape.plain_bytes.saturating_sub(offset);
        if buf.len() as u64 > available {
            let (path, missing) = (self.path.clone(), buf.len() as u64 - available);
            let damage = Damage::ShortRead {
                offset: self.shape.plain_bytes,
                missing,
            };
            return Err(Error::Corrupt { path, damage });
        }
        let (mut at, mut rest) = (offset, buf);
        let mut scratch = Vec::new();
        while !rest.is_empty() {
            let skip = (at % CHUNK_BYTES as u64) as usize;
            let (part, tail) = rest.split_at_mut(rest.len().min(CHUNK_BYTES - skip));
            self.with_chunk(at / CHUNK_BYTES as u64, &mut scratch, |plain| {
                part.copy_from_slice(&plain[skip..skip + part.len()]);
            })?;
            at += part.len() as u64;
            rest = tail;
        }
        Ok(())
    }

    fn will_read(&self, offset: u64, length: u64) {
        if let Some(stored) = self.stored_range(offset, length) {
            self.stored.will_read(stored.start, stored.end - stored.start);
        }
    }

    fn distrust(&self, offset: u64, length: u64) {
        if let Some(stored) = self.stored_range(offset, length) {
            self.stored.distrust(stored.start, stored.end - stored.start);
        }
    }

    fn file_identity(&self) -> Option<FileIdentity> {
        self.stored.file_identity()
    }
}

fn fail(path: &Path, error: CipherError) -> Error {
    Error::Remote {
        path: path.to_owned(),
        source: Box::new(error),
    }
}

#[cfg(test)]
#[path = "cipher_test.rs"]
mod test;
