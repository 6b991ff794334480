//! Reading everything of a blob and saying what is wrong with it: the digest of its bytes, its block list, and what is
//! inside (encryption, ZFile, LSMT).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_layers::{Blob, Canonical, FileBlob, Layer};
use aenv_store::{Descriptor, Digest, Source};
use serde::Serialize;

use crate::error::Failed;
use crate::patience::Patience;
use crate::progress::Progress;
use crate::stored::{Access, digest_of, expect};

/// What is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// A descriptor, and what it describes.
    Descriptor(PathBuf),
    /// A file; without a digest only its inside can be wrong.
    File { path: PathBuf, digest: Option<Digest> },
}

/// One command `verify`.
#[derive(Debug, Clone)]
pub struct Verification {
    pub subject: Subject,
    pub stores: Option<PathBuf>,
    /// There is a layer inside; else only bytes are looked at.
    pub is_layer: bool,
    pub patience: Patience,
}

/// What was found to be right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verified {
    pub ok: bool,
    /// Of what it is named by: the stored bytes, or the canonical ones of a layer in its sparse form.
    pub digest: Digest,
    pub size_bytes: u64,
    /// Blocks that were compared with a block list.
    pub blocks: Option<u64>,
    /// Runs of the layer's index.
    pub segments: Option<u64>,
    /// Bytes of data of the layer.
    pub data_bytes: Option<u64>,
}

/// Verifies. Errors: the first damage, naming the file; kind `corrupt`.
pub fn verify(verification: &Verification, progress: &Progress) -> Result<Verified, Failed> {
    match &verification.subject {
        Subject::Descriptor(path) => described(verification, path, progress),
        Subject::File { path, digest } => file(verification, path, *digest, progress),
    }
}

impl Verification {
    fn access(&self) -> Access<'_> {
        Access {
            stores: self.stores.as_deref(),
            patience: self.patience,
        }
    }
}

fn described(verification: &Verification, path: &Path, progress: &Progress) -> Result<Verified, Failed> {
    let descriptor = Descriptor::read(path)?;
    if let Source::File { path } = &descriptor.source {
        return file(verification, path, Some(descriptor.digest), progress);
    }
    let access = verification.access();
    let (stored, count) = access.remote(path, &descriptor)?;
    let found = digest_of(stored.as_ref(), progress)?;
    expect(path, descriptor.digest, found)?;
    let mut verified = bare(found, descriptor.size_bytes);
    verified.blocks = count;
    if verification.is_layer {
        // The digest has shown that the bytes are those that were published: its ends and its index are enough here.
        note_layer(&mut verified, &Layer::open_blob(path, access.opened(path, &stored)?)?);
    }
    Ok(verified)
}

fn file(
    verification: &Verification,
    path: &Path,
    expected: Option<Digest>,
    progress: &Progress,
) -> Result<Verified, Failed> {
    let stored: Arc<dyn Blob> = Arc::new(FileBlob::open(path)?);
    if !verification.is_layer {
        let found = digest_of(stored.as_ref(), progress)?;
        expected.map_or(Ok(()), |expected| expect(path, expected, found))?;
        return Ok(bare(found, stored.len_bytes()));
    }
    let layer = Layer::open_blob(path, verification.access().opened(path, &stored)?)?;
    // A sparse file goes by the name of its dense form.
    let named: Arc<dyn Blob> = match layer.is_sparse() {
        true => Arc::new(Canonical::new(&layer)),
        false => stored,
    };
    let found = digest_of(named.as_ref(), progress)?;
    expected.map_or(Ok(()), |expected| expect(path, expected, found))?;
    let mut verified = bare(found, named.len_bytes());
    if !layer.is_sparse() {
        // Through all envelopes, so that each of their checksums is looked at.
        digest_of(&Canonical::new(&layer), progress)?;
    }
    note_layer(&mut verified, &layer);
    Ok(verified)
}

fn bare(digest: Digest, size_bytes: u64) -> Verified {
    Verified {
        ok: true,
        digest,
        size_bytes,
        blocks: None,
        segments: None,
        data_bytes: None,
    }
}

fn note_layer(verified: &mut Verified, layer: &Layer) {
    verified.segments = Some(layer.segments().len() as u64);
    verified.data_bytes = Some(layer.data_bytes());
}
