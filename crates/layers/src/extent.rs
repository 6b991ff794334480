//! Sector ranges: checked once where bytes enter the crate, then carried as sectors.

use crate::SECTOR_BYTES;
use crate::error::{Error, Result};

/// Whether a range has bytes behind it or surely reads zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Mapped to bytes of some file; they may be zero all the same.
    Data,
    /// Unmapped or trimmed: reads zero.
    Zero,
}

/// A range of a stack by index alone, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub offset: u64,
    pub length: u64,
    pub kind: ExtentKind,
}

/// A checked, half-open range of sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sectors {
    pub start: u64,
    pub end: u64,
}

impl Sectors {
    /// Checks a byte range against a device of `size` bytes.
    pub fn new(offset: u64, length: u64, size: u64) -> Result<Self> {
        if !offset.is_multiple_of(SECTOR_BYTES) || !length.is_multiple_of(SECTOR_BYTES) {
            return Err(Error::Unaligned { offset, length });
        }
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(Sectors {
                start: offset / SECTOR_BYTES,
                end: end / SECTOR_BYTES,
            }),
            _ => Err(Error::OutOfRange { offset, length, size }),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.start >= self.end
    }

    pub fn bytes(&self) -> u64 {
        (self.end - self.start) * SECTOR_BYTES
    }
}
