//! What readers of a cached blob see, and what they cost its store.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aenv_layers::Blob;

use crate::error::CacheError;
use crate::testing::{BLOCK, BLOCKS, FakeStore, Fault, bench, bench_of, cause, content, wait_until};
use crate::{Cancel, Patience, with_patience};

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
