//! One index entry: a run of sectors and where its bytes are.
//!
//! In the file an entry is two little-endian words, bits counted from the least significant:
//!
//! ```text
//! word 0   0..50   first sector in the image          word 1   0..55   first sector in the layer's file
//!         50..64   length in sectors                          55       1: reads zero, no bytes behind it
//!                                                              56..64   layer in the stack (0 in the file)
//! ```
//!
//! In memory word 0 is rotated by 14 bits, so that comparing two words compares the first sectors. An entry stays 16
//! bytes that way, and four of them share a cache line, which is what the look-up costs.

/// Longest run that we write: the largest 4 KiB multiple that 14 bits hold, so that the pieces of a long run keep the
/// alignment that direct I/O wants. Files of others may go up to 16,383.
pub const MAX_SEGMENT_SECTORS: u64 = 16_376;

pub(crate) const SEGMENT_BYTES: usize = 16;

const LENGTH_BITS: u32 = 14;
const LENGTH_MASK: u64 = (1 << LENGTH_BITS) - 1;
const FILE_BITS: u32 = 55;
const FILE_MASK: u64 = (1 << FILE_BITS) - 1;
const ZERO_BIT: u64 = 1 << FILE_BITS;
const TAG_SHIFT: u32 = 56;

/// First sector that no entry may reach: the field has 50 bits and its largest value marks padding.
pub(crate) const SECTOR_LIMIT: u64 = (1 << 50) - 1;

/// A run of sectors of an image.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    key: u64,
    target: u64,
}

impl Segment {
    /// `sectors` from `start` on, held by the file from `file_sector` on. Caller: all three fit their fields.
    pub(crate) fn data(start: u64, sectors: u64, file_sector: u64) -> Self {
        debug_assert!(sectors <= LENGTH_MASK && start < SECTOR_LIMIT && file_sector <= FILE_MASK);
        Segment {
            key: start << LENGTH_BITS | sectors,
            target: file_sector,
        }
    }

    /// `sectors` from `start` on that read zero. `file_sector` is not read, but upstream checks that it lies in the data.
    pub(crate) fn zero(start: u64, sectors: u64, file_sector: u64) -> Self {
        let mut segment = Segment::data(start, sectors, file_sector);
        segment.target |= ZERO_BIT;
        segment
    }

    pub(crate) fn with_tag(self, tag: u8) -> Self {
        Segment {
            key: self.key,
            target: self.target & !(0xff << TAG_SHIFT) | u64::from(tag) << TAG_SHIFT,
        }
    }

    /// First sector in the image.
    #[inline]
    pub fn start(&self) -> u64 {
        self.key >> LENGTH_BITS
    }

    #[inline]
    pub fn sectors(&self) -> u64 {
        self.key & LENGTH_MASK
    }

    /// The sector after the last one.
    #[inline]
    pub fn end(&self) -> u64 {
        self.start() + self.sectors()
    }

    #[inline]
    pub fn is_zero(&self) -> bool {
        self.target & ZERO_BIT != 0
    }

    /// First sector in the layer's file, counted from the start of the file. Means nothing for a zero run.
    #[inline]
    pub fn file_sector(&self) -> u64 {
        self.target & FILE_MASK
    }

    /// Which layer of a stack holds the bytes, counted from the bottom.
    #[inline]
    pub fn tag(&self) -> u8 {
        (self.target >> TAG_SHIFT) as u8
    }

    /// Whether the run begins after `sector`; compares one word.
    #[inline]
    pub(crate) fn starts_after(&self, sector: u64) -> bool {
        self.key > (sector << LENGTH_BITS | LENGTH_MASK)
    }

    /// The part before `sector`, which lies inside.
    pub(crate) fn head(&self, sector: u64) -> Self {
        debug_assert!(self.start() < sector && sector <= self.end());
        Segment {
            key: self.key & !LENGTH_MASK | (sector - self.start()),
            target: self.target,
        }
    }

    /// The part from `sector` on, which lies inside.
    pub(crate) fn tail(&self, sector: u64) -> Self {
        debug_assert!(self.start() <= sector && sector < self.end());
        let skipped = sector - self.start();
        // The offset of a zero run stays: it names no bytes, and moving it could leave the data area.
        let moved = if self.is_zero() { 0 } else { skipped };
        Segment {
            key: sector << LENGTH_BITS | (self.sectors() - skipped),
            target: self.target + moved,
        }
    }

    /// The entry of a file, as a 16-byte record. The tag is dropped: it has a meaning only in memory.
    pub(crate) fn encode(&self) -> [u8; SEGMENT_BYTES] {
        let mut bytes = [0; SEGMENT_BYTES];
        bytes[..8].copy_from_slice(&self.key.rotate_right(LENGTH_BITS).to_le_bytes());
        bytes[8..].copy_from_slice(&(self.target & !(0xff << TAG_SHIFT)).to_le_bytes());
        bytes
    }

    /// The entry of a record, or nothing for the padding that upstream's compaction appends.
    pub(crate) fn decode(record: &[u8]) -> Option<Self> {
        let (first, second) = record.split_at_checked(8)?;
        let key = u64::from_le_bytes(first.try_into().ok()?).rotate_left(LENGTH_BITS);
        let target = u64::from_le_bytes(second.try_into().ok()?);
        let segment = Segment { key, target }.with_tag(0);
        (segment.start() != SECTOR_LIMIT).then_some(segment)
    }
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}+{} ", self.start(), self.sectors())?;
        match self.is_zero() {
            true => write!(f, "zero #{}]", self.tag()),
            false => write!(f, "at {} #{}]", self.file_sector(), self.tag()),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_record_has_the_bytes_of_the_format() {
        // offset 1, length 2: 1 | 2 << 50; file sector 9.
        let record = Segment::data(1, 2, 9).with_tag(7).encode();
        assert_eq!(record, [1, 0, 0, 0, 0, 0, 8, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        let zero = Segment::zero(1, 2, 9).encode();
        assert_eq!(zero, [1, 0, 0, 0, 0, 0, 8, 0, 9, 0, 0, 0, 0, 0, 0x80, 0]);
        assert_eq!(Segment::decode(&zero), Some(Segment::zero(1, 2, 9)));
    }

    #[test]
    fn a_split_keeps_every_sector_where_it_was() {
        let whole = Segment::data(100, 50, 1000).with_tag(3);
        assert_eq!(whole.head(120), Segment::data(100, 20, 1000).with_tag(3));
        assert_eq!(whole.tail(120), Segment::data(120, 30, 1020).with_tag(3));
        assert_eq!(Segment::zero(100, 50, 8).tail(120), Segment::zero(120, 30, 8));
    }

    #[test]
    fn padding_is_no_segment() {
        let mut record = [0u8; 16];
        record[..8].copy_from_slice(&SECTOR_LIMIT.to_le_bytes());
        assert_eq!(Segment::decode(&record), None);
    }
}
