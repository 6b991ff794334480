//! One blob's place in the cache: its two files and, in memory, one bit per block.
//!
//! Owns the order in which bits and data change. Who may change a block is in `claim.rs`: all changes of bits happen
//! under the lock of the claims, so that two of them never write the same word of the map at once.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::file_ops::FileOps;
use crate::map_file::{self, Bits, BootId, Geometry};

#[derive(Debug)]
pub(crate) struct Entry {
    pub digest: String,
    pub geometry: Geometry,
    words: Box<[Word]>,
    claims: Mutex<HashSet<u64>>,
    released: Condvar,
    files: Mutex<Weak<Files>>,
}

/// 64 blocks.
#[derive(Debug, Default)]
struct Word {
    present: AtomicU64,
    /// In the data file perhaps: written before the host went down.
    suspect: AtomicU64,
    /// Read since the clock's hand was last here.
    referenced: AtomicU64,
    /// Readers that look at `present` or read what it promised.
    pins: AtomicU32,
}

/// Open only while somebody needs them: a cache has more blobs than a process has descriptors.
#[derive(Debug)]
pub(crate) struct Files {
    pub data: File,
    pub map: File,
}

/// Keeps the blocks of some words from being evicted.
pub(crate) struct Pin<'a>(&'a [Word]);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|word| {
            word.pins.fetch_sub(1, SeqCst);
        });
    }
}

impl Entry {
    /// A blob of which nothing is cached, with new files.
    pub fn create(ops: &dyn FileOps, dir: &Path, digest: &str, geometry: Geometry, boot: &BootId) -> io::Result<Entry> {
        // The map last, under its name when it is whole: a data file without a map is waste that stock-taking removes.
        ops.remove(&map_path(dir, digest))?;
        let data = ops.create(&data_path(dir, digest))?;
        ops.set_len(&data, geometry.size_bytes)?;
        let partial = dir.join(format!("{digest}.map.new"));
        let map = ops.create(&partial)?;
        map_file::create(ops, &map, geometry, boot)?;
        ops.rename(&partial, &map_path(dir, digest))?;
        let none = || vec![0; geometry.words()];
        let bits = Bits {
            present: none(),
            suspect: none(),
        };
        Ok(Entry::new(digest, geometry, &bits))
    }

    /// What an earlier process left, or None where that cannot be used.
    pub fn load(ops: &dyn FileOps, dir: &Path, digest: &str, boot: &BootId) -> io::Result<Option<Entry>> {
        let files = match Files::open(dir, digest) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let Some((geometry, written_under)) = map_file::geometry(&files.map) else {
            return Ok(None);
        };
        if files.data.metadata()?.len() != geometry.size_bytes {
            return Ok(None);
        }
        let bits = map_file::load(ops, &files.map, geometry, &written_under, boot)?;
        Ok(Some(Entry::new(digest, geometry, &bits)))
    }

    fn new(digest: &str, geometry: Geometry, bits: &Bits) -> Entry {
        let word = |(present, suspect): (&u64, &u64)| Word {
            present: AtomicU64::new(*present),
            suspect: AtomicU64::new(*suspect & !*present),
            ..Word::default()
        };
        Entry {
            digest: digest.to_owned(),
            geometry,
            words: bits.present.iter().zip(&bits.suspect).map(word).collect(),
            claims: Mutex::default(),
            released: Condvar::new(),
            files: Mutex::default(),
        }
    }

    pub fn files(&self, dir: &Path) -> io::Result<Arc<Files>> {
        let mut slot = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(files) = slot.upgrade() {
            return Ok(files);
        }
        let files = Arc::new(Files::open(dir, &self.digest)?);
        *slot = Arc::downgrade(&files);
        Ok(files)
    }

    pub fn words(&self) -> usize {
        self.words.len()
    }

    /// Bytes in the data file that count.
    pub fn cached_bytes(&self) -> u64 {
        let bytes = |(index, word): (usize, &Word)| {
            let bits = word.present.load(Relaxed) | word.suspect.load(Relaxed);
            self.geometry.bytes_of_word(index, bits)
        };
        self.words.iter().enumerate().map(bytes).sum()
    }

    /// While it lives, what `present_run` says of these blocks stays true.
    pub fn pin(&self, blocks: &Range<u64>) -> Pin<'_> {
        let words = &self.words[word_of(blocks.start)..=word_of(blocks.end - 1)];
        words.iter().for_each(|word| {
            // Before the bits are read, and `evict_word` reads the pins after it has cleared bits: one sees the other.
            word.pins.fetch_add(1, SeqCst);
        });
        Pin(words)
    }

    /// How many blocks from `blocks.start` on are present without a gap.
    pub fn present_run(&self, blocks: &Range<u64>) -> u64 {
        self.run(blocks, |word| word.present.load(SeqCst))
    }

    fn run(&self, blocks: &Range<u64>, bits: impl Fn(&Word) -> u64) -> u64 {
        let mut at = blocks.start;
        while at < blocks.end {
            let run = u64::from((bits(&self.words[word_of(at)]) >> (at % 64)).trailing_ones());
            at += run;
            // A run that ends inside its word ends.
            if run == 0 || !at.is_multiple_of(64) {
                break;
            }
        }
        at.min(blocks.end) - blocks.start
    }

    /// For the clock: these blocks were used.
    pub fn touch(&self, blocks: &Range<u64>) {
        for_each_word(blocks, |index, mask| {
            let referenced = &self.words[index].referenced;
            if referenced.load(Relaxed) & mask != mask {
                referenced.fetch_or(mask, Relaxed);
            }
        });
    }

    /// Data of these blocks is in the file: their bits are set, on disk first. The caller has claimed them.
    pub fn set_present(&self, ops: &dyn FileOps, files: &Files, blocks: &Range<u64>) -> io::Result<()> {
        let _claims = self.claims();
        let mut outcome = Ok(());
        for_each_word(blocks, |index, mask| {
            if outcome.is_ok() {
                outcome = self.set_in_word(ops, files, index, mask);
            }
        });
        outcome
    }

    fn set_in_word(&self, ops: &dyn FileOps, files: &Files, index: usize, mask: u64) -> io::Result<()> {
        let word = &self.words[index];
        let present = word.present.load(SeqCst) | mask;
        ops.write_word(&files.map, present, self.geometry.present_offset(index))?;
        word.present.store(present, SeqCst);
        let suspect = word.suspect.load(SeqCst);
        if suspect & mask != 0 {
            word.suspect.store(suspect & !mask, SeqCst);
            ops.write_word(&files.map, suspect & !mask, self.geometry.suspect_offset(index))?;
        }
        Ok(())
    }

    /// These suspect blocks are not what they should be. The caller has claimed them and punches afterwards.
    pub fn clear_suspect(&self, ops: &dyn FileOps, files: &Files, blocks: &Range<u64>) -> io::Result<()> {
        let _claims = self.claims();
        let mut outcome = Ok(());
        for_each_word(blocks, |index, mask| {
            let suspect = self.words[index].suspect.load(SeqCst) & !mask;
            self.words[index].suspect.store(suspect, SeqCst);
            let written = ops.write_word(&files.map, suspect, self.geometry.suspect_offset(index));
            outcome = std::mem::replace(&mut outcome, Ok(())).and(written);
        });
        outcome
    }

    /// A block that the local disk does not give back: it counts as missing. Its data stays, since others may be in it.
    /// Returns whether it was there.
    pub fn forget(&self, ops: &dyn FileOps, files: &Files, block: u64) -> bool {
        let _claims = self.claims();
        let (index, mask) = (word_of(block), 1 << (block % 64));
        let before = self.words[index].present.fetch_and(!mask, SeqCst);
        // A map that cannot be written on a disk that cannot be read: the next process finds the same error.
        let _ = ops.write_word(&files.map, before & !mask, self.geometry.present_offset(index));
        before & mask != 0
    }

    /// Takes up to `wanted` bytes of blocks out of a word that nobody is in: those not used since the last time, or
    /// (`all`) any. Returns the bytes given back. Errors: the map cannot be written; then nothing has changed.
    ///
    /// Order: bits off in memory, bits off in the file, punch. A reader that saw a bit before has pinned the word, and
    /// then the bits are put back; one that comes later finds the blocks missing and claimed.
    pub fn evict_word(
        &self,
        ops: &dyn FileOps,
        files: &Files,
        index: usize,
        wanted: u64,
        all: bool,
    ) -> io::Result<u64> {
        let word = &self.words[index];
        let mut claims = self.claims();
        let (present, suspect) = (word.present.load(SeqCst), word.suspect.load(SeqCst));
        let spared = if all { 0 } else { word.referenced.swap(0, Relaxed) };
        let free = |bit: &u64| !claims.contains(&(index as u64 * 64 + bit));
        let unused = (0..64)
            .filter(|bit| (present | suspect) & !spared & 1 << bit != 0)
            .filter(free);
        let (mut victims, mut bytes) = (0u64, 0);
        for bit in unused {
            if bytes >= wanted {
                break;
            }
            victims |= 1 << bit;
            bytes += self.geometry.bytes_of(index as u64 * 64 + bit);
        }
        if victims == 0 {
            return Ok(0);
        }
        word.present.fetch_and(!victims, SeqCst);
        if word.pins.load(SeqCst) != 0 {
            word.present.fetch_or(present & victims, SeqCst);
            return Ok(0);
        }
        let cleared = ops
            .write_word(&files.map, present & !victims, self.geometry.present_offset(index))
            .and_then(|()| match suspect & victims {
                0 => Ok(()),
                _ => ops.write_word(&files.map, suspect & !victims, self.geometry.suspect_offset(index)),
            });
        if let Err(error) = cleared {
            // Nothing was punched: what memory says is still true, whatever became of the file.
            word.present.fetch_or(present & victims, SeqCst);
            return Err(error);
        }
        word.suspect.fetch_and(!victims, SeqCst);
        let blocks = runs(index, victims);
        claims.extend(blocks.iter().cloned().flatten());
        drop(claims);
        for run in &blocks {
            // What could not be punched is waste until the next stock-taking; as far as the cache goes it is gone.
            let _ = self.punch(ops, files, run);
            self.release(run);
        }
        Ok(bytes)
    }

    pub fn punch(&self, ops: &dyn FileOps, files: &Files, blocks: &Range<u64>) -> io::Result<()> {
        let offset = blocks.start * self.geometry.block_bytes;
        // Up to the block's end also where the blob ends before: a page that is punched in part stays allocated.
        let length = (blocks.end - blocks.start) * self.geometry.block_bytes;
        ops.punch(&files.data, offset, length)
    }

    pub(crate) fn claims(&self) -> MutexGuard<'_, HashSet<u64>> {
        // A panic between two changes of the set cannot leave it half changed: it holds single numbers.
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn released(&self) -> &Condvar {
        &self.released
    }

    pub(crate) fn release(&self, blocks: &Range<u64>) {
        let mut claims = self.claims();
        blocks.clone().for_each(|block| {
            claims.remove(&block);
        });
        self.released.notify_all();
    }

    pub(crate) fn is_present(&self, block: u64) -> bool {
        self.words[word_of(block)].present.load(SeqCst) & 1 << (block % 64) != 0
    }

    pub(crate) fn is_suspect(&self, block: u64) -> bool {
        self.words[word_of(block)].suspect.load(SeqCst) & 1 << (block % 64) != 0
    }
}

impl Files {
    fn open(dir: &Path, digest: &str) -> io::Result<Files> {
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        Ok(Files {
            map: open(&map_path(dir, digest))?,
            data: open(&data_path(dir, digest))?,
        })
    }
}

pub(crate) fn map_path(dir: &Path, digest: &str) -> std::path::PathBuf {
    dir.join(format!("{digest}.map"))
}

pub(crate) fn data_path(dir: &Path, digest: &str) -> std::path::PathBuf {
    dir.join(format!("{digest}.data"))
}

pub(crate) fn list_path(dir: &Path, digest: &str) -> std::path::PathBuf {
    dir.join(format!("{digest}.blocks"))
}

fn word_of(block: u64) -> usize {
    (block / 64) as usize
}

/// Calls `visit(word, mask of the blocks in it)`.
fn for_each_word(blocks: &Range<u64>, mut visit: impl FnMut(usize, u64)) {
    let mut at = blocks.start;
    while at < blocks.end {
        let count = (64 - at % 64).min(blocks.end - at);
        let mask = u64::MAX >> (64 - count) << (at % 64);
        visit(word_of(at), mask);
        at += count;
    }
}

/// The blocks of a mask as ranges.
fn runs(index: usize, mask: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for bit in (0..64).filter(|bit| mask & 1 << bit != 0) {
        let block = index as u64 * 64 + bit;
        match runs.last_mut() {
            Some(last) if last.end == block => last.end += 1,
            _ => runs.push(block..block + 1),
        }
    }
    runs
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn masks_cover_ranges_over_words() {
        let mut seen = Vec::new();
        for_each_word(&(62..130), |index, mask| seen.push((index, mask)));
        assert_eq!(seen, [(0, 3 << 62), (1, u64::MAX), (2, 3)]);
        assert_eq!(runs(1, 0b1011), [64..66, 67..68]);
    }

    #[test]
    fn a_run_ends_at_the_first_gap_in_whichever_word() {
        let geometry = Geometry {
            size_bytes: 200 * 4096,
            block_bytes: 4096,
        };
        let present = vec![u64::MAX, 0b1011, 0, 0];
        let entry = Entry::new(
            "x",
            geometry,
            &Bits {
                present,
                suspect: vec![0; 4],
            },
        );
        assert_eq!(entry.present_run(&(60..200)), 6);
        assert_eq!(entry.present_run(&(0..20)), 20);
        assert_eq!(entry.present_run(&(66..200)), 0);
        assert_eq!(entry.present_run(&(67..200)), 1);
    }
}
