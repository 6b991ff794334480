//! What of one export was written and not yet given to the disk, and whose answers wait for it.
//!
//! Bytes are counted by pieces of the export: a piece that is written again and again counts once, and two writes far apart
//! are two requests to the disk, not one over everything between them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::limits::{DIRTY_BYTES_BEGIN, DIRTY_BYTES_END, DIRTY_BYTES_MAX, DIRTY_PIECE_BYTES, PAGE_BYTES};

/// A write that is done and whose answer is kept back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Withheld {
    pub unique: u64,
    pub count: u32,
}

/// A part that the disk is asked to take.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch {
    pub range: Range<u64>,
    pub bytes: u64,
}

#[derive(Debug, Default)]
pub struct Dirty {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Bytes of each piece, by its number.
    pieces: BTreeMap<u64, u64>,
    /// Of all pieces and of the batch under way.
    bytes: u64,
    /// The piece after the last batch: the disk is written in rounds, like a lift.
    next: u64,
    /// Whether somebody is going to take batches. Always so from `DIRTY_BYTES_BEGIN` on.
    queued: bool,
    withheld: Vec<Withheld>,
}

impl Dirty {
    /// After a write. Returns whether the caller has to see to it that batches are taken.
    pub fn add(&self, range: Range<u64>) -> bool {
        let mut inner = self.lock();
        let mut at = range.start;
        while at < range.end {
            let piece = at / DIRTY_PIECE_BYTES;
            let end = range.end.min((piece + 1) * DIRTY_PIECE_BYTES);
            let held = inner.pieces.entry(piece).or_default();
            // What is less than a page costs the disk a page.
            let more = (end - at).max(PAGE_BYTES).min(DIRTY_PIECE_BYTES - *held);
            *held += more;
            inner.bytes += more;
            at = end;
        }
        inner.bytes >= DIRTY_BYTES_BEGIN && !std::mem::replace(&mut inner.queued, true)
    }

    /// Some of it, up to about so many bytes; none if there is little left, and then `add` will ask again.
    pub fn take(&self, bytes_max: u64) -> Option<Batch> {
        let mut inner = self.lock();
        let mut round = inner.pieces.range(inner.next..).chain(&inner.pieces);
        let first = round.next().filter(|_| inner.bytes > DIRTY_BYTES_END);
        let Some((&first, _)) = first else {
            inner.queued = false;
            return None;
        };
        let (mut bytes, mut end) = (0, first);
        while bytes < bytes_max
            && let Some((&piece, _)) = inner.pieces.range(end..).next()
        {
            bytes += inner.pieces.remove(&piece).unwrap_or(0);
            end = piece + 1;
        }
        inner.next = end;
        Some(Batch {
            range: first * DIRTY_PIECE_BYTES..end * DIRTY_PIECE_BYTES,
            bytes,
        })
    }

    /// The disk has the batch. Returns the answers that are due.
    pub fn finish(&self, batch: &Batch) -> Vec<Withheld> {
        let mut inner = self.lock();
        inner.bytes -= batch.bytes;
        match inner.bytes < DIRTY_BYTES_MAX {
            true => std::mem::take(&mut inner.withheld),
            false => Vec::new(),
        }
    }

    /// Whether writes are not to be answered for now.
    pub fn is_full(&self) -> bool {
        self.lock().bytes >= DIRTY_BYTES_MAX
    }

    /// Keeps an answer back until a batch is finished. False if that is not needed any more.
    pub fn withhold(&self, answer: Withheld) -> bool {
        let mut inner = self.lock();
        let full = inner.bytes >= DIRTY_BYTES_MAX;
        if full {
            inner.withheld.push(answer);
        }
        full
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = DIRTY_PIECE_BYTES;

    fn pieces(range: Range<u64>) -> Range<u64> {
        range.start * PIECE..range.end * PIECE
    }

    fn bytes(dirty: &Dirty) -> u64 {
        dirty.lock().bytes
    }

    #[test]
    fn a_piece_that_is_written_again_counts_once_and_a_small_write_as_a_page() {
        let dirty = Dirty::default();
        dirty.add(512..1024);
        assert_eq!(bytes(&dirty), PAGE_BYTES);
        for _ in 0..3 {
            dirty.add(pieces(0..2));
        }
        assert_eq!(bytes(&dirty), 2 * PIECE);
        dirty.add(3 * PIECE - 512..3 * PIECE + 512);
        assert_eq!(bytes(&dirty), 2 * PIECE + 2 * PAGE_BYTES);
    }

    #[test]
    fn somebody_is_asked_once_and_again_when_little_was_left() {
        let dirty = Dirty::default();
        let begin = DIRTY_BYTES_BEGIN / PIECE;
        assert!(!dirty.add(pieces(0..begin - 1)));
        assert!(dirty.add(pieces(begin..begin + 1)));
        assert!(!dirty.add(pieces(begin + 1..begin + 9)));
        while let Some(batch) = dirty.take(4 * PIECE) {
            dirty.finish(&batch);
        }
        assert!(bytes(&dirty) <= DIRTY_BYTES_END);
        assert!(dirty.add(pieces(0..begin)));
    }

    #[test]
    fn batches_go_round_and_leave_out_what_is_clean() {
        let dirty = Dirty::default();
        let begin = DIRTY_BYTES_BEGIN / PIECE;
        dirty.add(pieces(10..10 + begin));
        dirty.add(pieces(1000..1002));
        let batch = dirty.take(2 * PIECE).unwrap();
        assert_eq!(batch.range, pieces(10..12));
        dirty.finish(&batch);
        dirty.add(pieces(0..2));
        assert_eq!(dirty.take(PIECE).unwrap().range, pieces(12..13));
        let rest = dirty.take((begin - 3 + 1) * PIECE).unwrap();
        assert_eq!(rest.range, pieces(13..1001));
        // What is under way still counts.
        assert_eq!(bytes(&dirty), (begin + 2) * PIECE);
        assert_eq!(dirty.take(2 * PIECE).unwrap().range, pieces(1001..1002));
        assert_eq!(dirty.take(PIECE).unwrap().range, pieces(0..1));
    }

    #[test]
    fn answers_wait_while_too_much_is_dirty() {
        let dirty = Dirty::default();
        let answer = |unique| Withheld { unique, count: 1 };
        dirty.add(pieces(0..DIRTY_BYTES_MAX / PIECE - 1));
        assert!(!dirty.is_full() && !dirty.withhold(answer(1)));
        dirty.add(pieces(0..DIRTY_BYTES_MAX / PIECE + 1));
        assert!(dirty.is_full() && dirty.withhold(answer(2)) && dirty.withhold(answer(3)));
        let first = dirty.take(PIECE).unwrap();
        assert_eq!(dirty.finish(&first), []);
        let second = dirty.take(PIECE).unwrap();
        assert_eq!(dirty.finish(&second), [answer(2), answer(3)]);
        let third = dirty.take(PIECE).unwrap();
        assert_eq!(dirty.finish(&third), []);
    }
}
