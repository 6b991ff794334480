//! Reading everything of a blob and saying what is wrong with it: the digest of its bytes, its block list, and what is
//! inside (encryption, ZFile, LSMT).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_layers::{Blob, Canonical, FileBlob, Layer};
use aenv_store::{BlockList, Cipher, DecryptedBlob, Descriptor, Digest, Hasher, Source, Stores};
use serde::Serialize;

use crate::error::Failed;
use crate::patience::Patience;
use crate::progress::Progress;
use crate::remote::RemoteBlob;

const CHUNK_BYTES: usize = 1 << 20;

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
    /// The configuration of stores, for the file at `path`; opened only where it is needed, since a node whose repository
    /// is a directory may have none.
    fn stores(&self, path: &Path) -> Result<Stores, Failed> {
        let no_stores = || Failed::NoStores { path: path.to_owned() };
        Ok(Stores::open(self.stores.as_deref().ok_or_else(no_stores)?)?)
    }

    fn cipher(&self, path: &Path) -> Result<Cipher, Failed> {
        let cipher = self.stores(path)?.cipher();
        cipher.ok_or_else(|| Failed::Encrypted { path: path.to_owned() })
    }
}

fn described(verification: &Verification, path: &Path, progress: &Progress) -> Result<Verified, Failed> {
    let descriptor = Descriptor::read(path)?;
    if let Source::File { path } = &descriptor.source {
        return file(verification, path, Some(descriptor.digest), progress);
    }
    let stores = verification.stores(path)?;
    let blocks = block_list(path, &descriptor, &stores, verification.patience)?;
    let count = blocks.as_ref().map(BlockList::blocks);
    let ranged = stores.ranged(&descriptor.source)?;
    let remote = RemoteBlob::new(path, &descriptor, ranged, blocks, verification.patience);
    let stored: Arc<dyn Blob> = Arc::new(remote);
    let found = digest_of(stored.as_ref(), progress)?;
    expect(path, descriptor.digest, found)?;
    let mut verified = bare(found, descriptor.size_bytes);
    verified.blocks = count;
    if verification.is_layer {
        // The digest has shown that the bytes are those that were published: its ends and its index are enough here.
        note_layer(
            &mut verified,
            &Layer::open_blob(path, opened(verification, path, &stored)?)?,
        );
    }
    Ok(verified)
}

fn block_list(
    path: &Path,
    descriptor: &Descriptor,
    stores: &Stores,
    patience: Patience,
) -> Result<Option<BlockList>, Failed> {
    let (Some(source), Some(expected)) = (&descriptor.blocks, descriptor.blocks_digest) else {
        return Ok(None);
    };
    let limit = BlockList::encoded_bytes(descriptor.size_bytes);
    let ranged = stores.ranged(source)?;
    let bytes = patience.retry(|| ranged.read_whole(limit, patience.attempt_for(limit)))?;
    let (path, found) = (path.to_owned(), Digest::of(&bytes));
    if found != expected {
        return Err(Failed::WrongBlocks { path, expected, found });
    }
    let list = BlockList::decode(&bytes).map_err(|source| Failed::BlockList {
        path: path.clone(),
        source,
    })?;
    if list.size_bytes() != descriptor.size_bytes {
        let (expected, found) = (descriptor.size_bytes, list.size_bytes());
        return Err(Failed::WrongSize { path, expected, found });
    }
    Ok(Some(list))
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
    let layer = Layer::open_blob(path, opened(verification, path, &stored)?)?;
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

/// What is inside of bytes that may be encrypted: they say so themselves.
fn opened(verification: &Verification, path: &Path, stored: &Arc<dyn Blob>) -> Result<Arc<dyn Blob>, Failed> {
    let mut start = [0; 8];
    if stored.len_bytes() >= start.len() as u64 {
        stored.read_exact_at(&mut start, 0)?;
    }
    if !DecryptedBlob::is_start(&start) {
        return Ok(stored.clone());
    }
    let cipher = verification.cipher(path)?;
    Ok(Arc::new(DecryptedBlob::open(path, stored.clone(), &cipher)?))
}

fn digest_of(blob: &dyn Blob, progress: &Progress) -> Result<Digest, Failed> {
    let length = blob.len_bytes();
    progress.expect(length);
    let mut hasher = Hasher::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut offset = 0;
    while offset < length {
        let part = &mut chunk[..(length - offset).min(CHUNK_BYTES as u64) as usize];
        blob.read_exact_at(part, offset)?;
        hasher.update(part);
        offset += part.len() as u64;
        progress.advance(part.len() as u64);
    }
    Ok(hasher.finish())
}

fn expect(path: &Path, expected: Digest, found: Digest) -> Result<(), Failed> {
    let path = path.to_owned();
    match found == expected {
        true => Ok(()),
        false => Err(Failed::WrongDigest { path, expected, found }),
    }
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
