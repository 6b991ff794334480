//! Which sectors an upper has: two bitmaps in a file that is mapped shared, so that a bit once set survives the death of
//! the process.
//!
//! | written | trimmed | the sector reads |
//! |---|---|---|
//! | 1 | any | the data file |
//! | 0 | 1 | zero |
//! | 0 | 0 | the layers below |
//!
//! `written` wins and `trimmed` is never cleared. That makes each change of a sector one flip of one bit: a write sets
//! `written` (whatever `trimmed` says), a trim sets `trimmed` (nothing to see yet where `written` is set) and then
//! clears `written`. No step shows a state that was not asked for. Two bits in one word would need a compare-and-swap
//! loop for the same; a third state "both clear again" is never needed, since what is below never changes.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::bitmap::Bitmap;
use crate::error::{At, Damage, Error, Result};
use crate::extent::Sectors;
use crate::file_ops::{FileOps, read_exact, write_all};
use crate::map_header::{MAP_HEADER_BYTES, MapHeader};
use crate::upper::is_upper_size;
use crate::writer::create_new;

/// Where a sector's content comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SectorState {
    Below,
    Written,
    Trimmed,
}

/// The mapped map file of one upper.
#[derive(Debug)]
pub(crate) struct Map {
    base: NonNull<u8>,
    header: MapHeader,
    written: Bitmap,
    trimmed: Bitmap,
}

// SAFETY: the mapping lives as long as the value and is only reached through the bitmaps; nothing is tied to a thread.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Makes the map of a new upper: nothing written, nothing trimmed. A leftover of a cut creation is replaced.
    pub fn create(ops: &dyn FileOps, path: &Path, header: MapHeader) -> Result<Map> {
        match ops.remove(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).at(path, "remove a left-over map")?,
            _ => {}
        }
        let file = create_new(path)?;
        // All blocks now: a store to a mapped hole on a full disk would be a SIGBUS, not an error.
        ops.reserve(&file, header.file_bytes()).at(path, "reserve the map")?;
        write_all(ops, &file, path, "write the map's header", &header.encode(), 0)?;
        Self::mapped(&file, path, header, false)
    }

    /// Opens the map of an existing upper and checks its header and length.
    pub fn open(path: &Path) -> Result<Map> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .at(path, "open the map")?;
        let length = file.metadata().at(path, "stat")?.len();
        if length < MAP_HEADER_BYTES {
            return Err(Error::corrupt(path, Damage::Map));
        }
        let mut bytes = [0; MAP_HEADER_BYTES as usize];
        read_exact(&file, path, &mut bytes, 0)?;
        let header = MapHeader::decode(&bytes).map_err(|damage| Error::corrupt(path, damage))?;
        // The size is not trusted before it is compared: the arithmetic below must not overflow either.
        if !is_upper_size(header.virtual_size) || length != header.file_bytes() {
            return Err(Error::corrupt(path, Damage::Map));
        }
        Self::mapped(&file, path, header, true)
    }

    fn mapped(file: &File, path: &Path, header: MapHeader, touched: bool) -> Result<Map> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses; it aliases no Rust object. The file has at
        // least `file_bytes` bytes (checked or just reserved) and is never shortened by this crate.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                header.file_bytes() as usize,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        }
        .at(path, "map the map file")?;
        let base: NonNull<u8> = NonNull::new(base.cast()).ok_or(Error::corrupt(path, Damage::Map))?;
        let bitmap = |offset: u64| {
            // SAFETY: the mapping has `file_bytes` bytes, both bitmaps lie inside it at page-aligned offsets, all access goes
            // through them, and it is unmapped when this map, which owns them, is dropped.
            unsafe {
                let words = base.add(offset as usize).cast();
                Bitmap::new(words, (header.bitmap_bytes() / 8) as usize, touched)
            }
        };
        Ok(Map {
            base,
            header,
            written: bitmap(MAP_HEADER_BYTES),
            trimmed: bitmap(MAP_HEADER_BYTES + header.bitmap_bytes()),
        })
    }

    pub fn header(&self) -> MapHeader {
        self.header
    }

    /// Whether no sector was ever written or trimmed.
    pub fn is_unused(&self) -> bool {
        let end = self.header.sectors();
        end == 0 || self.run(0, end) == (SectorState::Below, end)
    }

    /// Marks sectors as held by the data file. Caller: their data is already there.
    pub fn set_written(&self, ops: &dyn FileOps, range: Sectors) -> std::io::Result<()> {
        for_each_word(range, |word, bits| {
            self.written.set(word, bits, |place, bits| ops.set_bits(place, bits))
        })
    }

    /// Marks sectors as reading zero. Caller: punches the data file afterwards, not before.
    pub fn set_trimmed(&self, ops: &dyn FileOps, range: Sectors) -> std::io::Result<()> {
        for_each_word(range, |word, bits| {
            self.trimmed.set(word, bits, |place, bits| ops.set_bits(place, bits))
        })?;
        for_each_word(range, |word, bits| {
            self.written
                .clear(word, bits, |place, bits| ops.clear_bits(place, bits))
        })
    }

    /// The state of `start` and the end of the run of sectors, at most `end`, that share it. Caller: `start < end` and
    /// both lie inside the map.
    #[inline]
    pub fn run(&self, start: u64, end: u64) -> (SectorState, u64) {
        let mut word = (start / 64) as usize;
        let (written, trimmed) = self.words(word);
        let state = match (written >> (start % 64) & 1, trimmed >> (start % 64) & 1) {
            (1, _) => SectorState::Written,
            (_, 1) => SectorState::Trimmed,
            _ => SectorState::Below,
        };
        let mut others = others(state, written, trimmed) & (u64::MAX << (start % 64));
        let words_end = end.div_ceil(64) as usize;
        while others == 0 && word + 1 < words_end {
            word = self.end_of_whole_words(state, word + 1, words_end);
            if word == words_end {
                return (state, end);
            }
            let (written, trimmed) = self.words(word);
            others = self::others(state, written, trimmed);
        }
        let run_end = word as u64 * 64 + u64::from(others.trailing_zeros());
        (state, run_end.min(end))
    }

    /// `written` is loaded first: who sees it cleared by a trim also sees `trimmed` set.
    #[inline]
    fn words(&self, word: usize) -> (u64, u64) {
        let written = self.written.load(word);
        (written, self.trimmed.load(word))
    }

    /// The first word of `from..to` that is perhaps not all in this state, `to` if there is none.
    fn end_of_whole_words(&self, state: SectorState, from: usize, to: usize) -> usize {
        match state {
            // Not the other bitmap: where all is written, its pages may never have been touched.
            SectorState::Written => self.written.end_of_run(from, to, u64::MAX),
            SectorState::Below => {
                let to = self.written.end_of_run(from, to, 0);
                self.trimmed.end_of_run(from, to, 0)
            }
            SectorState::Trimmed => from,
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `map` got, and no slice of it outlives self. A failure could only mean that the
        // range is wrong, and there is nobody to tell.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.header.file_bytes() as usize) };
    }
}

/// The sectors of one word that are in another state.
#[inline]
fn others(state: SectorState, written: u64, trimmed: u64) -> u64 {
    match state {
        SectorState::Written => !written,
        SectorState::Trimmed => written | !trimmed,
        SectorState::Below => written | trimmed,
    }
}

fn for_each_word(range: Sectors, mut visit: impl FnMut(usize, u64) -> std::io::Result<()>) -> std::io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let word_end = (at / 64 + 1) * 64;
        let end = word_end.min(range.end);
        let bits = (u64::MAX >> (64 - (end - at))) << (at % 64);
        visit((at / 64) as usize, bits)?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use proptest::prelude::*;

    use super::*;
    use crate::file_ops::SystemOps;
    use crate::uuid::Uuid;

    /// Five pages of each bitmap and a part of one.
    const SECTORS: u64 = 5 * 4096 * 8 + 1000;

    /// A write or a trim; ends lie anywhere, at words and at pages.
    fn change() -> impl Strategy<Value = (bool, u64, u64)> {
        let place = || {
            (0..SECTORS).prop_flat_map(|sector| {
                prop_oneof![
                    Just(sector),
                    Just(sector - sector % 64),
                    Just(sector - sector % (4096 * 8))
                ]
            })
        };
        (any::<bool>(), place(), place()).prop_map(|(write, a, b)| (write, a.min(b), a.max(b)))
    }

    fn check(map: &Map, expected: &[SectorState], start: usize, end: usize) {
        let mut at = start;
        while at < end {
            let (state, run_end) = map.run(at as u64, end as u64);
            let run_end = run_end as usize;
            assert!(at < run_end && run_end <= end);
            assert!(
                expected[at..run_end].iter().all(|other| *other == state),
                "{at}..{run_end}"
            );
            assert!(
                run_end == end || expected[run_end] != state,
                "{at}..{run_end} is not all"
            );
            at = run_end;
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn runs_are_what_was_written_and_trimmed(changes in prop::collection::vec(change(), 0..12), start in 0..SECTORS) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("map");
            let header = MapHeader { virtual_size: SECTORS * 512, uuid: Uuid::NIL };
            let map = Map::create(&SystemOps, &path, header).unwrap();
            let mut expected = vec![SectorState::Below; SECTORS as usize];
            for (write, start, end) in changes {
                let range = Sectors { start, end };
                let state = match write {
                    true => map.set_written(&SystemOps, range).map(|()| SectorState::Written),
                    false => map.set_trimmed(&SystemOps, range).map(|()| SectorState::Trimmed),
                };
                expected[start as usize..end as usize].fill(state.unwrap());
            }
            check(&map, &expected, 0, SECTORS as usize);
            check(&map, &expected, start as usize, SECTORS as usize);
            check(&map, &expected, start as usize, (start as usize + 70).min(SECTORS as usize));
            // Opened anew, nothing is known of what was touched.
            check(&Map::open(&path).unwrap(), &expected, 0, SECTORS as usize);
        }
    }
}
