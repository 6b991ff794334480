//! The cache as a whole: its folder, its blobs, its room.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use crate::blob::CachedBlob;
use crate::entry::{Entry, list_path};
use crate::error::CacheError;
use crate::file_ops::{FileOps, SystemOps, write_all};
use crate::limits::{BLOB_BYTES_MAX, BLOCK_BYTES_MAX};
use crate::map_file::{BootId, Geometry};
use crate::metrics::Counts;
use crate::origin::{BlockCheck, Origin};
use crate::sha256::sha256;
use crate::shared::Shared;
use crate::stock::is_digest;
use crate::trace::{Trace, TraceError};

/// How much the cache may hold.
#[derive(Debug, Clone, Copy)]
pub struct CacheLimits {
    /// Bytes of blocks. Maps and lists of digests come on top: about a two-thousandth of the blobs' sizes.
    pub size_bytes_max: u64,
}

/// What the cache must know of a blob.
#[derive(Debug, Clone)]
pub struct BlobSpec {
    /// sha256 of its bytes, 64 hex digits: its name.
    pub digest: String,
    pub size_bytes: u64,
    /// A multiple of 4096.
    pub block_bytes: u64,
    /// None: its format verifies itself, and blocks do not outlive a restart of the host.
    pub blocks: Option<Arc<dyn BlockCheck>>,
    /// What errors call it.
    pub path: PathBuf,
}

/// The cache now.
#[derive(Debug, Clone)]
pub struct CacheState {
    pub size_bytes: u64,
    pub size_bytes_max: u64,
    pub blobs: Vec<BlobState>,
    pub counts: Counts,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobState {
    pub digest: String,
    pub cached_bytes: u64,
    pub size_bytes: u64,
    pub in_use: bool,
}

/// The open cache. Dropped, it lets go of the folder once its blobs are gone too.
#[derive(Debug)]
pub struct Cache {
    pub(crate) shared: Arc<Shared>,
    keeper: Option<std::thread::JoinHandle<()>>,
}

impl Cache {
    /// Opens the cache in `dir` (made if missing), and takes stock of it in the background.
    ///
    /// Errors: `InUse` where another process or value has it open; `File`.
    pub fn open(dir: &Path, limits: CacheLimits) -> Result<Cache, CacheError> {
        Cache::open_with(dir, limits, Arc::new(SystemOps), boot_id())
    }

    pub(crate) fn open_with(
        dir: &Path,
        limits: CacheLimits,
        ops: Arc<dyn FileOps>,
        boot: BootId,
    ) -> Result<Cache, CacheError> {
        let failed = |step| {
            move |source| CacheError::File {
                step,
                path: dir.to_owned(),
                source,
            }
        };
        std::fs::create_dir_all(dir).map_err(failed("create"))?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(dir.join("lock"));
        let lock = lock.map_err(failed("lock"))?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(CacheError::InUse(dir.to_owned())),
            locked => locked.map_err(|error| failed("lock")(error.into()))?,
        }
        // Without holes an eviction would give nothing back, and the folder would outgrow every limit.
        check_holes(&dir.join("probe")).map_err(failed("punch holes into files of"))?;
        let shared = Arc::new(Shared::new(dir.to_owned(), lock, limits, ops, boot));
        let keeper = std::thread::Builder::new()
            .name("cache-keeper".to_owned())
            .stack_size(256 << 10);
        let keeper = keeper.spawn({
            let shared = shared.clone();
            move || shared.keep()
        });
        Ok(Cache {
            shared,
            keeper: Some(keeper.map_err(failed("start a thread for"))?),
        })
    }

    /// The blob, shared by all who have it open. Its bytes come from `origin` where they are not cached.
    ///
    /// Errors: `BadSpec`, `Differs` (open with another size), `File`.
    pub fn blob(&self, spec: BlobSpec, origin: Arc<dyn Origin>) -> Result<Arc<CachedBlob>, CacheError> {
        let geometry = check(&spec)?;
        let mut tables = self.shared.tables();
        if let Some(blob) = tables.open.get(&spec.digest).and_then(Weak::upgrade) {
            return match blob.geometry() == geometry {
                true => Ok(blob),
                false => Err(CacheError::Differs {
                    digest: spec.digest,
                    field: "size",
                }),
            };
        }
        let failed = |source| CacheError::File {
            step: "open the cached blocks of",
            path: self.shared.dir.join(&spec.digest),
            source,
        };
        let entry = self
            .shared
            .entry_for(&mut tables, &spec.digest, geometry)
            .map_err(failed)?;
        let files = match entry.files(&self.shared.dir) {
            Ok(files) => files,
            // The folder was emptied under us: what is remembered of this blob is not true any more.
            Err(_) => {
                self.shared.drop_entry(&mut tables, &entry);
                let entry = self
                    .shared
                    .entry_for(&mut tables, &spec.digest, geometry)
                    .map_err(failed)?;
                entry.files(&self.shared.dir).map_err(failed)?
            }
        };
        let entry = tables.by_digest[&spec.digest].clone();
        let digest = spec.digest.clone();
        let blob = CachedBlob::new(self.shared.clone(), entry, files, spec, origin);
        tables.open.insert(digest, Arc::downgrade(&blob));
        drop(tables);
        blob.drop_what_cannot_be_verified();
        Ok(blob)
    }

    /// The blob, if somebody has it open.
    pub fn open_blob(&self, digest: &str) -> Option<Arc<CachedBlob>> {
        self.shared.tables().open.get(digest).and_then(Weak::upgrade)
    }

    /// The list of digests that was kept for a blob, if its own sha256 is this one.
    pub fn kept_list(&self, digest: &str, digest_of_list: &[u8; 32]) -> Option<Vec<u8>> {
        let list = std::fs::read(list_path(&self.shared.dir, digest)).ok()?;
        (sha256(&list) == *digest_of_list).then_some(list)
    }

    /// Keeps a list of digests, so that a blob whose blocks are cached can be opened without its store. A disk that does
    /// not take it costs a request next time and nothing else.
    pub fn keep_list(&self, digest: &str, list: &[u8]) {
        let (ops, path) = (self.shared.ops.as_ref(), list_path(&self.shared.dir, digest));
        let partial = self.shared.dir.join(format!("{digest}.blocks.new"));
        let written = ops
            .create(&partial)
            .and_then(|file| write_all(ops, &file, list, 0))
            .and_then(|()| ops.rename(&partial, &path));
        if written.is_err() {
            let _ = ops.remove(&partial);
        }
    }

    /// Gives at least so many bytes back, as far as they are not being read. Returns how many.
    pub fn evict(&self, bytes: u64) -> u64 {
        self.shared.evict(bytes)
    }

    /// Gives back what is cached of one blob, as far as it is not being read. Returns the bytes.
    pub fn evict_blob(&self, digest: &str) -> u64 {
        self.shared.evict_blob(digest)
    }

    /// Begins to note first reads: of these blobs, or of all. Starting a trace that runs changes nothing.
    ///
    /// Errors: `TooMany`.
    pub fn trace_start(&self, name: &str, only: Option<HashSet<String>>) -> Result<(), TraceError> {
        self.shared.tracer.start(name, only)
    }

    /// Ends a trace. Errors: `NotFound`.
    pub fn trace_finish(&self, name: &str) -> Result<Trace, TraceError> {
        self.shared.tracer.finish(name)
    }

    pub fn state(&self) -> CacheState {
        let tables = self.shared.tables();
        let state = |entry: &Arc<Entry>| BlobState {
            digest: entry.digest.clone(),
            cached_bytes: entry.cached_bytes(),
            size_bytes: entry.geometry.size_bytes,
            in_use: tables
                .open
                .get(&entry.digest)
                .is_some_and(|blob| blob.strong_count() > 0),
        };
        CacheState {
            size_bytes: self.shared.used(),
            size_bytes_max: self.shared.limits.size_bytes_max,
            blobs: tables.entries.iter().map(state).collect(),
            counts: self.shared.metrics.counts(),
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

fn check_holes(path: &Path) -> io::Result<()> {
    let file = SystemOps.create(path)?;
    let outcome = write_all(&SystemOps, &file, &[1; 4096], 0).and_then(|()| SystemOps.punch(&file, 0, 4096));
    SystemOps.remove(path)?;
    match outcome {
        // A disk that is full now will not be for ever, and reads need no room.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => Ok(()),
        outcome => outcome,
    }
}

fn check(spec: &BlobSpec) -> Result<Geometry, CacheError> {
    let bad = |what: String| Err(CacheError::BadSpec(what));
    let geometry = Geometry {
        size_bytes: spec.size_bytes,
        block_bytes: spec.block_bytes,
    };
    if !is_digest(&spec.digest) {
        return bad(format!("{:?} is not a digest", spec.digest));
    }
    if spec.block_bytes == 0 || spec.block_bytes > BLOCK_BYTES_MAX || !spec.block_bytes.is_multiple_of(4096) {
        return bad(format!("{}: blocks of {} bytes", spec.digest, spec.block_bytes));
    }
    if spec.size_bytes == 0 || spec.size_bytes > BLOB_BYTES_MAX {
        return bad(format!("{}: {} bytes", spec.digest, spec.size_bytes));
    }
    match &spec.blocks {
        Some(list) if list.blocks() != geometry.blocks() => bad(format!(
            "{}: {} blocks are listed, and it has {}",
            spec.digest,
            list.blocks(),
            geometry.blocks()
        )),
        _ => Ok(geometry),
    }
}

/// The number of this boot; one of a kind where the system does not tell, so that nothing is believed next time.
fn boot_id() -> BootId {
    let told = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let own = format!("{} {:?}", std::process::id(), std::time::SystemTime::now());
    let text = if told.trim().is_empty() { &own } else { told.trim() };
    let mut id = [0; 16];
    id.copy_from_slice(&sha256(text.as_bytes())[..16]);
    id
}
