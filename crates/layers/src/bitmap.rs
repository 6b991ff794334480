//! One bitmap of a mapped map file, with notes of which of its pages have no bit and which have all.
//!
//! The first look at a page of a mapped file, or at memory that was left alone for seconds in a virtual machine, costs tens
//! of microseconds. A seal that looked at every word of a large disk would spend its time there, so pages that are known to
//! be empty or full are not looked at. The notes are in memory; who opens a map knows nothing of its pages.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Words of a page of the file.
const PAGE_WORDS: usize = 512;

/// Does not own the mapping: the map does, and outlives it.
#[derive(Debug)]
pub(crate) struct Bitmap {
    words: NonNull<AtomicU64>,
    count: usize,
    pages: Box<[Page]>,
}

#[derive(Debug, Default)]
struct Page {
    /// Set before any bit is.
    touched: AtomicBool,
    /// Bits that were set, at least. Those that were cleared are not taken off: it only says when to look.
    set: AtomicU32,
    /// Odd if all bits are set. Another even number before and after bits are cleared, so that who has looked at the page
    /// meanwhile cannot note what is not so any more.
    state: AtomicU32,
}

const FULL: u32 = 1;

// SAFETY: the words are only reached through atomics, and nothing is tied to a thread.
unsafe impl Send for Bitmap {}
// SAFETY: as above.
unsafe impl Sync for Bitmap {}

impl Bitmap {
    /// `touched`: whether pages may have bits that were set before.
    ///
    /// # Safety
    /// `words` is the start of `count` words, aligned, that stay mapped for reading and writing while this value lives and
    /// are changed through atomics only.
    pub unsafe fn new(words: NonNull<AtomicU64>, count: usize, touched: bool) -> Bitmap {
        let page = |_| Page {
            touched: AtomicBool::new(touched),
            ..Page::default()
        };
        Bitmap {
            words,
            count,
            pages: (0..count.div_ceil(PAGE_WORDS)).map(page).collect(),
        }
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: promised to `new`; any bit pattern is a valid word.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.count) }
    }

    #[inline]
    pub fn load(&self, word: usize) -> u64 {
        match self.pages[word / PAGE_WORDS].touched.load(Ordering::Acquire) {
            true => self.words()[word].load(Ordering::Acquire),
            false => 0,
        }
    }

    /// Has `set` set some bits of a word: those of `bits` that are not set yet, if any. Rewriting the same blocks must not
    /// dirty the map's pages again.
    pub fn set<E>(&self, word: usize, bits: u64, set: impl FnOnce(&AtomicU64, u64) -> Result<(), E>) -> Result<(), E> {
        let page = &self.pages[word / PAGE_WORDS];
        if !page.touched.load(Ordering::Relaxed) {
            page.touched.store(true, Ordering::Release);
        }
        let place = &self.words()[word];
        let missing = bits & !place.load(Ordering::Acquire);
        if missing == 0 {
            return Ok(());
        }
        set(place, missing)?;
        let before = page.set.fetch_add(missing.count_ones(), Ordering::Relaxed);
        if before + missing.count_ones() >= PAGE_WORDS as u32 * 64 {
            self.look_whether_full(word / PAGE_WORDS);
        }
        Ok(())
    }

    /// Has `clear` clear those of `bits` that are set, if any.
    pub fn clear<E>(
        &self,
        word: usize,
        bits: u64,
        clear: impl FnOnce(&AtomicU64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        match self.load(word) & bits {
            0 => Ok(()),
            set => {
                let page = &self.pages[word / PAGE_WORDS];
                page.is_full_no_more();
                let outcome = clear(&self.words()[word], set);
                page.is_full_no_more();
                outcome
            }
        }
    }

    fn look_whether_full(&self, page: usize) {
        let state = &self.pages[page].state;
        // Before the look: a clearing in between changes it.
        let before = state.load(Ordering::Acquire);
        let end = self.count.min((page + 1) * PAGE_WORDS);
        if before & FULL == 0 && self.first_other(page * PAGE_WORDS, end, u64::MAX) == end {
            let _ = state.compare_exchange(before, before | FULL, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// The first word of `from..to` that is not `value`, `to` if there is none.
    pub fn end_of_run(&self, from: usize, to: usize, value: u64) -> usize {
        let mut word = from;
        while word < to {
            let end = to.min((word / PAGE_WORDS + 1) * PAGE_WORDS);
            let page = &self.pages[word / PAGE_WORDS];
            let known = match page.touched.load(Ordering::Acquire) {
                false => Some(0),
                true => (page.state.load(Ordering::Acquire) & FULL != 0).then_some(u64::MAX),
            };
            word = match known {
                Some(known) if known == value => end,
                Some(_) => return word,
                None => match self.first_other(word, end, value) {
                    other if other < end => return other,
                    _ => end,
                },
            };
        }
        to
    }

    fn first_other(&self, from: usize, to: usize, value: u64) -> usize {
        let mut words = self.words()[from..to].iter();
        words
            .position(|other| other.load(Ordering::Acquire) != value)
            .map_or(to, |count| from + count)
    }
}

impl Page {
    fn is_full_no_more(&self) {
        let next = |state: u32| Some((state | FULL).wrapping_add(1));
        // Cannot fail: there is always a next one.
        let _ = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }
}

#[cfg(test)]
mod test {
    use std::convert::Infallible;
    use std::sync::Barrier;

    use super::*;

    const PAGES: usize = 2;

    fn set(place: &AtomicU64, bits: u64) -> Result<(), Infallible> {
        place.fetch_or(bits, Ordering::AcqRel);
        Ok(())
    }

    fn clear(place: &AtomicU64, bits: u64) -> Result<(), Infallible> {
        place.fetch_and(!bits, Ordering::AcqRel);
        Ok(())
    }

    fn fill(bitmap: &Bitmap, words: std::ops::Range<usize>) {
        words.for_each(|word| bitmap.set(word, u64::MAX, set).unwrap());
    }

    fn with_bitmap(check: impl FnOnce(&Bitmap)) {
        let mut words = vec![0u64; PAGES * PAGE_WORDS];
        let start = NonNull::new(words.as_mut_ptr()).unwrap().cast();
        // SAFETY: the vector has so many words, outlives the bitmap and is not used otherwise meanwhile.
        let bitmap = unsafe { Bitmap::new(start, words.len(), false) };
        check(&bitmap);
    }

    #[test]
    fn a_full_page_is_known_as_such_until_a_bit_is_cleared() {
        with_bitmap(|bitmap| {
            let is_full = || bitmap.pages[0].state.load(Ordering::Relaxed) & FULL != 0;
            fill(bitmap, 1..PAGE_WORDS);
            assert!(!is_full());
            fill(bitmap, 0..1);
            assert!(is_full());
            assert_eq!(bitmap.end_of_run(0, 2 * PAGE_WORDS, u64::MAX), PAGE_WORDS);
            bitmap.clear(7, 1, clear).unwrap();
            assert!(!is_full());
            assert_eq!(bitmap.end_of_run(0, 2 * PAGE_WORDS, u64::MAX), 7);
            fill(bitmap, 7..8);
            assert!(is_full());
        });
    }

    #[test]
    fn what_is_noted_holds_after_changes_that_ran_into_each_other() {
        with_bitmap(|bitmap| {
            fill(bitmap, 0..PAGE_WORDS);
            for round in 0..2000 {
                let word = round % PAGE_WORDS;
                let both = Barrier::new(2);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        both.wait();
                        bitmap.clear(word, 1, clear).unwrap();
                    });
                    both.wait();
                    bitmap.set(word, 1, set).unwrap();
                    bitmap.set((word + 1) % PAGE_WORDS, 1, set).unwrap();
                });
                let cleared = bitmap.load(word) != u64::MAX;
                let expected = if cleared { word } else { PAGE_WORDS };
                assert_eq!(bitmap.end_of_run(0, PAGE_WORDS, u64::MAX), expected, "round {round}");
                fill(bitmap, 0..PAGE_WORDS);
            }
        });
    }
}
