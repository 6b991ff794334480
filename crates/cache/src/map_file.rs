//! The map of one blob: which blocks are in its data file.
//!
//! ```text
//!   0      8   magic "AENVBMAP"
//!   8      4   version, 1
//!   12     4   bytes of a block
//!   16     8   bytes of the blob
//!   24    16   boot id of the kernel under which the bits below mean what they say
//!   4096       present: one bit per block, words of 64 bits, little endian
//!   ...        suspect: the same, from the next multiple of 4096 on
//! ```
//!
//! `present` under another boot id is moved to `suspect` before the id is replaced, in this order: suspect, present, id.
//! A process that dies in between leaves the old id, and the next one does the same again; the move is idempotent.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::file_ops::{FileOps, write_all};

const MAGIC: &[u8; 8] = b"AENVBMAP";
const VERSION: u32 = 1;
const HEADER_BYTES: u64 = 4096;

pub(crate) type BootId = [u8; 16];

/// Where things are, from the sizes of the blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub size_bytes: u64,
    pub block_bytes: u64,
}

impl Geometry {
    pub fn blocks(self) -> u64 {
        self.size_bytes.div_ceil(self.block_bytes)
    }

    pub fn words(self) -> usize {
        self.blocks().div_ceil(64) as usize
    }

    /// Bytes of a block; the last one may be short.
    pub fn bytes_of(self, block: u64) -> u64 {
        self.end_of(block) - block * self.block_bytes
    }

    /// First byte after a block.
    pub fn end_of(self, block: u64) -> u64 {
        ((block + 1) * self.block_bytes).min(self.size_bytes)
    }

    /// Bytes of the blocks whose bits are set in word `index`.
    pub fn bytes_of_word(self, index: usize, bits: u64) -> u64 {
        let whole = u64::from(bits.count_ones()) * self.block_bytes;
        let last = self.blocks().saturating_sub(1);
        let has_last = last / 64 == index as u64 && bits & 1 << (last % 64) != 0;
        whole
            - if has_last {
                self.block_bytes - self.bytes_of(last)
            } else {
                0
            }
    }

    pub fn present_offset(self, word: usize) -> u64 {
        HEADER_BYTES + 8 * word as u64
    }

    pub fn suspect_offset(self, word: usize) -> u64 {
        HEADER_BYTES + (8 * self.words() as u64).next_multiple_of(HEADER_BYTES) + 8 * word as u64
    }

    fn map_bytes(self) -> u64 {
        self.suspect_offset(self.words())
    }

    fn header(self, boot: &BootId) -> [u8; 40] {
        let mut header = [0; 40];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(self.block_bytes as u32).to_le_bytes());
        header[16..24].copy_from_slice(&self.size_bytes.to_le_bytes());
        header[24..40].copy_from_slice(boot);
        header
    }
}

/// The two bitmaps as they are on disk.
#[derive(Debug)]
pub(crate) struct Bits {
    pub present: Vec<u64>,
    pub suspect: Vec<u64>,
}

/// A map without a bit.
pub(crate) fn create(ops: &dyn FileOps, file: &File, geometry: Geometry, boot: &BootId) -> io::Result<()> {
    ops.set_len(file, geometry.map_bytes())?;
    write_all(ops, file, &geometry.header(boot), 0)
}

/// What a map's header says of its blob, if it is one of ours.
pub(crate) fn geometry(file: &File) -> Option<(Geometry, BootId)> {
    let mut header = [0; 40];
    file.read_exact_at(&mut header, 0).ok()?;
    let number = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let mut size = [0; 8];
    size.copy_from_slice(&header[16..24]);
    let mut boot = [0; 16];
    boot.copy_from_slice(&header[24..40]);
    let geometry = Geometry {
        size_bytes: u64::from_le_bytes(size),
        block_bytes: u64::from(number(12)),
    };
    let ours = header[..8] == *MAGIC && number(8) == VERSION && geometry.block_bytes > 0;
    // A length that does not fit is a map that a crash cut off.
    let whole = ours && geometry.size_bytes <= crate::limits::BLOB_BYTES_MAX;
    (whole && file.metadata().ok()?.len() == geometry.map_bytes()).then_some((geometry, boot))
}

/// Reads the bits and makes them true for this boot.
pub(crate) fn load(
    ops: &dyn FileOps,
    file: &File,
    geometry: Geometry,
    written_under: &BootId,
    boot: &BootId,
) -> io::Result<Bits> {
    let mut bits = Bits {
        present: read_words(file, geometry.present_offset(0), geometry)?,
        suspect: read_words(file, geometry.suspect_offset(0), geometry)?,
    };
    if written_under != boot {
        for (suspect, present) in bits.suspect.iter_mut().zip(&mut bits.present) {
            *suspect |= std::mem::take(present);
        }
        write_words(ops, file, geometry.suspect_offset(0), &bits.suspect)?;
        write_words(ops, file, geometry.present_offset(0), &bits.present)?;
        write_all(ops, file, &geometry.header(boot), 0)?;
    }
    Ok(bits)
}

fn read_words(file: &File, offset: u64, geometry: Geometry) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; 8 * geometry.words()];
    file.read_exact_at(&mut bytes, offset)?;
    let word = |b: &[u8]| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
    let mut words: Vec<u64> = bytes.chunks_exact(8).map(word).collect();
    // Bits beyond the last block can only come from damage.
    let rest = geometry.blocks() % 64;
    if rest != 0
        && let Some(last) = words.last_mut()
    {
        *last &= (1 << rest) - 1;
    }
    Ok(words)
}

fn write_words(ops: &dyn FileOps, file: &File, offset: u64, words: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    write_all(ops, file, &bytes, offset)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::file_ops::SystemOps;

    const GEOMETRY: Geometry = Geometry {
        size_bytes: 100 * 4096 + 7,
        block_bytes: 4096,
    };

    #[test]
    fn the_header_has_exactly_these_bytes() {
        let file = tempfile::tempfile().unwrap();
        create(&SystemOps, &file, GEOMETRY, &[9; 16]).unwrap();
        let mut bytes = vec![0; 41];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let mut expected = b"AENVBMAP\x01\0\0\0\0\x10\0\0\x07\x40\x06\0\0\0\0\0".to_vec();
        expected.extend([9; 16]);
        expected.push(0);
        assert_eq!(bytes, expected);
        assert_eq!(file.metadata().unwrap().len(), 8192 + 16);
        assert_eq!(geometry(&file), Some((GEOMETRY, [9; 16])));
    }

    #[test]
    fn bits_of_another_boot_become_suspect_and_stay_so() {
        let file = tempfile::tempfile().unwrap();
        create(&SystemOps, &file, GEOMETRY, &[1; 16]).unwrap();
        SystemOps.write_word(&file, 6, GEOMETRY.present_offset(1)).unwrap();
        let same = load(&SystemOps, &file, GEOMETRY, &[1; 16], &[1; 16]).unwrap();
        assert_eq!((same.present, same.suspect), (vec![0, 6], vec![0, 0]));
        let other = load(&SystemOps, &file, GEOMETRY, &[1; 16], &[2; 16]).unwrap();
        assert_eq!((other.present, other.suspect), (vec![0, 0], vec![0, 6]));
        let (_, boot) = geometry(&file).unwrap();
        let again = load(&SystemOps, &file, GEOMETRY, &boot, &[2; 16]).unwrap();
        assert_eq!((again.present, again.suspect), (vec![0, 0], vec![0, 6]));
    }

    #[test]
    fn the_last_block_is_counted_with_its_own_length() {
        assert_eq!(GEOMETRY.blocks(), 101);
        assert_eq!(GEOMETRY.bytes_of(100), 7);
        assert_eq!(GEOMETRY.bytes_of_word(1, 1 << 36 | 1), 4096 + 7);
        assert_eq!(GEOMETRY.bytes_of_word(0, u64::MAX), 64 * 4096);
    }
}
