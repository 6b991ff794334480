//! What a layer is known by outside of this node: the SHA-256 of its canonical bytes; and the canonical form as a file.

use std::io::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::canonical::CanonicalReader;
use crate::error::{At, Result};
use crate::layer::Layer;
use crate::writer::create_new;

/// Bytes handled at a time: large enough that system calls do not count, small enough for the second-level cache.
const CHUNK_BYTES: usize = 512 << 10;

/// The identity of a layer's content and form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestReport {
    /// 64 lower-case hexadecimal digits.
    pub digest: String,
    /// Bytes of the canonical form.
    pub size_bytes: u64,
    /// Bytes mapped to data.
    pub data_bytes: u64,
    /// Whether the file is the sparse form; else its own bytes, out of their envelope, are the canonical ones.
    pub sparse: bool,
}

/// What a compaction made.
#[derive(Debug)]
pub struct CompactReport {
    pub layer: Layer,
    pub data_bytes: u64,
}

/// The digest of the layer at `path`. Reads all of its data. Errors: as [`Layer::open`].
pub fn digest(path: &Path) -> Result<DigestReport> {
    digest_layer(&Layer::open(path)?)
}

/// The digest of an open layer. Errors: those of its blob.
pub fn digest_layer(layer: &Layer) -> Result<DigestReport> {
    let mut reader = CanonicalReader::new(layer);
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match reader.read_chunk(&mut chunk)? {
            0 => break,
            count => hash.update(&chunk[..count]),
        }
    }
    Ok(DigestReport {
        digest: hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect(),
        size_bytes: reader.len(),
        data_bytes: layer.data_bytes(),
        sparse: layer.is_sparse(),
    })
}

/// Writes the canonical form of `layer` to a new file at `into` and opens it. Nothing is synced.
///
/// Errors: `Exists` for `into`, `Io`, those of the layer's blob; the file is gone after an error.
pub fn compact(layer: &Layer, into: &Path) -> Result<CompactReport> {
    let mut file = create_new(into)?;
    let copied = copy(layer, &mut file, into).and_then(|()| Layer::open(into));
    let layer = copied.inspect_err(|_| {
        // The error to tell is the first one; a leftover has no trailer and opens as nothing.
        let _ = std::fs::remove_file(into);
    })?;
    Ok(CompactReport {
        data_bytes: layer.data_bytes(),
        layer,
    })
}

fn copy(layer: &Layer, file: &mut std::fs::File, into: &Path) -> Result<()> {
    let mut reader = CanonicalReader::new(layer);
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match reader.read_chunk(&mut chunk)? {
            0 => return Ok(()),
            count => file.write_all(&chunk[..count]).at(into, "write")?,
        }
    }
}
