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
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

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
}

// SAFETY: the mapping lives as long as the value and is only reached through atomics; nothing is tied to a thread.
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
        Self::mapped(&file, path, header)
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
        Self::mapped(&file, path, header)
    }

    fn mapped(file: &File, path: &Path, header: MapHeader) -> Result<Map> {
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
        let base = NonNull::new(base.cast()).ok_or(Error::corrupt(path, Damage::Map))?;
        Ok(Map { base, header })
    }

    pub fn header(&self) -> MapHeader {
        self.header
    }

    /// Whether no sector was ever written or trimmed.
    pub fn is_unused(&self) -> bool {
        let end = self.header.sectors();
        end == 0 || self.run(0, end) == (SectorState::Below, end)
    }

    fn written(&self) -> &[AtomicU64] {
        self.bitmap(MAP_HEADER_BYTES)
    }

    fn trimmed(&self) -> &[AtomicU64] {
        self.bitmap(MAP_HEADER_BYTES + self.header.bitmap_bytes())
    }

    fn bitmap(&self, offset: u64) -> &[AtomicU64] {
        let words = (self.header.bitmap_bytes() / 8) as usize;
        // SAFETY: the mapping has `file_bytes` bytes, both bitmaps lie inside it at page-aligned offsets, any bit pattern
        // is a valid word, and all access goes through atomics. The borrow of self keeps the mapping alive.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset as usize).cast(), words) }
    }

    /// Marks sectors as held by the data file. Caller: their data is already there.
    pub fn set_written(&self, ops: &dyn FileOps, range: Sectors) -> std::io::Result<()> {
        let written = self.written();
        for_each_word(range, |word, bits| set_missing(ops, &written[word], bits))
    }

    /// Marks sectors as reading zero. Caller: punches the data file afterwards, not before.
    pub fn set_trimmed(&self, ops: &dyn FileOps, range: Sectors) -> std::io::Result<()> {
        let (written, trimmed) = (self.written(), self.trimmed());
        for_each_word(range, |word, bits| set_missing(ops, &trimmed[word], bits))?;
        for_each_word(range, |word, bits| match written[word].load(Ordering::Acquire) & bits {
            0 => Ok(()),
            set => ops.clear_bits(&written[word], set),
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
        while others == 0 && (word as u64 + 1) * 64 < end {
            word += 1;
            let (written, trimmed) = self.words(word);
            others = self::others(state, written, trimmed);
        }
        let run_end = word as u64 * 64 + u64::from(others.trailing_zeros());
        (state, run_end.min(end))
    }

    /// `written` is loaded first: who sees it cleared by a trim also sees `trimmed` set.
    #[inline]
    fn words(&self, word: usize) -> (u64, u64) {
        let written = self.written()[word].load(Ordering::Acquire);
        (written, self.trimmed()[word].load(Ordering::Acquire))
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

/// Sets what is not set yet: rewriting the same blocks must not dirty the map's pages again.
fn set_missing(ops: &dyn FileOps, word: &AtomicU64, bits: u64) -> std::io::Result<()> {
    match bits & !word.load(Ordering::Acquire) {
        0 => Ok(()),
        missing => ops.set_bits(word, missing),
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
