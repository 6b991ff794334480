//! Remote blobs: what stands behind a descriptor, read through the cache.
//!
//! Owns: how a layer's path becomes bytes (`opener.rs`), how long readers wait for a store, and the operations on the
//! cache (`operations.rs`). Does not own caching and fetching (crates/cache), stores and encryption (crates/store), nor
//! the formats inside of a blob (crates/layers).
//!
//! ```text
//!   Registry ── Opener ──┬─ plain file                                       FileBlob
//!                        └─ descriptor ─┬─ a file of a repository            FileBlob ───┐
//!                                       └─ an object or a registry's blob    CachedBlob ─┴─ [DecryptedBlob]
//! ```

mod error;
mod list;
mod opener;
mod operations;
mod origin;
mod waiting;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aenv_cache::{Cache, CacheError, CacheLimits, Patience};
use aenv_store::Stores;
use aenv_wire::block::ExportKind;

pub use error::RemoteError;
pub use opener::BlobOpener;
pub use waiting::Waiting;

use crate::arguments::{RemoteSettings, Settings};
use crate::limits::DISK_OUTAGE;

/// Whether a layer's path names a descriptor, by its name; what it really is its first bytes say.
pub fn names_a_blob(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "blob")
}

/// Cache and stores of this blockd.
#[derive(Debug)]
pub struct Remote {
    settings: Option<RemoteSettings>,
    memory_outage: Duration,
    /// Opened at start. A disk that was full then may have room now, so it is tried again.
    cache: Mutex<Option<Arc<Cache>>>,
    /// Read at the first use: a node without remote blobs needs no client and no threads for one.
    stores: Mutex<Option<Stores>>,
    /// Layers that are being opened, and how long that may take: their opener is called on threads of others.
    opening: Mutex<HashMap<PathBuf, Patience>>,
    prefetches: std::sync::atomic::AtomicU64,
}

impl Remote {
    /// Errors: `InUse`. Any other fault of the cache is told and tried again when the first blob is opened.
    pub fn start(settings: &Settings) -> Result<Arc<Remote>, CacheError> {
        let remote = Remote {
            settings: settings.remote.clone(),
            memory_outage: settings.memory_outage,
            cache: Mutex::default(),
            stores: Mutex::default(),
            opening: Mutex::default(),
            prefetches: std::sync::atomic::AtomicU64::new(0),
        };
        match remote.cache() {
            Err(RemoteError::Cache(error @ CacheError::InUse(_))) => return Err(error),
            Err(error) if remote.settings.is_some() => {
                say!("aenv-blockd: no cache yet: {}", crate::control::chain(&error));
            }
            _ => {}
        }
        Ok(Arc::new(remote))
    }

    /// How long a read of such an export waits for a store.
    pub fn outage(&self, kind: ExportKind) -> Duration {
        match kind {
            ExportKind::Memory => self.memory_outage,
            ExportKind::Disk => DISK_OUTAGE,
        }
    }

    pub fn cache(&self) -> Result<Arc<Cache>, RemoteError> {
        let settings = self.settings.as_ref().ok_or(RemoteError::NotConfigured)?;
        let mut slot = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cache) = slot.as_ref() {
            return Ok(cache.clone());
        }
        let limits = CacheLimits {
            size_bytes_max: settings.cache_size_bytes_max,
        };
        let cache = Arc::new(Cache::open(&settings.cache_dir, limits)?);
        Ok(slot.insert(cache).clone())
    }

    fn stores(&self) -> Result<Stores, RemoteError> {
        let settings = self.settings.as_ref().ok_or(RemoteError::NotConfigured)?;
        let mut slot = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stores) = slot.as_ref() {
            return Ok(stores.clone());
        }
        let stores = Stores::open(&settings.stores)?;
        Ok(slot.insert(stores).clone())
    }

    /// Runs `work`, which opens `layers`, with the patience of this thread on whichever threads they are opened.
    pub fn while_opening<T>(&self, layers: &[PathBuf], work: impl FnOnce() -> T) -> T {
        let blobs: Vec<&PathBuf> = layers
            .iter()
            .filter(|path| names_a_blob(&path.to_string_lossy()))
            .collect();
        if blobs.is_empty() {
            return work();
        }
        let patience = Patience::current();
        {
            let mut opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
            for path in &blobs {
                opening.insert((*path).clone(), patience.clone());
            }
        }
        let outcome = work();
        let mut opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        // Of two that open one layer at the same time, the second one's end leaves the other's threads the default.
        blobs.into_iter().for_each(|path| drop(opening.remove(path)));
        outcome
    }

    fn patience_for(&self, path: &Path) -> Option<Patience> {
        let opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        opening.get(path).cloned()
    }
}
