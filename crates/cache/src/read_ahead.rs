//! Which blocks a sequential reader will want next. Only decides; `background.rs` fetches.
//!
//! A stream begins at a miss. When the next read goes on where it was, a window is fetched ahead of it, twice as large each
//! time, and the next one is asked for when the reader is half through. Random reads never start one.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::limits::{READ_AHEAD_BYTES_FIRST, READ_AHEAD_BYTES_MAX, STREAMS_MAX};
use crate::map_file::Geometry;

/// Blocks by which reads of one stream may come out of order: several threads serve one reader.
const SLACK_BLOCKS: u64 = 4;

#[derive(Debug)]
pub(crate) struct ReadAhead {
    geometry: Geometry,
    /// Whether there is any stream: a blob that is cached whole costs its readers one load.
    any: AtomicBool,
    streams: Mutex<Streams>,
}

#[derive(Debug, Default)]
struct Streams {
    all: Vec<Stream>,
    /// The one to give up for a new one.
    oldest: usize,
}

#[derive(Debug)]
struct Stream {
    /// The block after the furthest one read.
    next: u64,
    /// The block after the furthest one asked for.
    ahead: u64,
    window: u64,
}

impl ReadAhead {
    pub fn new(geometry: Geometry) -> ReadAhead {
        ReadAhead {
            geometry,
            any: AtomicBool::new(false),
            streams: Mutex::default(),
        }
    }

    /// Told of every read; returns what to fetch ahead.
    pub fn follow(&self, read: &Range<u64>, missed: bool) -> Option<Range<u64>> {
        if !missed && !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let near =
            |stream: &&mut Stream| read.start + SLACK_BLOCKS >= stream.next && read.start <= stream.next + SLACK_BLOCKS;
        if let Some(stream) = streams.all.iter_mut().find(near) {
            return stream.advance(read.end, self.geometry);
        }
        if missed {
            self.any.store(true, Ordering::Relaxed);
            streams.begin(Stream {
                next: read.end,
                ahead: read.end,
                window: 0,
            });
        }
        None
    }
}

impl Streams {
    fn begin(&mut self, stream: Stream) {
        if self.all.len() < STREAMS_MAX {
            return self.all.push(stream);
        }
        self.all[self.oldest] = stream;
        self.oldest = (self.oldest + 1) % STREAMS_MAX;
    }
}

impl Stream {
    fn advance(&mut self, end: u64, geometry: Geometry) -> Option<Range<u64>> {
        if end <= self.next {
            return None;
        }
        self.next = end;
        if end + self.window / 2 < self.ahead {
            return None;
        }
        let blocks = |bytes: u64| (bytes / geometry.block_bytes).max(1);
        self.window = (self.window * 2).clamp(blocks(READ_AHEAD_BYTES_FIRST), blocks(READ_AHEAD_BYTES_MAX));
        let start = self.ahead.max(end);
        self.ahead = (start + self.window).min(geometry.blocks());
        (start < self.ahead).then_some(start..self.ahead)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        size_bytes: 1000 << 16,
        block_bytes: 1 << 16,
    };

    #[test]
    fn windows_double_and_are_asked_for_before_the_reader_needs_them() {
        let ahead = ReadAhead::new(GEOMETRY);
        assert_eq!(ahead.follow(&(10..11), true), None);
        let mut asked_to = 11;
        let mut windows = Vec::new();
        for block in 11..400 {
            if let Some(range) = ahead.follow(&(block..block + 1), block >= asked_to) {
                assert!(range.start == asked_to.max(block + 1), "{range:?} after {asked_to}");
                windows.push(range.end - range.start);
                asked_to = range.end;
            }
            assert!(block < 12 || asked_to > block, "the reader overtook at {block}");
        }
        assert_eq!(windows[..6], [4, 8, 16, 32, 64, 64]);
    }

    #[test]
    fn random_reads_fetch_nothing_ahead() {
        let ahead = ReadAhead::new(GEOMETRY);
        for block in [500, 3, 900, 77, 610, 240, 33, 801, 350, 120] {
            assert_eq!(ahead.follow(&(block..block + 1), true), None);
        }
    }

    #[test]
    fn several_streams_are_told_apart_and_none_goes_beyond_the_end() {
        let ahead = ReadAhead::new(GEOMETRY);
        for start in [0, 300, 600] {
            assert_eq!(ahead.follow(&(start..start + 1), true), None);
        }
        for start in [0, 300, 600] {
            assert_eq!(ahead.follow(&(start + 1..start + 2), true), Some(start + 2..start + 6));
        }
        ahead.follow(&(996..997), true);
        assert_eq!(ahead.follow(&(997..998), true), Some(998..1000));
        assert_eq!(ahead.follow(&(998..1000), false), None);
    }

    #[test]
    fn reads_within_one_block_are_no_progress() {
        let ahead = ReadAhead::new(GEOMETRY);
        ahead.follow(&(5..6), true);
        for _ in 0..10 {
            assert_eq!(ahead.follow(&(5..6), false), None);
        }
    }
}
