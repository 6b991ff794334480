//! Who has read lately: the last two exports that differ, so that a writer is told from those beside it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::limits::READS_WINDOW;

#[derive(Debug)]
pub struct Readers {
    begun: Instant,
    last: AtomicU64,
    other: AtomicU64,
}

/// An export and when it was read, in one word: the low bits of its inode, and milliseconds since `begun`. Two exports with
/// the same low bits are taken for one, which costs one of them a slower read now and then. 0: nobody.
const INODE_BITS: u32 = 24;

fn word(inode: u64, ms: u64) -> u64 {
    ms << INODE_BITS | inode & ((1 << INODE_BITS) - 1)
}

fn is_of(word: u64, inode: u64) -> bool {
    (word ^ inode) & ((1 << INODE_BITS) - 1) == 0
}

impl Readers {
    pub fn new() -> Readers {
        Readers {
            begun: Instant::now(),
            last: AtomicU64::new(0),
            other: AtomicU64::new(0),
        }
    }

    pub fn saw(&self, inode: u64) {
        self.saw_at(inode, self.now_ms());
    }

    /// Whether another export than this one is being read.
    pub fn others_than(&self, inode: u64) -> bool {
        self.others_at(inode, self.now_ms())
    }

    fn saw_at(&self, inode: u64, now_ms: u64) {
        let (last, now) = (self.last.load(Ordering::Relaxed), word(inode, now_ms));
        // A store at each read would take the line from the other threads.
        if last == now {
            return;
        }
        if !is_of(last, inode) {
            self.other.store(last, Ordering::Relaxed);
        }
        self.last.store(now, Ordering::Relaxed);
    }

    fn others_at(&self, inode: u64, now_ms: u64) -> bool {
        let oldest_ms = now_ms.saturating_sub(READS_WINDOW.as_millis() as u64);
        [&self.last, &self.other].into_iter().any(|reader| {
            let reader = reader.load(Ordering::Relaxed);
            reader != 0 && !is_of(reader, inode) && reader >> INODE_BITS >= oldest_ms
        })
    }

    /// Never 0.
    fn now_ms(&self) -> u64 {
        self.begun.elapsed().as_millis() as u64 + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_that_reads_is_none_of_the_others() {
        let readers = Readers::new();
        let window_ms = READS_WINDOW.as_millis() as u64;
        assert!(!readers.others_at(1, 1));
        readers.saw_at(1, 10);
        assert!(!readers.others_at(1, 10) && readers.others_at(2, 10));
        readers.saw_at(2, 11);
        assert!(readers.others_at(1, 12) && readers.others_at(2, 12));
        // The other one stays known while one reads on.
        readers.saw_at(2, 20);
        assert!(readers.others_at(2, 20));
        readers.saw_at(2, 11 + window_ms);
        assert!(!readers.others_at(2, 11 + window_ms) && readers.others_at(1, 11 + window_ms));
        assert!(!readers.others_at(1, 12 + 2 * window_ms));
    }
}
