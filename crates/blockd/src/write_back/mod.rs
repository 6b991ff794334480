//! Gives what guests write to the disk, in portions, so that a guest that writes does not take the disk from those that
//! read.
//!
//! Left alone the kernel keeps a tenth of the machine's memory dirty and then writes as fast as the disk takes it: a read
//! waits behind all that is in the disk's queue, tens of milliseconds, and a pause to durable has all of it before it. So
//! the bytes of one export that the disk does not have are bounded; one thread writes them back, a batch at a time, and
//! while another export is read it leaves the disk alone for twice as long as each batch took. A guest that writes faster
//! than that waits for the answers to its writes, as it would with a disk: no thread waits for it, the data is in its file
//! already.
//!
//! Nothing is durable because of it: who needs that syncs. Left out is what other programs write, and the kernel's own
//! write-back after 30 seconds.

mod dirty;
mod readers;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

pub use dirty::{Dirty, Withheld};
use readers::Readers;

use crate::export::Export;
use crate::limits::{BATCH_BESIDE_READS_BYTES, BATCH_BYTES, REST_FACTOR, REST_MAX};
use crate::stats::{Counter, Counters};

/// Batches of one export before it is another one's turn.
const BATCHES_PER_TURN: usize = 4;

#[derive(Debug)]
pub struct WriteBack {
    exports: Mutex<VecDeque<Weak<Export>>>,
    added: Condvar,
    readers: Readers,
}

impl Default for WriteBack {
    fn default() -> WriteBack {
        WriteBack {
            exports: Mutex::default(),
            added: Condvar::new(),
            readers: Readers::new(),
        }
    }
}

impl WriteBack {
    /// The export is read, and what is read may have to come from the disk.
    pub fn saw_read(&self, inode: u64) {
        self.readers.saw(inode);
    }

    /// After a write to the export.
    pub fn wrote(&self, export: &Arc<Export>, range: Range<u64>) {
        if export.dirty.add(range) {
            self.queue(Arc::downgrade(export));
        }
    }

    /// Writes back for ever; `answer` answers a write whose answer was kept back.
    pub fn run(&self, counters: &Counters, answer: impl Fn(&Export, Withheld)) {
        loop {
            let export = self.next();
            if (0..BATCHES_PER_TURN).all(|_| self.one_batch(&export, counters, &answer)) {
                self.queue(export);
            }
        }
    }

    /// Whether there may be more to do for the export.
    fn one_batch(&self, export: &Weak<Export>, counters: &Counters, answer: &impl Fn(&Export, Withheld)) -> bool {
        // Not longer than a batch: nobody else holds the files of an export that is gone.
        let Some(export) = export.upgrade() else { return false };
        let beside_reads = self.readers.others_than(export.inode);
        let bytes_max = match beside_reads {
            true => BATCH_BESIDE_READS_BYTES,
            false => BATCH_BYTES,
        };
        let Some(batch) = export.dirty.take(bytes_max) else {
            return false;
        };
        let begun = Instant::now();
        // Content that is not open has no unwritten data of ours.
        if let Some(content) = export.opened() {
            content.write_back(batch.range.clone());
        }
        let took = begun.elapsed();
        counters.add_many(Counter::WrittenBackBytes, batch.bytes);
        for withheld in export.dirty.finish(&batch) {
            counters.add(Counter::WriteKeptBack);
            answer(&export, withheld);
        }
        drop(export);
        if beside_reads {
            std::thread::sleep((took * REST_FACTOR).min(REST_MAX));
        }
        true
    }

    fn queue(&self, export: Weak<Export>) {
        self.exports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(export);
        self.added.notify_one();
    }

    fn next(&self) -> Weak<Export> {
        let mut exports = self.exports.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match exports.pop_front() {
                Some(export) => return export,
                None => exports = self.added.wait(exports).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}
