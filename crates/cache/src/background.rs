//! Fetching that no reader waits for: read-ahead, then prefetch, then fills, on a few threads that come and go.
//!
//! Nothing here is retried for long: what a background thread leaves out a reader fetches, with all its patience. One
//! that finds a store silent drops whatever else waits for the same blob, so that other stores' blobs get their turn.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::blob::CachedBlob;
use crate::cache::Cache;
use crate::claim::Look;
use crate::error::CacheError;
use crate::fetch::Download;
use crate::limits::{
    BACKGROUND_FETCH_BYTES_MAX, BACKGROUND_IDLE, BACKGROUND_THREADS_MAX, CANCEL_LOOK, PREFETCH_ATTEMPTS_MAX,
    READ_AHEAD_QUEUE_MAX, READ_AHEAD_SHARE,
};
use crate::patience::Patience;
use crate::shared::Shared;
use crate::trace::Trace;

/// How long background work may wait for a store, whatever its attempts do.
const PATIENCE: Duration = Duration::from_secs(30);

/// Failures in a row after which a fill is given up, and the longest pause between two.
const FILL_FAILURES_MAX: u32 = 20;
const FILL_PAUSE_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(crate) struct Background {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// Of readers that may be gone meanwhile.
    ahead: VecDeque<(Weak<CachedBlob>, Range<u64>)>,
    prefetch: VecDeque<(Arc<CachedBlob>, Range<u64>)>,
    fills: VecDeque<Fill>,
    /// One thread at a time fills.
    filling: bool,
    fill_bytes_per_s_max: u64,
    threads: usize,
    idle: usize,
    stop: bool,
}

#[derive(Debug)]
struct Fill {
    blob: Arc<CachedBlob>,
    next: u64,
    failures: u32,
}

enum Work {
    Piece(Arc<CachedBlob>, Range<u64>),
    Fill(Fill),
}

impl Background {
    /// Drops what waits; threads end when their present piece is done.
    pub fn stop(&self) {
        let mut queue = self.queue();
        queue.stop = true;
        let dropped = (std::mem::take(&mut queue.prefetch), std::mem::take(&mut queue.fills));
        queue.ahead.clear();
        drop(queue);
        drop(dropped);
        self.work.notify_all();
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Every change is one call of a queue or a counter.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cache {
    /// Fetches the blocks of a trace in the background. `blob` finds the blobs; those that it does not know are skipped.
    pub fn prefetch(&self, trace: &Trace, mut blob: impl FnMut(&str) -> Option<Arc<CachedBlob>>) {
        let blobs: Vec<_> = trace.digests().map(&mut blob).collect();
        let mut pieces = VecDeque::new();
        for (place, bytes) in trace.ranges() {
            let Some(blob) = &blobs[place] else { continue };
            let geometry = blob.geometry();
            let blocks =
                bytes.start / geometry.block_bytes..bytes.end.div_ceil(geometry.block_bytes).min(geometry.blocks());
            pieces.extend(cut(&blocks, geometry.block_bytes).map(|piece| (blob.clone(), piece)));
        }
        self.shared.background.queue().prefetch.append(&mut pieces);
        self.shared.call_threads();
    }

    /// Fetches whole blobs in the background, one after the other, at a rate that holds for all fills. 0 stops them.
    pub fn fill(&self, blobs: Vec<Arc<CachedBlob>>, bytes_per_s_max: u64) {
        let mut queue = self.shared.background.queue();
        queue.fill_bytes_per_s_max = bytes_per_s_max;
        if bytes_per_s_max == 0 {
            let dropped = std::mem::take(&mut queue.fills);
            drop(queue);
            return drop(dropped);
        }
        for blob in blobs {
            let known = queue.fills.iter().any(|fill| Arc::ptr_eq(&fill.blob, &blob));
            if !known {
                queue.fills.push_back(Fill {
                    blob,
                    next: 0,
                    failures: 0,
                });
            }
        }
        drop(queue);
        self.shared.call_threads();
    }

    /// Pieces of work that wait, and threads: for tests and for the curious.
    pub fn background(&self) -> (usize, usize) {
        let queue = self.shared.background.queue();
        (
            queue.ahead.len() + queue.prefetch.len() + queue.fills.len(),
            queue.threads,
        )
    }
}

/// Pieces of at most one request.
fn cut(blocks: &Range<u64>, block_bytes: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let most = (BACKGROUND_FETCH_BYTES_MAX / block_bytes).max(1);
    let blocks = blocks.clone();
    blocks
        .clone()
        .step_by(most as usize)
        .map(move |start| start..(start + most).min(blocks.end))
}

impl Shared {
    /// Fetches blocks that a reader of `blob` will want soon. A hint: it is dropped where too much waits already.
    pub fn read_ahead(self: &Arc<Self>, blob: &CachedBlob, blocks: Range<u64>) {
        // In a small cache a large window would push out what is in use.
        let blocks_max = self.size_bytes_max() / READ_AHEAD_SHARE / blob.geometry().block_bytes;
        let blocks = blocks.start..blocks.end.min(blocks.start + blocks_max);
        let mut queue = self.background.queue();
        for piece in cut(&blocks, blob.geometry().block_bytes) {
            let there = blob.entry.present_run(&piece) == piece.end - piece.start;
            if !there && queue.ahead.len() < READ_AHEAD_QUEUE_MAX {
                queue.ahead.push_back((blob.me.clone(), piece));
            }
        }
        drop(queue);
        self.call_threads();
    }

    /// Wakes or starts as many threads as there are pieces, up to the limit.
    fn call_threads(self: &Arc<Self>) {
        let mut queue = self.background.queue();
        let fills = usize::from(!queue.filling && !queue.fills.is_empty());
        let mut wanted = queue.ahead.len() + queue.prefetch.len() + fills;
        wanted = wanted.saturating_sub(queue.idle);
        while wanted > 0 && queue.threads < BACKGROUND_THREADS_MAX && !queue.stop {
            let shared = self.clone();
            let thread = std::thread::Builder::new()
                .name("fetch".to_owned())
                .stack_size(256 << 10);
            if thread.spawn(move || shared.work()).is_err() {
                break;
            }
            queue.threads += 1;
            wanted -= 1;
        }
        drop(queue);
        self.background.work.notify_all();
    }

    fn work(self: &Arc<Self>) {
        let mut queue = self.background.queue();
        while !queue.stop {
            if let Some(work) = queue.next() {
                drop(queue);
                self.carry_out(work);
                queue = self.background.queue();
                continue;
            }
            queue.idle += 1;
            let waited = self.background.work.wait_timeout(queue, BACKGROUND_IDLE);
            let (back, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            queue = back;
            queue.idle -= 1;
            if waited.timed_out() && !queue.has_work() {
                break;
            }
        }
        queue.threads -= 1;
    }

    fn carry_out(self: &Arc<Self>, work: Work) {
        match work {
            Work::Piece(blob, blocks) => {
                if blob.fetch_in_background(&blocks).is_err() {
                    self.drop_pieces_of(&blob);
                }
            }
            Work::Fill(fill) => {
                let left = self.fill_a_piece(fill);
                let mut queue = self.background.queue();
                queue.filling = false;
                // Stopped meanwhile: then nothing is put back.
                if let Some(fill) = left
                    && queue.fill_bytes_per_s_max > 0
                    && !queue.stop
                {
                    queue.fills.push_front(fill);
                }
            }
        }
    }

    /// Its store is silent: readers will find out when it speaks again.
    fn drop_pieces_of(&self, blob: &Arc<CachedBlob>) {
        let mut queue = self.background.queue();
        queue
            .ahead
            .retain(|(other, _)| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(blob)));
        let (dropped, kept) = std::mem::take(&mut queue.prefetch)
            .into_iter()
            .partition(|(other, _)| Arc::ptr_eq(other, blob));
        queue.prefetch = kept;
        drop(queue);
        let _: VecDeque<_> = dropped;
    }

    /// The next missing piece of a fill, then the pause that its rate demands. None when there is nothing left to do, or
    /// no room: a fill never evicts.
    fn fill_a_piece(&self, mut fill: Fill) -> Option<Fill> {
        let geometry = fill.blob.geometry();
        let begun = Instant::now();
        fill.next += fill.blob.entry.present_run(&(fill.next..geometry.blocks()));
        if fill.next >= geometry.blocks() || self.is_nearly_full(BACKGROUND_FETCH_BYTES_MAX) {
            return None;
        }
        // Until the stock is taken nobody knows how much room there is.
        if self.foreground.load(Ordering::Relaxed) > 0 || !self.stock_taken.load(Ordering::Acquire) {
            self.pause(Duration::from_millis(5));
            return Some(fill);
        }
        let piece = cut(&(fill.next..geometry.blocks()), geometry.block_bytes).next()?;
        if fill.blob.fetch_in_background(&piece).is_err() {
            fill.failures += 1;
            self.pause(
                Duration::from_millis(500)
                    .saturating_mul(1 << fill.failures.min(6))
                    .min(FILL_PAUSE_MAX),
            );
            return (fill.failures < FILL_FAILURES_MAX).then_some(fill);
        }
        (fill.next, fill.failures) = (piece.end, 0);
        let bytes = geometry.end_of(piece.end - 1) - piece.start * geometry.block_bytes;
        let rate = self.background.queue().fill_bytes_per_s_max.max(1);
        let due = Duration::from_micros(bytes.saturating_mul(1_000_000) / rate);
        self.pause(due.saturating_sub(begun.elapsed()));
        Some(fill)
    }

    /// Sleeps, unless the cache ends or fills are stopped.
    fn pause(&self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let queue = self.background.queue();
            if left.is_zero() || queue.stop || queue.fill_bytes_per_s_max == 0 {
                return;
            }
            drop(queue);
            std::thread::sleep(left.min(CANCEL_LOOK));
        }
    }
}

impl Queue {
    fn next(&mut self) -> Option<Work> {
        while let Some((blob, blocks)) = self.ahead.pop_front() {
            if let Some(blob) = blob.upgrade() {
                return Some(Work::Piece(blob, blocks));
            }
        }
        if let Some((blob, blocks)) = self.prefetch.pop_front() {
            return Some(Work::Piece(blob, blocks));
        }
        if self.filling {
            return None;
        }
        let fill = self.fills.pop_front()?;
        self.filling = true;
        Some(Work::Fill(fill))
    }

    fn has_work(&self) -> bool {
        !self.ahead.is_empty() || !self.prefetch.is_empty() || !(self.filling || self.fills.is_empty())
    }
}

impl CachedBlob {
    /// Fetches what of these blocks is missing and nobody else fetches. Errors: the first failure.
    fn fetch_in_background(&self, blocks: &Range<u64>) -> Result<(), CacheError> {
        let patience = Patience::lasting(PATIENCE, None);
        let mut at = blocks.start;
        while at < blocks.end {
            at += self.entry.present_run(&(at..blocks.end));
            if at >= blocks.end {
                break;
            }
            match self.entry.look(&(at..blocks.end)) {
                Look::Present => {}
                Look::Busy => at += 1,
                Look::Suspect(claim) => {
                    self.examine(&claim);
                }
                Look::Missing(claim) => {
                    self.fetch(&claim, &mut Download::new(&patience, Some(PREFETCH_ATTEMPTS_MAX)))?;
                    at = claim.blocks.end;
                }
            }
        }
        Ok(())
    }
}
