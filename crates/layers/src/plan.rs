//! A read of a stack, taken apart into reads of files, for a caller that carries those out by itself (io_uring).
//!
//! Knows where bytes are and reads none. Whoever carries a plan out falls back to `Stack::read_at` when anything is not as
//! planned: that one knows how to go on and what to say.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use crate::SECTOR_BYTES;
use crate::cold::Reader;
use crate::error::Result;
use crate::extent::Sectors;
use crate::header::HEADER_BYTES;
use crate::index::Piece;
use crate::lowers::Lowers;
use crate::map::SectorState;
use crate::stack::{Stack, State};

/// One read of a file. The descriptor is open as long as the plan that it comes from lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRead {
    pub descriptor: RawFd,
    /// Bytes from the start of the file, and of the buffer that was planned for.
    pub offset: u64,
    pub place: usize,
    pub length: usize,
}

/// The reads that fill what of a buffer is not zero.
#[derive(Debug)]
pub struct ReadPlan {
    pub reads: Vec<FileRead>,
    /// Keeps the files open.
    _state: Arc<State>,
}

/// Some bytes are not just those of a file, or reads of it may wait before they have begun.
struct NotForPlans;

impl Stack {
    /// How to fill `buf` from `offset` on; the parts that read zero are filled already. None if some layer's bytes are not
    /// just those of a file, or of one on a file system where io_uring cannot begin a read without waiting. A write that begins after the call may be seen or not.
    ///
    /// Errors: `Unaligned`, `OutOfRange`.
    pub fn plan_read(&self, buf: &mut [u8], offset: u64) -> Result<Option<ReadPlan>> {
        let range = Sectors::new(offset, buf.len() as u64, self.size())?;
        let state = self.current();
        let mut planning = Planning {
            reader: self.reader(),
            buf,
            first: range.start,
            reads: Vec::new(),
        };
        let Ok(()) = planning.stack(&state, range) else {
            return Ok(None);
        };
        let reads = planning.reads;
        Ok(Some(ReadPlan { reads, _state: state }))
    }
}

struct Planning<'a> {
    reader: Reader,
    buf: &'a mut [u8],
    first: u64,
    reads: Vec<FileRead>,
}

impl Planning<'_> {
    fn stack(&mut self, state: &State, range: Sectors) -> std::result::Result<(), NotForPlans> {
        let Some(upper) = &state.upper else {
            return self.lowers(&state.lowers, range);
        };
        let mut at = range.start;
        while at < range.end {
            let (found, end) = upper.map.run(at, range.end);
            let part = Sectors { start: at, end };
            match found {
                SectorState::Written if !upper.begins_at_once => return Err(NotForPlans),
                SectorState::Written => self.add(&upper.file, part, HEADER_BYTES + at * SECTOR_BYTES),
                SectorState::Trimmed => self.part(part).fill(0),
                SectorState::Below => self.lowers(&state.lowers, part)?,
            }
            at = end;
        }
        Ok(())
    }

    fn lowers(&mut self, lowers: &Lowers, range: Sectors) -> std::result::Result<(), NotForPlans> {
        lowers.index().for_each(range.start, range.end, |piece| {
            let (start, end) = match &piece {
                Piece::Hole(start, sectors) => (*start, start + sectors),
                Piece::Mapped(segment) => (segment.start(), segment.end()),
            };
            let part = Sectors { start, end };
            match piece {
                Piece::Mapped(segment) if !segment.is_zero() => {
                    let layer = &lowers.layers()[usize::from(segment.tag())];
                    let file = layer.file_for_cacher(self.reader, self.part(part), segment.file_sector());
                    self.add(file.ok_or(NotForPlans)?, part, segment.file_sector() * SECTOR_BYTES);
                }
                _ => self.part(part).fill(0),
            }
            Ok(())
        })
    }

    fn part(&mut self, part: Sectors) -> &mut [u8] {
        let place = |sector: u64| ((sector - self.first) * SECTOR_BYTES) as usize;
        &mut self.buf[place(part.start)..place(part.end)]
    }

    fn add(&mut self, file: &File, part: Sectors, offset: u64) {
        self.reads.push(FileRead {
            descriptor: file.as_raw_fd(),
            offset,
            place: ((part.start - self.first) * SECTOR_BYTES) as usize,
            length: part.bytes() as usize,
        });
    }
}
