//! The bytes of a descriptor as a blob, for a command that reads all of it once: a window of a few blocks, each verified.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use aenv_layers::{Blob, Damage, Error};
use aenv_store::{BLOCK_BYTES, BlockList, Descriptor, Ranged, StoreError};
use bytes::Bytes;

use crate::parts::locked;
use crate::patience::Patience;

/// Bytes fetched at a time; a multiple of the blocks, so that each can be verified.
const WINDOW_BYTES: u64 = 64 * BLOCK_BYTES as u64;

/// A blob behind a store, without a cache.
#[derive(Debug)]
pub(crate) struct RemoteBlob {
    path: PathBuf,
    size_bytes: u64,
    ranged: Arc<dyn Ranged>,
    blocks: Option<BlockList>,
    patience: Patience,
    /// The last window that was fetched, by its number.
    window: Mutex<Option<(u64, Bytes)>>,
}

impl RemoteBlob {
    pub fn new(
        path: &Path,
        descriptor: &Descriptor,
        ranged: Arc<dyn Ranged>,
        blocks: Option<BlockList>,
        patience: Patience,
    ) -> RemoteBlob {
        RemoteBlob {
            path: path.to_owned(),
            size_bytes: descriptor.size_bytes,
            ranged,
            blocks,
            patience,
            window: Mutex::default(),
        }
    }

    fn window(&self, number: u64) -> Result<Bytes, Error> {
        let mut window = locked(&self.window);
        if let Some((_, bytes)) = window.as_ref().filter(|(found, _)| *found == number) {
            return Ok(bytes.clone());
        }
        let offset = number * WINDOW_BYTES;
        let length = (self.size_bytes - offset).min(WINDOW_BYTES);
        let timeout = self.patience.attempt_for(length);
        let read = self.patience.retry(|| self.ranged.read(offset, length, timeout));
        let bytes = read.map_err(|e: StoreError| self.fail(e))?;
        if let Some(blocks) = &self.blocks {
            let first = offset / u64::from(BLOCK_BYTES);
            for (block, bytes) in (first..).zip(bytes.chunks(BLOCK_BYTES as usize)) {
                blocks.verify(block, bytes).map_err(|e| self.fail(e))?;
            }
        }
        *window = Some((number, bytes.clone()));
        Ok(bytes)
    }

    fn fail(&self, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Remote {
            path: self.path.clone(),
            source: Box::new(source),
        }
    }
}

impl Blob for RemoteBlob {
    fn len_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let available = self.size_bytes.saturating_sub(offset);
        if buf.len() as u64 > available {
            let (offset, missing) = (self.size_bytes, buf.len() as u64 - available);
            let (path, damage) = (self.path.clone(), Damage::ShortRead { offset, missing });
            return Err(Error::Corrupt { path, damage });
        }
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let bytes = self.window(at / WINDOW_BYTES)?;
            let skip = (at % WINDOW_BYTES) as usize;
            let (part, tail) = rest.split_at_mut(rest.len().min(bytes.len() - skip));
            part.copy_from_slice(&bytes[skip..skip + part.len()]);
            at += part.len() as u64;
            rest = tail;
        }
        Ok(())
    }
}
