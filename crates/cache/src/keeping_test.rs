//! What is kept on disk, for how long, and what is left of it after an end of the process or of the host.

use std::sync::Arc;

use aenv_layers::Blob;

use crate::cache::Cache;
use crate::error::CacheError;
use crate::file_ops::SystemOps;
use crate::testing::{BLOCK, BLOCKS, Bench, FakeStore, bench, bench_of, content, open, spec, wait_until};

#[test]
fn a_cache_that_is_full_of_blocks_in_use_costs_the_caching_and_not_the_read() {
    let bench = bench_of(FakeStore::new(content(4, BLOCKS * BLOCK)), BLOCK);
    for block in [5, 9, 5, 77] {
        bench.read(block * BLOCK, 3 * BLOCK).unwrap();
    }
    assert!(bench.cache.state().size_bytes <= BLOCK);
}

#[test]
fn size_and_bits_agree_and_stay_within_the_limit() {
    let bench = bench_of(FakeStore::new(content(5, BLOCKS * BLOCK)), 20 * BLOCK);
    for block in 0..BLOCKS {
        bench.read((block * 7 % BLOCKS) * BLOCK, BLOCK).unwrap();
        assert!(bench.cache.state().size_bytes <= 20 * BLOCK);
    }
    let state = bench.cache.state();
    wait_until("the keeper rests", || {
        let state = bench.cache.state();
        state.size_bytes == state.blobs[0].cached_bytes
    });
    assert!(state.counts.evicted_bytes >= 180 * BLOCK);
}

#[test]
fn blocks_in_use_outlive_blocks_that_nobody_reads() {
    let bench = bench_of(FakeStore::new(content(6, 3100 * BLOCK)), 40 * BLOCK);
    for place in 1..200 {
        bench.read(0, BLOCK).unwrap();
        // So far apart that nothing is read ahead.
        bench.read(place * 15 * BLOCK, BLOCK).unwrap();
    }
    let asked = |requests: &[(u64, u64)]| requests.iter().filter(|(offset, _)| *offset == 0).count();
    let times = asked(&bench.store.requests.lock().unwrap());
    assert!(times <= 3, "the hot block was fetched {times} times");
}

#[test]
fn a_block_that_a_reader_is_in_is_not_evicted() {
    let bench = bench();
    bench.read(0, BLOCK).unwrap();
    bench.read(70 * BLOCK, BLOCK).unwrap();
    wait_until("read-ahead is done", || bench.cache.background().0 == 0);
    let pin = bench.blob.entry.pin(&(0..1));
    assert_eq!(bench.blob.entry.present_run(&(0..1)), 1);
    bench.cache.evict(u64::MAX);
    bench.cache.evict_blob(bench.blob.digest());
    assert_eq!(bench.blob.entry.present_run(&(0..1)), 1, "what it saw is still true");
    assert_eq!(
        bench.blob.entry.present_run(&(70..71)),
        0,
        "its neighbours' fate is none of its business"
    );
    let mut bytes = vec![0; BLOCK as usize];
    std::os::unix::fs::FileExt::read_exact_at(&bench.blob.files.data, &mut bytes, 0).unwrap();
    assert!(bytes == bench.store.content[..BLOCK as usize]);
    drop(pin);
    assert!(bench.cache.evict(u64::MAX) > 0);
    assert_eq!(bench.blob.entry.present_run(&(0..1)), 0);
}

#[test]
fn a_blob_is_evicted_whole_and_its_files_go_when_nobody_has_it_open() {
    let bench = bench();
    bench.read(0, 10 * BLOCK).unwrap();
    assert!(bench.cache.evict_blob(bench.blob.digest()) >= 10 * BLOCK);
    assert_eq!(bench.cache.state().blobs.len(), 1, "it is open");
    bench.read(0, BLOCK).unwrap();
    let Bench {
        folder,
        cache,
        store: _,
        blob,
    } = bench;
    let digest = blob.digest().to_owned();
    drop(blob);
    wait_until("read-ahead is done", || cache.background().0 == 0);
    wait_until("the blob is closed", || {
        cache.state().blobs.iter().all(|blob| !blob.in_use)
    });
    assert!(cache.evict_blob(&digest) >= BLOCK);
    assert!(cache.state().blobs.is_empty() && cache.state().size_bytes == 0);
    let names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["lock"]);
}

#[test]
fn a_folder_has_one_owner_and_what_is_not_the_caches_is_left_alone() {
    let bench = bench();
    let dir = bench.folder.path();
    let again = Cache::open(
        dir,
        crate::CacheLimits {
            size_bytes_max: 1 << 20,
        },
    );
    assert!(matches!(again, Err(CacheError::InUse(_))));
    drop(bench.blob);
    drop(bench.cache);
    std::fs::write(dir.join("precious"), b"x").unwrap();
    std::fs::create_dir(dir.join("reserved")).unwrap();
    let stray = "ab".repeat(32);
    std::fs::write(dir.join(format!("{stray}.data")), b"no map").unwrap();
    let cache = open(dir, 1 << 20, Arc::new(SystemOps), 1);
    wait_until("the stray is gone", || !dir.join(format!("{stray}.data")).exists());
    assert!(dir.join("precious").exists() && dir.join("reserved").exists());
    drop(cache);
}

#[test]
fn a_folder_that_was_emptied_under_a_running_cache_costs_time_only() {
    let bench = bench();
    bench.read(0, 10 * BLOCK).unwrap();
    wait_until("read-ahead is done", || bench.cache.background().0 == 0);
    let Bench {
        folder,
        cache,
        store,
        blob,
    } = bench;
    drop(blob);
    wait_until("the blob is closed", || {
        cache.state().blobs.iter().all(|blob| !blob.in_use)
    });
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    assert_eq!(cache.evict(1), 0);
    assert!(cache.state().blobs.is_empty() && cache.state().size_bytes == 0);
    let blob = cache.blob(spec(&store.content), store.clone()).unwrap();
    let mut buffer = vec![0; 10 * BLOCK as usize];
    blob.read_exact_at(&mut buffer, 0).unwrap();
    assert!(buffer == store.content[..buffer.len()]);
}

#[test]
fn what_was_cached_is_there_for_the_next_process_without_a_request() {
    let bench = bench();
    bench.read(0, 50 * BLOCK).unwrap();
    wait_until("read-ahead is done", || bench.cache.background().0 == 0);
    let Bench {
        folder,
        cache,
        store,
        blob,
    } = bench;
    drop((blob, cache));
    let cache = open(folder.path(), 1 << 30, Arc::new(SystemOps), 1);
    let before = store.count();
    let blob = cache.blob(spec(&store.content), store.clone()).unwrap();
    let mut buffer = vec![0; 50 * BLOCK as usize];
    blob.read_exact_at(&mut buffer, 0).unwrap();
    assert!(buffer == store.content[..buffer.len()]);
    assert_eq!(store.count(), before);
}

#[test]
fn after_the_host_went_down_blocks_are_verified_again_and_unverifiable_ones_dropped() {
    for verified in [true, false] {
        let bench = bench();
        bench.read(0, 10 * BLOCK).unwrap();
        wait_until("read-ahead is done", || {
            bench.cache.background() == (0, 0) || bench.cache.background().0 == 0
        });
        let Bench {
            folder,
            cache,
            store,
            blob,
        } = bench;
        let data = folder.path().join(format!("{}.data", blob.digest()));
        drop((blob, cache));
        let file = std::fs::File::options().write(true).open(data).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[0; BLOCK as usize], 3 * BLOCK).unwrap();
        let cache = open(folder.path(), 1 << 30, Arc::new(SystemOps), 2);
        let mut spec = spec(&store.content);
        if !verified {
            spec.blocks = None;
        }
        let before = store.count();
        let blob = cache.blob(spec, store.clone()).unwrap();
        assert_eq!(blob.cached_bytes() > 0, verified);
        let mut buffer = vec![0; 10 * BLOCK as usize];
        blob.read_exact_at(&mut buffer, 0).unwrap();
        assert!(buffer == store.content[..buffer.len()]);
        let expected = if verified { (3 * BLOCK, BLOCK) } else { (0, 10 * BLOCK) };
        assert_eq!(store.requests.lock().unwrap()[before], expected);
        assert_eq!(cache.state().size_bytes, blob.cached_bytes());
    }
}
