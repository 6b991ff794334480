//! What readers of a cached blob see, and what they cost its store.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aenv_layers::Blob;

use crate::cache::Cache;
use crate::error::CacheError;
use crate::file_ops::SystemOps;
use crate::testing::{BLOCK, FakeStore, Fault, content, open, spec, wait_until};
use crate::{CachedBlob, Cancel, Patience, with_patience};

const BLOCKS: u64 = 200;

struct Bench {
    _folder: tempfile::TempDir,
    cache: Cache,
    store: Arc<FakeStore>,
    blob: Arc<CachedBlob>,
}

fn bench_of(store: Arc<FakeStore>, size_bytes_max: u64) -> Bench {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), size_bytes_max, Arc::new(SystemOps), 1);
    let blob = cache.blob(spec(&store.content), store.clone()).unwrap();
    Bench {
        _folder: folder,
        cache,
        store,
        blob,
    }
}

fn bench() -> Bench {
    bench_of(FakeStore::new(content(1, BLOCKS * BLOCK - 100)), 1 << 30)
}

impl Bench {
    fn read(&self, offset: u64, length: u64) -> Result<(), aenv_layers::Error> {
        let mut buffer = vec![0xcc; length as usize];
        self.blob.read_exact_at(&mut buffer, offset)?;
        assert!(
            buffer == self.store.content[offset as usize..(offset + length) as usize],
            "wrong bytes at {offset}"
        );
        Ok(())
    }

    fn impatient(&self, time: Duration, offset: u64) -> Result<(), CacheError> {
        let outcome = with_patience(Patience::lasting(time, None), || self.read(offset, 10));
        outcome.map_err(cause)
    }
}

fn cause(error: aenv_layers::Error) -> CacheError {
    match error {
        aenv_layers::Error::Remote { source, .. } => *source.downcast::<CacheError>().unwrap(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_block_is_fetched_once_and_only_what_is_needed() {
    let bench = bench();
    bench.read(5 * BLOCK + 10, 20).unwrap();
    bench.read(5 * BLOCK, BLOCK).unwrap();
    assert_eq!(*bench.store.requests.lock().unwrap(), [(5 * BLOCK, BLOCK)]);
    let counts = bench.cache.state().counts;
    assert_eq!((counts.hits, counts.misses, counts.bytes_from_store), (1, 1, BLOCK));
}

#[test]
fn neighbours_come_in_one_request_and_what_is_there_is_left_out() {
    let bench = bench();
    bench.read(3 * BLOCK, 1).unwrap();
    bench.read(0, 8 * BLOCK).unwrap();
    let requests = bench.store.requests.lock().unwrap().clone();
    assert_eq!(
        requests[..3],
        [(3 * BLOCK, BLOCK), (0, 3 * BLOCK), (4 * BLOCK, 4 * BLOCK)]
    );
    bench.read((BLOCKS - 3) * BLOCK, 3 * BLOCK - 100).unwrap();
}

#[test]
fn the_end_of_the_blob_inside_a_read_is_an_error_and_never_zeros() {
    let bench = bench();
    let end = bench.blob.len_bytes();
    let mut buffer = [0; 200];
    for offset in [end - 100, end, end + 1, u64::MAX - 10] {
        let error = bench.blob.read_exact_at(&mut buffer, offset).unwrap_err();
        assert_eq!(error.kind(), aenv_layers::ErrorKind::Corrupt, "{error}");
    }
    bench.read(end - 200, 200).unwrap();
}

#[test]
fn many_readers_of_one_block_are_one_request() {
    let bench = bench_of(
        FakeStore::slow(content(2, BLOCKS * BLOCK), Duration::from_millis(30)),
        1 << 30,
    );
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| bench.read(7 * BLOCK + 5, 100).unwrap());
        }
    });
    assert_eq!(bench.store.count(), 1);
}

#[test]
fn failures_are_retried_and_count_as_a_stall() {
    let bench = bench();
    bench
        .store
        .fail_next(&[Fault::Transient, Fault::Truncated, Fault::Permanent]);
    bench.read(0, 10).unwrap();
    assert_eq!(bench.store.count(), 4);
    let counts = bench.cache.state().counts;
    assert!(counts.stalls == 1 && counts.stall_us > 0, "{counts:?}");
}

#[test]
fn what_is_not_there_is_believed_after_some_attempts() {
    let bench = bench();
    *bench.store.always.lock().unwrap() = Some(Fault::Permanent);
    assert!(matches!(
        bench.read(0, 10).map_err(cause),
        Err(CacheError::Refused { .. })
    ));
    assert_eq!(bench.store.count(), 3);
    *bench.store.always.lock().unwrap() = None;
    bench.read(0, 10).unwrap();
}

#[test]
fn wrong_bytes_are_fetched_again_and_their_neighbours_are_not() {
    let bench = bench();
    bench.store.fail_next(&[Fault::WrongBlock(2), Fault::WrongBlock(0)]);
    bench.read(0, 5 * BLOCK).unwrap();
    let requests = bench.store.requests.lock().unwrap().clone();
    assert_eq!(requests[..3], [(0, 5 * BLOCK), (2 * BLOCK, BLOCK), (2 * BLOCK, BLOCK)]);
    assert_eq!(bench.cache.state().counts.verify_failures, 2);
}

#[test]
fn bytes_that_stay_wrong_are_an_error_that_names_the_block_and_good_ones_are_kept() {
    let bench = bench();
    *bench.store.always.lock().unwrap() = Some(Fault::WrongBlock(0));
    match bench.read(4 * BLOCK, 3 * BLOCK).map_err(cause) {
        Err(CacheError::WrongBytes { block: 4, .. }) => {}
        other => panic!("{other:?}"),
    }
    bench.read(5 * BLOCK, 2 * BLOCK).unwrap();
    *bench.store.always.lock().unwrap() = None;
    bench.read(4 * BLOCK, BLOCK).unwrap();
}

#[test]
fn a_silent_store_is_waited_for_until_the_readers_deadline_and_no_longer() {
    let bench = bench();
    bench.store.silent.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    let error = bench.impatient(Duration::from_millis(300), 0).unwrap_err();
    assert!(matches!(error, CacheError::TimedOut { .. }), "{error}");
    let time = begun.elapsed();
    assert!(
        time >= Duration::from_millis(250) && time < Duration::from_secs(5),
        "{time:?}"
    );
    bench.store.silent.store(false, Ordering::Relaxed);
    bench.read(0, 10).unwrap();
}

#[test]
fn a_patient_reader_gets_what_an_impatient_one_gave_up() {
    let bench = bench();
    bench.store.silent.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let impatient = scope.spawn(|| bench.impatient(Duration::from_millis(100), 0));
        wait_until("the first one fetches", || bench.store.count() == 1);
        let patient = scope.spawn(|| bench.impatient(Duration::from_secs(20), 0));
        assert!(impatient.join().unwrap().is_err());
        bench.store.silent.store(false, Ordering::Relaxed);
        patient.join().unwrap().unwrap();
    });
}

#[test]
fn a_cancelled_reader_stops_waiting_for_others_at_once() {
    let bench = bench();
    bench.store.silent.store(true, Ordering::Relaxed);
    let cancel = Cancel::default();
    std::thread::scope(|scope| {
        let fetching = scope.spawn(|| bench.impatient(Duration::from_secs(20), 0));
        wait_until("the first one fetches", || bench.store.count() == 1);
        let waiting = scope.spawn(|| {
            with_patience(Patience::lasting(Duration::from_secs(20), Some(cancel.clone())), || {
                bench.read(0, 10)
            })
        });
        std::thread::sleep(Duration::from_millis(20));
        let begun = Instant::now();
        cancel.cancel();
        assert!(matches!(
            waiting.join().unwrap().map_err(cause),
            Err(CacheError::Cancelled { .. })
        ));
        assert!(begun.elapsed() < Duration::from_secs(2));
        bench.store.silent.store(false, Ordering::Relaxed);
        fetching.join().unwrap().unwrap();
    });
}

#[test]
fn a_sequential_reader_finds_its_blocks_there() {
    let store = FakeStore::slow(content(3, 2000 * BLOCK), Duration::from_millis(2));
    let bench = bench_of(store, 1 << 30);
    for block in 0..2000 {
        bench.read(block * BLOCK, BLOCK).unwrap();
    }
    let counts = bench.cache.state().counts;
    assert!(counts.misses < 1000, "{counts:?}");
    assert_eq!(counts.bytes_from_store, 2000 * BLOCK, "and nothing is fetched twice");
}

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
        _folder: folder,
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
    let dir = bench._folder.path();
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
        _folder: folder,
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
        _folder: folder,
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
            _folder: folder,
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

#[test]
fn a_trace_is_replayed_with_many_requests_at_a_time_and_the_reader_then_waits_for_nothing() {
    let bench = bench();
    bench.cache.trace_start("t", None).unwrap();
    let places: Vec<u64> = (0..40).map(|index| index * 37 % 100 * 2).collect();
    places.iter().for_each(|block| bench.read(block * BLOCK, 100).unwrap());
    let trace = bench.cache.trace_finish("t").unwrap();
    assert_eq!(trace.blocks(), 40);
    let other = bench_of(
        FakeStore::slow(bench.store.content.clone(), Duration::from_millis(20)),
        1 << 30,
    );
    other.cache.prefetch(&trace, |digest| {
        (digest == other.blob.digest()).then(|| other.blob.clone())
    });
    wait_until("all is fetched", || other.blob.cached_bytes() >= 40 * BLOCK);
    places.iter().for_each(|block| other.read(block * BLOCK, 100).unwrap());
    assert_eq!(other.cache.state().counts.misses, 0);
    assert!(other.store.most_running.load(Ordering::SeqCst) > 4);
    assert!(other.store.most_running.load(Ordering::SeqCst) <= crate::limits::BACKGROUND_THREADS_MAX);
}

#[test]
fn a_fill_keeps_its_rate_and_ends_when_all_is_there() {
    let bench = bench_of(FakeStore::new(content(8, 1024 * BLOCK)), 1 << 30);
    let begun = Instant::now();
    bench.cache.fill(vec![bench.blob.clone()], 20 << 20);
    wait_until("all is there", || bench.blob.cached_bytes() == 1024 * BLOCK);
    assert!(
        begun.elapsed() >= Duration::from_millis(140),
        "4 MiB at 20 MiB/s in {:?}",
        begun.elapsed()
    );
    bench.cache.fill(vec![bench.blob.clone()], 20 << 20);
    wait_until("nothing is left to do", || bench.cache.background().0 == 0);
    assert_eq!(bench.store.bytes.load(Ordering::Relaxed), 1024 * BLOCK);
}

#[test]
fn a_fill_never_evicts() {
    let bench = bench_of(FakeStore::new(content(9, 1024 * BLOCK)), 600 * BLOCK);
    bench.cache.fill(vec![bench.blob.clone()], 1 << 30);
    wait_until("it has given up", || {
        bench.cache.background().0 == 0 && bench.store.count() > 0
    });
    assert_eq!(bench.cache.state().counts.evicted_bytes, 0);
}
