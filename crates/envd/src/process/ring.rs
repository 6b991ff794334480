//! The bounded memory of one process's output.
//!
//! Owns bytes and offsets, no descriptors and no waiting. Output is a sequence of segments, each of one kind;
//! a byte's *offset* is its position in the whole output since the start. Old segments leave at the front when
//! the ring is over its capacity, so a reader's cursor may point before what is still held.

use std::collections::VecDeque;

use bytes::Bytes;

/// Output kept of one process, counting [`SEGMENT_COST_BYTES`] for each segment.
pub const CAPACITY_BYTES: usize = 1 << 20;

/// Longest piece handed to a reader in one event; the contract of the wire protocol.
pub const PIECE_BYTES_MAX: usize = 32 << 10;

/// What a segment is charged besides its bytes. Without it, a process that alternates single bytes on both
/// outputs would hold a million small allocations.
const SEGMENT_COST_BYTES: usize = 96;

/// Which output a piece belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Stdout,
    Stderr,
    Pty,
}

#[derive(Debug)]
struct Segment {
    kind: Kind,
    start: u64,
    data: Vec<u8>,
}

/// What a reader finds at its cursor.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// Bytes, and the cursor after them.
    Piece { kind: Kind, data: Bytes, next: u64 },
    /// Nothing yet.
    Empty,
    /// The cursor's bytes have been dropped; the oldest offset that is still held.
    Dropped { oldest: u64 },
}

#[derive(Debug, Default)]
pub struct Ring {
    segments: VecDeque<Segment>,
    end: u64,
    cost: usize,
}

impl Ring {
    /// Offset of the oldest byte held (of the next byte when empty).
    pub fn oldest(&self) -> u64 {
        self.segments.front().map_or(self.end, |segment| segment.start)
    }

    /// Memory charged to this ring.
    pub fn cost_bytes(&self) -> usize {
        self.cost
    }

    /// Appends output, dropping the oldest segments when over capacity.
    pub fn push(&mut self, kind: Kind, mut bytes: &[u8]) {
        if let Some(last) = self.segments.back_mut().filter(|last| last.kind == kind) {
            let room = PIECE_BYTES_MAX.saturating_sub(last.data.len()).min(bytes.len());
            let (head, rest) = bytes.split_at(room);
            last.data.extend_from_slice(head);
            self.account(head.len());
            bytes = rest;
        }
        for piece in bytes.chunks(PIECE_BYTES_MAX) {
            self.segments.push_back(Segment {
                kind,
                start: self.end,
                data: piece.to_vec(),
            });
            self.cost += SEGMENT_COST_BYTES;
            self.account(piece.len());
        }
        self.evict();
    }

    fn account(&mut self, length: usize) {
        self.end += length as u64;
        self.cost += length;
    }

    fn evict(&mut self) {
        while self.cost > CAPACITY_BYTES {
            let Some(front) = self.segments.pop_front() else {
                break;
            };
            self.cost -= front.data.len() + SEGMENT_COST_BYTES;
        }
    }

    /// What [`Ring::oldest`] would be after one more push of a whole piece. A reader whose cursor is before it
    /// would lose output.
    pub fn oldest_after_push(&self) -> u64 {
        let mut over = (self.cost + PIECE_BYTES_MAX + SEGMENT_COST_BYTES).saturating_sub(CAPACITY_BYTES);
        for segment in &self.segments {
            if over == 0 {
                return segment.start;
            }
            over = over.saturating_sub(segment.data.len() + SEGMENT_COST_BYTES);
        }
        self.end
    }

    /// Drops everything held; the offsets go on.
    pub fn clear(&mut self) {
        self.segments = VecDeque::new();
        self.cost = 0;
    }

    /// Gives spare capacity back once a process has ended.
    pub fn shrink(&mut self) {
        for segment in &mut self.segments {
            segment.data.shrink_to_fit();
        }
    }

    pub fn read(&self, cursor: u64) -> Read {
        if cursor < self.oldest() {
            return Read::Dropped { oldest: self.oldest() };
        }
        // Readers are nearly always in the last segments, so search from the back.
        for segment in self.segments.iter().rev() {
            if segment.start > cursor {
                continue;
            }
            let skip = usize::try_from(cursor - segment.start).unwrap_or(usize::MAX);
            let Some(data) = segment.data.get(skip..).filter(|data| !data.is_empty()) else {
                break;
            };
            let next = cursor + data.len() as u64;
            return Read::Piece {
                kind: segment.kind,
                data: Bytes::copy_from_slice(data),
                next,
            };
        }
        Read::Empty
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drain(ring: &Ring, mut cursor: u64) -> Vec<(Kind, u8)> {
        let mut out = Vec::new();
        while let Read::Piece { kind, data, next } = ring.read(cursor) {
            assert!(data.len() <= PIECE_BYTES_MAX);
            out.extend(data.iter().map(|byte| (kind, *byte)));
            cursor = next;
        }
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Against the obvious model: the ring holds a suffix of all output, in order, kinds kept apart.
        #[test]
        fn the_ring_holds_a_suffix_of_the_output(
            pushes in prop::collection::vec((any::<bool>(), 0usize..80_000, any::<u8>()), 1..40)
        ) {
            let mut ring = Ring::default();
            let mut model = Vec::new();
            for (err, length, byte) in pushes {
                let kind = if err { Kind::Stderr } else { Kind::Stdout };
                ring.push(kind, &vec![byte; length]);
                model.extend(std::iter::repeat_n((kind, byte), length));
            }
            prop_assert_eq!(ring.end, model.len() as u64);
            prop_assert!(ring.cost_bytes() <= CAPACITY_BYTES);
            let safe = ring.oldest_after_push();
            prop_assert!(safe >= ring.oldest() && safe <= ring.end);
            let oldest = ring.oldest();
            prop_assert_eq!(drain(&ring, oldest), &model[oldest as usize..]);
            if model.len() < CAPACITY_BYTES / 2 {
                prop_assert_eq!(oldest, 0);
            }
        }
    }

    #[test]
    fn alternating_single_bytes_stay_within_the_capacity() {
        let mut ring = Ring::default();
        for _ in 0..CAPACITY_BYTES / 64 {
            ring.push(Kind::Stdout, b"a");
            ring.push(Kind::Stderr, b"b");
        }
        assert!(ring.cost_bytes() <= CAPACITY_BYTES);
        assert!(ring.segments.len() <= CAPACITY_BYTES / SEGMENT_COST_BYTES);
    }

    #[test]
    fn a_push_of_one_piece_drops_nothing_from_the_announced_offset_on() {
        let mut ring = Ring::default();
        for round in 0..200u32 {
            let safe = ring.oldest_after_push();
            ring.push(
                if round % 3 == 0 { Kind::Stderr } else { Kind::Stdout },
                &vec![1; PIECE_BYTES_MAX],
            );
            assert!(ring.oldest() <= safe, "round {round}");
        }
        assert!(ring.oldest() > 0);
    }

    #[test]
    fn a_cursor_before_the_oldest_byte_is_told_so() {
        let mut ring = Ring::default();
        ring.push(Kind::Pty, &vec![0; CAPACITY_BYTES * 2]);
        assert_eq!(ring.read(0), Read::Dropped { oldest: ring.oldest() });
        assert_eq!(ring.read(ring.end), Read::Empty);
    }
}
