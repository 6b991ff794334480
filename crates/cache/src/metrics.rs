//! What happened since the cache was opened.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counted as it happens.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub hits: AtomicU64,
    pub misses: AtomicU64,
    pub bytes_from_store: AtomicU64,
    pub bytes_from_cache: AtomicU64,
    pub stalls: AtomicU64,
    pub stall_us: AtomicU64,
    pub verify_failures: AtomicU64,
    pub evicted_bytes: AtomicU64,
}

/// A copy of the counters. Hits and misses are blocks of reads; the rest is bytes, events and microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub hits: u64,
    pub misses: u64,
    pub bytes_from_store: u64,
    pub bytes_from_cache: u64,
    pub stalls: u64,
    pub stall_us: u64,
    pub verify_failures: u64,
    pub evicted_bytes: u64,
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Metrics {
    pub fn stalled(&self, time: Duration) {
        add(&self.stalls, 1);
        add(&self.stall_us, u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    pub fn counts(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            hits: get(&self.hits),
            misses: get(&self.misses),
            bytes_from_store: get(&self.bytes_from_store),
            bytes_from_cache: get(&self.bytes_from_cache),
            stalls: get(&self.stalls),
            stall_us: get(&self.stall_us),
            verify_failures: get(&self.verify_failures),
            evicted_bytes: get(&self.evicted_bytes),
        }
    }
}
