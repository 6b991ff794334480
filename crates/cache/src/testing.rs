//! What the tests of this crate share: a store in memory that misbehaves on request, and a cache over it.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aenv_layers::Blob;
use bytes::Bytes;

use crate::cache::{BlobSpec, Cache, CacheLimits};
use crate::error::CacheError;
use crate::file_ops::{FileOps, SystemOps};
use crate::origin::{BlockCheck, Origin, OriginError, OriginErrorKind};
use crate::sha256::sha256;
use crate::{CachedBlob, Patience, with_patience};

pub const BLOCK: u64 = 4096;

/// What one answer of the store is like, if not good.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    Transient,
    Permanent,
    /// One byte is another, in the block at this place of the answer.
    WrongBlock(usize),
    Truncated,
}

#[derive(Debug)]
pub struct FakeStore {
    pub content: Vec<u8>,
    pub latency: Duration,
    /// Answers nothing until its timeout, as a network that swallows packets.
    pub silent: AtomicBool,
    /// Faults of the next answers, then none.
    pub faults: Mutex<VecDeque<Fault>>,
    /// For ever.
    pub always: Mutex<Option<Fault>>,
    pub requests: Mutex<Vec<(u64, u64)>>,
    running: AtomicUsize,
    pub most_running: AtomicUsize,
    pub bytes: AtomicU64,
}

impl FakeStore {
    pub fn new(content: Vec<u8>) -> Arc<FakeStore> {
        FakeStore::slow(content, Duration::ZERO)
    }

    pub fn slow(content: Vec<u8>, latency: Duration) -> Arc<FakeStore> {
        Arc::new(FakeStore {
            content,
            latency,
            silent: AtomicBool::new(false),
            faults: Mutex::default(),
            always: Mutex::default(),
            requests: Mutex::default(),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    pub fn fail_next(&self, faults: &[Fault]) {
        self.faults.lock().unwrap().extend(faults);
    }

    pub fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }

    fn answer(&self, offset: u64, length: u64, timeout: Duration) -> Result<Bytes, OriginError> {
        self.requests.lock().unwrap().push((offset, length));
        std::thread::sleep(self.latency);
        let silent_until = Instant::now() + timeout;
        while self.silent.load(Ordering::Relaxed) {
            if Instant::now() >= silent_until {
                return Err(failed(OriginErrorKind::Transient, "silence"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut bytes = self.content[offset as usize..(offset + length) as usize].to_vec();
        let fault = self.faults.lock().unwrap().pop_front().or(*self.always.lock().unwrap());
        match fault {
            Some(Fault::Transient) => return Err(failed(OriginErrorKind::Transient, "503")),
            Some(Fault::Permanent) => return Err(failed(OriginErrorKind::Permanent, "404")),
            Some(Fault::WrongBlock(place)) => {
                let at = (place * BLOCK as usize + 5).min(bytes.len() - 1);
                bytes[at] ^= 1;
            }
            Some(Fault::Truncated) => bytes.truncate(bytes.len() - 1),
            None => {}
        }
        self.bytes.fetch_add(length, Ordering::Relaxed);
        Ok(bytes.into())
    }
}

impl Origin for FakeStore {
    fn read(&self, offset: u64, length: u64, timeout: Duration) -> Result<Bytes, OriginError> {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
        let answer = self.answer(offset, length, timeout);
        self.running.fetch_sub(1, Ordering::SeqCst);
        answer
    }
}

fn failed(kind: OriginErrorKind, what: &str) -> OriginError {
    OriginError {
        kind,
        source: what.to_owned().into(),
    }
}

/// Bytes that differ from block to block and are never zero for long.
pub fn content(seed: u64, size: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..size.div_ceil(8))
        .flat_map(|_| random.next().to_le_bytes())
        .take(size as usize)
        .collect()
}

pub fn spec(content: &[u8]) -> BlobSpec {
    let digest = sha256(content);
    BlobSpec {
        digest: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
        size_bytes: content.len() as u64,
        block_bytes: BLOCK,
        blocks: Some(Arc::new(Digests(content.chunks(BLOCK as usize).map(sha256).collect()))),
        path: "/s/blobs/test.blob".into(),
    }
}

#[derive(Debug)]
struct Digests(Vec<[u8; 32]>);

impl BlockCheck for Digests {
    fn blocks(&self) -> u64 {
        self.0.len() as u64
    }

    fn is_right(&self, block: u64, bytes: &[u8]) -> bool {
        sha256(bytes) == self.0[block as usize]
    }
}

/// Opens a cache; waits for one of this process that was dropped and whose last thread is not gone yet.
pub fn open(dir: &Path, size_bytes_max: u64, ops: Arc<dyn FileOps>, boot: u8) -> Cache {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match Cache::open_with(dir, CacheLimits { size_bytes_max }, ops.clone(), [boot; 16]) {
            Ok(cache) => return cache,
            Err(CacheError::InUse(_)) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}: {:?}", std::error::Error::source(&error)),
        }
    }
}

pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Of the usual blob, whose last block is a short one.
pub const BLOCKS: u64 = 200;

/// A cache over one blob of a fake store.
pub struct Bench {
    pub folder: tempfile::TempDir,
    pub cache: Cache,
    pub store: Arc<FakeStore>,
    pub blob: Arc<CachedBlob>,
}

/// A cache with this limit over a blob with the store's content.
pub fn bench_of(store: Arc<FakeStore>, size_bytes_max: u64) -> Bench {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), size_bytes_max, Arc::new(SystemOps), 1);
    let blob = cache.blob(spec(&store.content), store.clone()).unwrap();
    Bench {
        folder,
        cache,
        store,
        blob,
    }
}

/// A cache without a tight limit over a blob of [`BLOCKS`] blocks.
pub fn bench() -> Bench {
    bench_of(FakeStore::new(content(1, BLOCKS * BLOCK - 100)), 1 << 30)
}

impl Bench {
    /// Reads and compares with the store's content.
    pub fn read(&self, offset: u64, length: u64) -> Result<(), aenv_layers::Error> {
        let mut buffer = vec![0xcc; length as usize];
        self.blob.read_exact_at(&mut buffer, offset)?;
        assert!(
            buffer == self.store.content[offset as usize..(offset + length) as usize],
            "wrong bytes at {offset}"
        );
        Ok(())
    }

    /// Reads a little with a deadline.
    pub fn impatient(&self, time: Duration, offset: u64) -> Result<(), CacheError> {
        let outcome = with_patience(Patience::lasting(time, None), || self.read(offset, 10));
        outcome.map_err(cause)
    }
}

/// What the cache said, out of what the layers say.
pub fn cause(error: aenv_layers::Error) -> CacheError {
    match error {
        aenv_layers::Error::Remote { source, .. } => *source.downcast::<CacheError>().unwrap(),
        other => panic!("{other}"),
    }
}

/// Bytes that a file holds, by pages.
pub fn data_bytes(path: &Path) -> u64 {
    use rustix::fs::{SeekFrom, seek};
    let Ok(file) = std::fs::File::open(path) else { return 0 };
    let (mut at, mut sum) = (0, 0);
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(start)).unwrap();
        sum += at - start;
    }
    sum
}

/// A small generator: tests print its seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
