//! Stop the cache at every operation it makes, and ask what a new process sees: with the operation not done, done in
//! part, or done but not answered. Whatever a bit promises must be there, byte for byte, without the store; and what no bit
//! promises must be given back.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use aenv_layers::Blob;

use crate::cache::Cache;
use crate::file_ops::{FileOps, SystemOps};
use crate::testing::{BLOCK, FakeStore, Fault, Random, content, data_bytes, open, spec, wait_until};
use crate::{Patience, with_patience};

const BLOCKS: u64 = 68;
const CACHE_BYTES: u64 = 12 * BLOCK;

/// How much of the operation at which we stop reaches the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Tear {
    Nothing,
    Part,
    Whole,
}

/// What comes after the operation at which we stop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Then {
    /// The process is dead: no operation takes effect any more.
    Dead,
    /// Only that one failed, as on a full disk.
    GoesOn,
}

/// The operating system, until operation number `stop_at`.
#[derive(Debug)]
pub(crate) struct FaultyOps {
    done: AtomicUsize,
    stop_at: usize,
    tear: Tear,
    then: Then,
}

impl FaultyOps {
    pub fn new(stop_at: usize, tear: Tear, then: Then) -> Arc<FaultyOps> {
        Arc::new(FaultyOps {
            done: AtomicUsize::new(0),
            stop_at,
            tear,
            then,
        })
    }

    fn run<T>(&self, whole: impl FnOnce() -> io::Result<T>, part: impl FnOnce() -> io::Result<()>) -> io::Result<T> {
        let number = self.done.fetch_add(1, Ordering::SeqCst);
        let stopped = io::Error::from(io::ErrorKind::StorageFull);
        match (number.cmp(&self.stop_at), self.then, self.tear) {
            (std::cmp::Ordering::Less, ..) | (std::cmp::Ordering::Greater, Then::GoesOn, _) => whole(),
            (std::cmp::Ordering::Greater, Then::Dead, _) | (_, _, Tear::Nothing) => Err(stopped),
            (_, _, Tear::Part) => part().and(Err(stopped)),
            (_, _, Tear::Whole) => whole().and(Err(stopped)),
        }
    }

    fn was_reached(&self) -> bool {
        self.done.load(Ordering::SeqCst) > self.stop_at
    }
}

impl FileOps for FaultyOps {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        // Short, so that every caller must go on at the right place.
        let bytes = &bytes[..bytes.len().min(3 * BLOCK as usize)];
        let half = &bytes[..bytes.len().div_ceil(2)];
        self.run(
            || SystemOps.write(file, bytes, offset),
            || SystemOps.write(file, half, offset).map(drop),
        )
    }

    fn write_word(&self, file: &File, word: u64, offset: u64) -> io::Result<()> {
        self.run(|| SystemOps.write_word(file, word, offset), || Ok(()))
    }

    fn punch(&self, file: &File, offset: u64, length: u64) -> io::Result<()> {
        self.run(
            || SystemOps.punch(file, offset, length),
            || SystemOps.punch(file, offset, length.min(BLOCK)),
        )
    }

    fn set_len(&self, file: &File, length: u64) -> io::Result<()> {
        self.run(
            || SystemOps.set_len(file, length),
            || SystemOps.set_len(file, length / 2),
        )
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        self.run(|| SystemOps.create(path), || SystemOps.create(path).map(drop))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.run(|| SystemOps.rename(from, to), || Ok(()))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.run(|| SystemOps.remove(path), || Ok(()))
    }
}

/// Reads, evictions and the opening of what an earlier boot left; every good read is right whatever the disk does.
fn life(cache: &Cache, store: &Arc<FakeStore>, seed: u64) {
    let Ok(blob) = cache.blob(spec(&store.content), store.clone()) else {
        return;
    };
    let mut random = Random(seed);
    for step in 0..10 {
        let first = random.below(BLOCKS - 5);
        let length = (1 + random.below(4)) * BLOCK;
        let mut buffer = vec![0xcc; length as usize];
        blob.read_exact_at(&mut buffer, first * BLOCK).unwrap();
        let start = (first * BLOCK) as usize;
        assert!(
            buffer == store.content[start..start + buffer.len()],
            "seed {seed}: wrong bytes at step {step}"
        );
        match step {
            4 => drop(cache.evict(3 * BLOCK)),
            9 => drop(cache.evict_blob(blob.digest())),
            _ => {}
        }
    }
}

/// What the next process finds: each block is right or missing, and room, bits and data agree once stock was taken.
fn check(folder: &Path, store: &Arc<FakeStore>, boot: u8, story: &str) {
    *store.always.lock().unwrap() = Some(Fault::Permanent);
    let cache = open(folder, CACHE_BYTES, Arc::new(SystemOps), boot);
    let blob = cache.blob(spec(&store.content), store.clone()).unwrap();
    for block in 0..BLOCKS {
        let end = ((block + 1) * BLOCK).min(store.content.len() as u64);
        let mut buffer = vec![0xcc; (end - block * BLOCK) as usize];
        let read = with_patience(Patience::lasting(Duration::ZERO, None), || {
            blob.read_exact_at(&mut buffer, block * BLOCK)
        });
        let right = buffer == store.content[(block * BLOCK) as usize..end as usize];
        assert!(read.is_err() || right, "{story}: block {block} is wrong");
    }
    let data = folder.join(format!("{}.data", blob.digest()));
    wait_until(&format!("{story}: room, bits and data agree"), || {
        let state = cache.state();
        let bits = blob.cached_bytes();
        state.size_bytes == bits && data_bytes(&data).abs_diff(bits) < BLOCK && state.size_bytes <= CACHE_BYTES
    });
    *store.always.lock().unwrap() = None;
    life(&cache, store, 99);
}

fn crash_everywhere(then: Then, boots: [u8; 2]) {
    let store = FakeStore::new(content(11, BLOCKS * BLOCK - 50));
    for tear in [Tear::Nothing, Tear::Part, Tear::Whole] {
        for stop_at in 0.. {
            let folder = tempfile::tempdir().unwrap();
            // Something of an earlier process is there.
            let before = open(folder.path(), CACHE_BYTES, Arc::new(SystemOps), 1);
            life(&before, &store, 7);
            drop(before);
            let ops = FaultyOps::new(stop_at, tear, then);
            let cache = open(folder.path(), CACHE_BYTES, ops.clone(), boots[0]);
            life(&cache, &store, 8);
            drop(cache);
            check(
                folder.path(),
                &store,
                boots[1],
                &format!("{tear:?} at operation {stop_at}"),
            );
            if !ops.was_reached() {
                break;
            }
        }
    }
}

#[test]
fn a_kill_at_any_operation_leaves_nothing_wrong() {
    crash_everywhere(Then::Dead, [1, 1]);
}

#[test]
fn a_kill_at_any_operation_after_the_host_went_down_leaves_nothing_wrong() {
    crash_everywhere(Then::Dead, [2, 2]);
}

#[test]
fn an_operation_that_fails_costs_nothing_but_the_caching() {
    crash_everywhere(Then::GoesOn, [1, 1]);
}

/// Any subset of what was written since the last write-back may be lost with the host.
#[test]
fn a_host_that_goes_down_may_lose_any_data_and_any_bit() {
    let store = FakeStore::new(content(12, BLOCKS * BLOCK - 50));
    for seed in 0..40 {
        let folder = tempfile::tempdir().unwrap();
        let cache = open(folder.path(), CACHE_BYTES, Arc::new(SystemOps), 1);
        life(&cache, &store, seed);
        drop(cache);
        let mut random = Random(seed);
        let digest = spec(&store.content).digest;
        let write = |name: &str| {
            File::options()
                .read(true)
                .write(true)
                .open(folder.path().join(format!("{digest}.{name}")))
        };
        // Everything may have been evicted.
        let (Ok(data), Ok(map)) = (write("data"), write("map")) else {
            continue;
        };
        for block in 0..BLOCKS {
            if random.below(3) == 0 {
                let junk = [[0u8; BLOCK as usize], [0x55; BLOCK as usize]][random.below(2) as usize];
                std::os::unix::fs::FileExt::write_all_at(&data, &junk, block * BLOCK).unwrap();
            }
        }
        data.set_len(store.content.len() as u64).unwrap();
        for offset in [4096, 8192] {
            if random.below(2) == 0 {
                SystemOps.write_word(&map, random.next(), offset).unwrap();
            }
        }
        drop((data, map));
        // The first process after that dies while it makes the bits true for its boot.
        let ops = FaultyOps::new(random.below(8) as usize, Tear::Part, Then::Dead);
        let cache = open(folder.path(), CACHE_BYTES, ops, 2);
        drop(cache.blob(spec(&store.content), store.clone()));
        drop(cache);
        check(folder.path(), &store, 2, &format!("seed {seed}"));
    }
}
