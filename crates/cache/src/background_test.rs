//! What is fetched before anybody asks for it: read-ahead, replay of traces, fills.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::testing::{BLOCK, FakeStore, bench, bench_of, content, wait_until};

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
