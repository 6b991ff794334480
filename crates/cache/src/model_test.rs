//! Random reads, evictions, faults and restarts, by several threads, against the true bytes; the cache holds a tenth.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aenv_layers::Blob;
use proptest::prelude::*;

use crate::cache::{Cache, CacheState};
use crate::crash_test::{FaultyOps, Tear, Then};
use crate::file_ops::{FileOps, SystemOps};
use crate::testing::{BLOCK, FakeStore, Fault, Random, content, data_bytes, open, spec, wait_until};

const BLOCKS: u64 = 300;
const BLOBS: u64 = 3;
const THREADS: u64 = 4;
const CACHE_BYTES: u64 = BLOBS * BLOCKS * BLOCK / 10;

fn readers(cache: &Cache, stores: &[Arc<FakeStore>], seed: u64, reads: u64) -> u64 {
    let verified = AtomicU64::new(0);
    let blobs: Vec<_> = stores
        .iter()
        .map(|store| cache.blob(spec(&store.content), store.clone()))
        .collect();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (blobs, verified) = (&blobs, &verified);
            scope.spawn(move || {
                let mut random = Random(seed * 100 + thread);
                for _ in 0..reads {
                    let which = random.below(BLOBS) as usize;
                    let Ok(blob) = &blobs[which] else { continue };
                    let truth = &stores[which].content;
                    let longest = if random.below(3) == 0 { 20 * BLOCK } else { 600 };
                    let length = (1 + random.below(longest)).min(truth.len() as u64);
                    let offset = random.below(truth.len() as u64 - length + 1);
                    let mut buffer = vec![0xcc; length as usize];
                    if blob.read_exact_at(&mut buffer, offset).is_ok() {
                        let right = buffer == truth[offset as usize..(offset + length) as usize];
                        assert!(
                            right,
                            "seed {seed}: wrong bytes of blob {which} at {offset}, {length} long"
                        );
                        verified.fetch_add(1, Ordering::Relaxed);
                    }
                    match random.below(40) {
                        0 => drop(cache.evict(random.below(CACHE_BYTES))),
                        1 => drop(cache.evict_blob(blob.digest())),
                        2 => {
                            stores[which]
                                .fail_next(&[[Fault::Transient, Fault::WrongBlock(0), Fault::Truncated]
                                    [random.below(3) as usize]])
                        }
                        3 => blob.will_read(random.below(truth.len() as u64), 30 * BLOCK),
                        _ => {}
                    }
                    // The room is taken before the bytes are written: what counts as used is never over the limit.
                    assert!(cache.state().size_bytes <= CACHE_BYTES, "seed {seed}");
                }
            });
        }
    });
    verified.load(Ordering::Relaxed)
}

fn bits(state: &CacheState) -> u64 {
    state.blobs.iter().map(|blob| blob.cached_bytes).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn readers_never_see_a_wrong_byte(seed in 1u64..1_000_000, deaths in prop::collection::vec((0usize..400, 0u8..2), 1..4)) {
        let folder = tempfile::tempdir().unwrap();
        let stores: Vec<_> = (0..BLOBS).map(|blob| FakeStore::new(content(seed + blob, BLOCKS * BLOCK - 77 * blob))).collect();
        let mut boot = 1;
        for (life, (stop_at, host_dies)) in deaths.iter().enumerate() {
            let ops = FaultyOps::new(*stop_at, Tear::Part, Then::Dead);
            let cache = open(folder.path(), CACHE_BYTES, ops, boot);
            readers(&cache, &stores, seed + life as u64, 60);
            drop(cache);
            boot += host_dies;
        }
        let ops: Arc<dyn FileOps> = Arc::new(SystemOps);
        let cache = open(folder.path(), CACHE_BYTES, ops, boot);
        let verified = readers(&cache, &stores, seed, 100);
        prop_assert!(verified > 100, "{} reads were verified", verified);
        wait_until("background and keeper rest, and room, bits and data agree", || {
            let state = cache.state();
            let data = |store: &Arc<FakeStore>| data_bytes(&folder.path().join(format!("{}.data", spec(&store.content).digest)));
            // A blob's short last block takes a whole page.
            let on_disk: u64 = stores.iter().map(data).sum();
            cache.background().0 == 0 && state.size_bytes == bits(&state) && on_disk.abs_diff(state.size_bytes) < BLOBS * BLOCK
        });
    }
}
