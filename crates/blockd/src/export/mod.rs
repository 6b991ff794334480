//! Exports: what is served under which name and inode.
//!
//! Owns the table, the records on disk and the life of one export (open, serve, seal, abandon, remove). Does not own
//! the FUSE protocol (`fuse`) nor the layer format (`aenv-layers`).

mod content;
mod error;
mod flight;
mod record;
mod seal;
mod table;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};
use std::time::Instant;

use aenv_cache::Cancel;
use aenv_wire::block::{ExportFailure, ExportInfo, ExportKind};

pub use content::{Content, Layers};
pub use error::{ExportError, layers_errno};
pub use flight::{Begun, Flight, Parked};
pub use record::Record;
pub use table::{Exports, check_name, check_path};

use crate::remote::names_a_blob;
use crate::write_back::Dirty;

/// One export. What never changes is plain; what changes is in the record, whose lock also keeps two changes of the
/// same export apart. Readers and writers of content never take that lock.
#[derive(Debug)]
pub struct Export {
    pub name: String,
    pub kind: ExportKind,
    pub inode: u64,
    pub size_bytes: u64,
    pub flight: Flight,
    /// Whether a read may have to wait for a store.
    pub is_remote: bool,
    /// Ends such waiting, when nobody wants the answer any more.
    pub cancel: Cancel,
    /// What of it the disk does not have yet.
    pub dirty: Dirty,
    /// Held while a sector is changed in part.
    pub partial_sectors: Mutex<()>,
    record: Mutex<Record>,
    /// Set under the record's lock when the record's file is removed, so that no late change brings it back.
    removed: AtomicBool,
    content: RwLock<Option<Arc<Content>>>,
    failures: AtomicU64,
    last_failure: Mutex<Option<(Instant, String)>>,
}

impl Export {
    pub fn new(record: Record, content: Option<Arc<Content>>) -> Export {
        Export {
            name: record.name.clone(),
            kind: record.kind,
            inode: record.inode,
            size_bytes: record.size_bytes,
            flight: Flight::new(record.abandoned),
            // A seal only adds local layers.
            is_remote: record.layers.iter().any(|path| names_a_blob(path)),
            cancel: Cancel::default(),
            dirty: Dirty::default(),
            partial_sectors: Mutex::new(()),
            record: Mutex::new(record),
            removed: AtomicBool::new(false),
            content: RwLock::new(content),
            failures: AtomicU64::new(0),
            last_failure: Mutex::default(),
        }
    }

    /// The layers, opened at the first use after a restart: a take-over must not wait for the index of every export.
    pub fn content(&self, layers: &Layers) -> Result<Arc<Content>, ExportError> {
        if let Some(content) = self.opened() {
            return Ok(content);
        }
        let mut slot = self.content.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(content) = slot.as_ref() {
            return Ok(content.clone());
        }
        // The record is read before its lock is let go again: a seal changes both, in this order of locks.
        let (lowers, upper) = {
            let record = self.record();
            (record.layers.clone(), record.upper.clone())
        };
        match Content::open(layers, &lowers, upper.as_deref(), self.size_bytes) {
            Ok(content) => Ok(slot.insert(Arc::new(content)).clone()),
            Err(error) => {
                self.tell_of_failure("opening", &error);
                Err(error)
            }
        }
    }

    /// The layers, if they are open and nobody is just opening them: never waits.
    pub fn opened(&self) -> Option<Arc<Content>> {
        match self.content.try_read() {
            Ok(content) => content.clone(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().clone(),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Says it in the log, ever more rarely: a guest that asks again and again must not fill the disk.
    pub fn tell_of_failure(&self, what: &str, error: &dyn std::error::Error) {
        let count = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        let (name, why) = (&self.name, crate::control::chain(error));
        if count.is_power_of_two() {
            say!("aenv-blockd: {what} of export {name} failed ({count} failures so far): {why}");
        }
        *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), why));
    }

    /// What is told of it.
    pub fn info(&self) -> ExportInfo {
        let last = self.last_failure.lock().unwrap_or_else(PoisonError::into_inner);
        let failure = last.as_ref().map(|(when, message)| ExportFailure {
            message: message.clone(),
            age_ms: u64::try_from(when.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
        ExportInfo {
            failure,
            ..self.snapshot().info()
        }
    }

    pub fn snapshot(&self) -> Record {
        self.record().clone()
    }

    /// The record, to be changed.
    fn record_to_change(&self) -> Result<MutexGuard<'_, Record>, ExportError> {
        let record = self.record();
        if self.removed.load(Ordering::Relaxed) {
            Err(ExportError::NotFound(self.name.clone()))
        } else {
            Ok(record)
        }
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
