//! Making room: a clock over all words of all blobs. A block that was read since the hand came by is spared once.

use std::sync::{Arc, PoisonError};

use crate::entry::Entry;
use crate::limits::CLOCK_TURNS_MAX;
use crate::metrics::add;
use crate::shared::Shared;

/// Where the hand stands. Its lock is held by whoever evicts: two at a time would only free twice as much.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    entry: usize,
    word: usize,
}

impl Shared {
    /// Gives at least `wanted` bytes back, unless all that is left is in use. Returns how many.
    pub fn evict(&self, wanted: u64) -> u64 {
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        self.turn(&mut clock, wanted)
    }

    /// Evicts until at most `target` bytes are used. Of several that want room at the same time, the second finds that
    /// the first has made it.
    pub fn evict_to(&self, target: u64) {
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = self.used().saturating_sub(target);
        self.turn(&mut clock, wanted);
    }

    fn turn(&self, clock: &mut Clock, wanted: u64) -> u64 {
        let entries = self.entries();
        let words: usize = entries.iter().map(|entry| entry.words()).sum();
        let mut freed = 0;
        let mut looked_at = 0;
        clock.entry %= entries.len().max(1);
        while freed < wanted && looked_at < words * CLOCK_TURNS_MAX {
            let entry = &entries[clock.entry];
            let left = clock.word..entry.words();
            looked_at += left.len();
            let (bytes, stopped_at) = self.evict_from(entry, left, wanted - freed, false);
            freed += bytes;
            clock.word = stopped_at;
            if stopped_at >= entry.words() {
                self.remove_if_empty(entry);
                (clock.entry, clock.word) = ((clock.entry + 1) % entries.len(), 0);
            }
        }
        freed
    }

    /// Gives all of one blob back but what is being read or fetched at this moment.
    pub fn evict_blob(&self, digest: &str) -> u64 {
        let _clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = self.entry(digest) else {
            return 0;
        };
        let (freed, _) = self.evict_from(&entry, 0..entry.words(), u64::MAX, true);
        self.remove_if_empty(&entry);
        freed
    }

    /// Returns the bytes given back and the word to go on with.
    fn evict_from(&self, entry: &Arc<Entry>, words: std::ops::Range<usize>, wanted: u64, all: bool) -> (u64, usize) {
        let mut freed = 0;
        let Ok(files) = entry.files(&self.dir) else {
            // Somebody removed them: what is remembered of this blob is not true any more.
            self.forget_if_lost(entry);
            return (0, words.end);
        };
        let mut at = words.start;
        while at < words.end && freed < wanted {
            // A disk that cannot clear or punch keeps the bytes; the next word may be luckier.
            let bytes = entry
                .evict_word(self.ops.as_ref(), &files, at, wanted - freed, all)
                .unwrap_or(0);
            self.give_back(bytes);
            freed += bytes;
            at += 1;
        }
        add(&self.metrics.evicted_bytes, freed);
        (freed, at)
    }
}
