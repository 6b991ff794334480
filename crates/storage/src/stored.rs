//! Reaching the stored bytes of a blob that is there already, whole, and what is inside of them.

use std::path::Path;
use std::sync::Arc;

use aenv_layers::Blob;
use aenv_store::{BlockList, Cipher, DecryptedBlob, Descriptor, Digest, Hasher, Stores};

use crate::error::Failed;
use crate::patience::Patience;
use crate::progress::Progress;
use crate::remote::RemoteBlob;

const CHUNK_BYTES: usize = 1 << 20;

/// With what stored bytes are reached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access<'a> {
    pub stores: Option<&'a Path>,
    pub patience: Patience,
}

impl Access<'_> {
    /// The configuration of stores, for the file at `path`; opened only where it is needed, since a node whose repository
    /// is a directory may have none.
    fn stores(&self, path: &Path) -> Result<Stores, Failed> {
        let no_stores = || Failed::NoStores { path: path.to_owned() };
        Ok(Stores::open(self.stores.ok_or_else(no_stores)?)?)
    }

    fn cipher(&self, path: &Path) -> Result<Cipher, Failed> {
        let cipher = self.stores(path)?.cipher();
        cipher.ok_or_else(|| Failed::Encrypted { path: path.to_owned() })
    }

    /// The bytes of a descriptor whose source is no file, each block verified where there is a list; also how many it has.
    pub fn remote(&self, path: &Path, descriptor: &Descriptor) -> Result<(Arc<dyn Blob>, Option<u64>), Failed> {
        let stores = self.stores(path)?;
        let blocks = block_list(path, descriptor, &stores, self.patience)?;
        let count = blocks.as_ref().map(BlockList::blocks);
        let ranged = stores.ranged(&descriptor.source)?;
        let remote = RemoteBlob::new(path, descriptor, ranged, blocks, self.patience);
        Ok((Arc::new(remote), count))
    }

    /// What is inside of bytes that may be encrypted: they say so themselves.
    pub fn opened(&self, path: &Path, stored: &Arc<dyn Blob>) -> Result<Arc<dyn Blob>, Failed> {
        let mut start = [0; 8];
        if stored.len_bytes() >= start.len() as u64 {
            stored.read_exact_at(&mut start, 0)?;
        }
        match DecryptedBlob::is_start(&start) {
            true => self.decrypted(path, stored),
            false => Ok(stored.clone()),
        }
    }

    /// What is inside of bytes that must be encrypted.
    pub fn decrypted(&self, path: &Path, stored: &Arc<dyn Blob>) -> Result<Arc<dyn Blob>, Failed> {
        let cipher = self.cipher(path)?;
        Ok(Arc::new(DecryptedBlob::open(path, stored.clone(), &cipher)?))
    }
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

/// Reads all of it.
pub(crate) fn digest_of(blob: &dyn Blob, progress: &Progress) -> Result<Digest, Failed> {
    let mut hasher = Hasher::new();
    read_whole(blob, progress, |part| {
        hasher.update(part);
        Ok(())
    })?;
    Ok(hasher.finish())
}

/// Shows all bytes in order.
pub(crate) fn read_whole(
    blob: &dyn Blob,
    progress: &Progress,
    mut show: impl FnMut(&[u8]) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let length = blob.len_bytes();
    progress.expect(length);
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut offset = 0;
    while offset < length {
        let part = &mut chunk[..(length - offset).min(CHUNK_BYTES as u64) as usize];
        blob.read_exact_at(part, offset)?;
        show(part)?;
        offset += part.len() as u64;
        progress.advance(part.len() as u64);
    }
    Ok(())
}

pub(crate) fn expect(path: &Path, expected: Digest, found: Digest) -> Result<(), Failed> {
    let path = path.to_owned();
    match found == expected {
        true => Ok(()),
        false => Err(Failed::WrongDigest { path, expected, found }),
    }
}
