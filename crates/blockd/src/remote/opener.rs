//! From a layer's path to its bytes.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use aenv_cache::{BlobSpec, CachedBlob, adopt_patience};
use aenv_layers::{Blob, Error, FileBlob, Opener};
use aenv_store::{DecryptedBlob, Descriptor, Source};

use super::origin::StoreOrigin;
use super::{Remote, RemoteError, list};

/// Knows descriptors; everything else is a local file.
#[derive(Debug)]
pub struct BlobOpener(pub Arc<Remote>);

impl Opener for BlobOpener {
    fn open(&self, path: &Path) -> Result<Arc<dyn Blob>, Error> {
        if !is_descriptor(path) {
            return Ok(Arc::new(FileBlob::open(path)?));
        }
        // The layer is read right after this, on this thread, by whoever started it.
        if let Some(patience) = self.0.patience_for(path) {
            adopt_patience(patience);
        }
        let remote = |error: RemoteError| Error::Remote {
            path: path.to_owned(),
            source: Box::new(error),
        };
        let descriptor = Descriptor::read(path).map_err(|error| remote(error.into()))?;
        let stored: Arc<dyn Blob> = match &descriptor.source {
            Source::File { path } => Arc::new(FileBlob::open(path)?),
            _ => self.0.cached(path, &descriptor).map_err(remote)?,
        };
        if descriptor.encryption.is_none() {
            return Ok(stored);
        }
        let cipher = self.0.stores().map_err(remote)?.cipher();
        let cipher = cipher.ok_or_else(|| remote(RemoteError::NoKey))?;
        Ok(Arc::new(DecryptedBlob::open(path, stored, &cipher)?))
    }
}

/// By its first bytes. What cannot be read is left to the layer's own opening, which says why.
fn is_descriptor(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(32).read_to_end(&mut start));
    read.is_ok() && Descriptor::is_start(&start)
}

impl Remote {
    /// The blob of a descriptor whose bytes are in a store. Nothing is asked of the store unless its block list is not at
    /// hand.
    pub fn cached(&self, path: &Path, descriptor: &Descriptor) -> Result<Arc<CachedBlob>, RemoteError> {
        let cache = self.cache()?;
        let digest = descriptor.digest.to_string();
        if let Some(blob) = cache.open_blob(&digest)
            && blob.size_bytes() == descriptor.size_bytes
        {
            return Ok(blob);
        }
        let stores = self.stores()?;
        let spec = BlobSpec {
            digest,
            size_bytes: descriptor.size_bytes,
            block_bytes: descriptor.block_bytes.into(),
            blocks: list::of(descriptor, &cache, &stores)?,
            path: path.to_owned(),
        };
        let origin = StoreOrigin(stores.ranged(&descriptor.source)?);
        Ok(cache.blob(spec, Arc::new(origin))?)
    }
}
