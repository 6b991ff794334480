//! What blobs, readers and threads share: the tables of blobs, the room, and the keeper thread that makes it.
//!
//! Lock order: the clock before the tables; the claims of an entry after both. Nothing is fetched under any of them.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::background::Background;
use crate::blob::CachedBlob;
use crate::cache::CacheLimits;
use crate::entry::Entry;
use crate::evict::Clock;
use crate::file_ops::FileOps;
use crate::limits::{HIGH_WATERMARK_PERCENT, LOW_WATERMARK_PERCENT};
use crate::map_file::{BootId, Geometry};
use crate::metrics::Metrics;
use crate::trace::Tracer;

/// What blobs and threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub dir: PathBuf,
    pub ops: Arc<dyn FileOps>,
    pub metrics: Metrics,
    pub background: Background,
    pub tracer: Tracer,
    pub clock: Mutex<Clock>,
    pub stock_taken: AtomicBool,
    /// Readers that are fetching: fills stand back while there are any.
    pub foreground: AtomicUsize,
    pub limits: CacheLimits,
    boot: BootId,
    tables: Mutex<Tables>,
    used: AtomicU64,
    keeper: Mutex<Keeper>,
    keeper_called: Condvar,
    _lock: File,
}

#[derive(Debug, Default)]
pub(crate) struct Tables {
    /// In the order in which the clock's hand visits them.
    pub entries: Vec<Arc<Entry>>,
    pub by_digest: HashMap<String, Arc<Entry>>,
    pub open: HashMap<String, Weak<CachedBlob>>,
}

#[derive(Debug, Default)]
struct Keeper {
    stop: bool,
    room_wanted: bool,
}

impl Shared {
    /// Holds the folder's lock for as long as it lives.
    pub fn new(dir: PathBuf, lock: File, limits: CacheLimits, ops: Arc<dyn FileOps>, boot: BootId) -> Shared {
        Shared {
            dir,
            ops,
            metrics: Metrics::default(),
            background: Background::default(),
            tracer: Tracer::default(),
            clock: Mutex::default(),
            stock_taken: AtomicBool::new(false),
            foreground: AtomicUsize::new(0),
            limits,
            boot,
            tables: Mutex::default(),
            used: AtomicU64::new(0),
            keeper: Mutex::default(),
            keeper_called: Condvar::new(),
            _lock: lock,
        }
    }

    /// Ends the keeper and the background threads, each after what it does at the moment.
    pub fn stop(&self) {
        self.keeper_state().stop = true;
        self.keeper_called.notify_all();
        self.background.stop();
    }

    /// The keeper thread.
    pub fn keep(&self) {
        // A folder that cannot be listed: what is in it is not counted, and the next process tries again.
        let _ = self.take_stock();
        self.stock_taken.store(true, Ordering::Release);
        loop {
            if self.used() > self.percent(HIGH_WATERMARK_PERCENT) {
                self.evict_to(self.percent(LOW_WATERMARK_PERCENT));
            }
            let keeper = self.keeper_state();
            let waited = self
                .keeper_called
                .wait_while(keeper, |keeper| !keeper.stop && !keeper.room_wanted);
            let mut keeper = waited.unwrap_or_else(PoisonError::into_inner);
            if keeper.stop {
                return;
            }
            keeper.room_wanted = false;
        }
    }

    fn percent(&self, percent: u64) -> u64 {
        (u128::from(self.limits.size_bytes_max) * u128::from(percent) / 100) as u64
    }

    fn keeper_state(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn size_bytes_max(&self) -> u64 {
        self.limits.size_bytes_max
    }

    pub fn is_stopping(&self) -> bool {
        self.keeper_state().stop
    }

    /// Room for so many bytes, made by eviction if need be. False: all that could go is in use.
    pub fn take_room(&self, bytes: u64) -> bool {
        for _ in 0..3 {
            let max = self.limits.size_bytes_max;
            let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|sum| *sum <= max)
            });
            match taken {
                Ok(before) => {
                    if before + bytes > self.percent(HIGH_WATERMARK_PERCENT) {
                        self.keeper_state().room_wanted = true;
                        self.keeper_called.notify_all();
                    }
                    return true;
                }
                Err(_) => self.evict_to(max.saturating_sub(bytes)),
            };
        }
        false
    }

    /// Whether so many bytes more would pass the high watermark: then a fill must stand back.
    pub fn is_nearly_full(&self, bytes: u64) -> bool {
        self.used() + bytes > self.percent(HIGH_WATERMARK_PERCENT)
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub fn entries(&self) -> Vec<Arc<Entry>> {
        self.tables().entries.clone()
    }

    pub fn entry(&self, digest: &str) -> Option<Arc<Entry>> {
        self.tables().by_digest.get(digest).cloned()
    }

    /// Takes up what an earlier process left of a blob, or removes it where it is of no use.
    pub fn know(&self, digest: &str) -> io::Result<()> {
        let mut tables = self.tables();
        if tables.by_digest.contains_key(digest) {
            return Ok(());
        }
        match Entry::load(self.ops.as_ref(), &self.dir, digest, &self.boot)? {
            Some(entry) => {
                self.insert(&mut tables, entry);
                Ok(())
            }
            None => self.remove_files(digest),
        }
    }

    /// Forgets a blob of which nothing is cached and that nobody has open.
    pub fn remove_if_empty(&self, entry: &Arc<Entry>) {
        let mut tables = self.tables();
        let is_open = tables
            .open
            .get(&entry.digest)
            .is_some_and(|blob| blob.strong_count() > 0);
        if !is_open && entry.cached_bytes() == 0 {
            self.drop_entry(&mut tables, entry);
        }
    }

    /// Forgets a blob whose files are gone, unless somebody has them open still.
    pub fn forget_if_lost(&self, entry: &Arc<Entry>) {
        let mut tables = self.tables();
        if entry
            .files(&self.dir)
            .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        {
            self.drop_entry(&mut tables, entry);
        }
    }

    pub fn entry_for(&self, tables: &mut Tables, digest: &str, geometry: Geometry) -> io::Result<Arc<Entry>> {
        if let Some(entry) = tables.by_digest.get(digest).cloned() {
            if entry.geometry == geometry {
                return Ok(entry);
            }
            // Cached in blocks of another size, by an older version: not worth translating.
            self.drop_entry(tables, &entry);
        } else if let Some(entry) = Entry::load(self.ops.as_ref(), &self.dir, digest, &self.boot)?
            && entry.geometry == geometry
        {
            return Ok(self.insert(tables, entry));
        }
        let entry = Entry::create(self.ops.as_ref(), &self.dir, digest, geometry, &self.boot)?;
        Ok(self.insert(tables, entry))
    }

    fn insert(&self, tables: &mut Tables, entry: Entry) -> Arc<Entry> {
        let entry = Arc::new(entry);
        self.used.fetch_add(entry.cached_bytes(), Ordering::Relaxed);
        tables.by_digest.insert(entry.digest.clone(), entry.clone());
        tables.entries.push(entry.clone());
        entry
    }

    pub fn drop_entry(&self, tables: &mut Tables, entry: &Arc<Entry>) {
        let same = tables
            .by_digest
            .get(&entry.digest)
            .is_some_and(|known| Arc::ptr_eq(known, entry));
        if !same {
            return;
        }
        self.give_back(entry.cached_bytes());
        tables.by_digest.remove(&entry.digest);
        tables.open.remove(&entry.digest);
        tables.entries.retain(|other| !Arc::ptr_eq(other, entry));
        // What stays of the files is found by the next stock-taking.
        let _ = self.remove_files(&entry.digest);
    }

    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        // Every change of the tables is one call of a map; the worst that a panic leaves is a blob that is fetched again.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
