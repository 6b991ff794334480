//! The 512 bytes at both ends of a ZFile.
//!
//! ```text
//!   0   8  magic "ZFile\0\1\0"             64   4  CRC32C of the jump table
//!   8  16  second magic                    68   4  0
//!  24   4  size of this structure, 96      72   4  block size in bytes
//!  28   4  CRC32C of all 512 bytes,        76   1  algorithm: 1 LZ4, 2 zstd
//!          this field taken as 0           77   1  level (a comment)
//!  32   8  flags                           78   1  dictionary used
//!  40   8  byte offset of the jump table   79   5  0
//!  48   8  entries of the jump table       84   4  bytes of the dictionary
//!  56   8  bytes of the original           88   1  each block has a checksum
//! ```
//!
//! Flags: bit 0 header (else trailer), 1 data file, 2 sealed, 3 the header was written again when all was known, 4 checksums
//! of ends and table are there, 5 the jump table is compressed. The trailer is the truth unless bit 3 is set in the header.

use super::codec::Algorithm;
use super::damage::ZFileDamage;
use super::{HEADER_BYTES, checksum};

pub(crate) const MAGIC: [u8; 24] = [
    b'Z', b'F', b'i', b'l', b'e', 0, 1, 0, // magic0
    0x74, 0x75, 0x6a, 0x69, 0x2e, 0x79, 0x79, 0x66, 0x40, 0x41, 0x6c, 0x69, 0x62, 0x61, 0x62, 0x61,
];
const STRUCT_BYTES: u32 = 96;

const FLAG_HEADER: u64 = 1 << 0;
const FLAG_DATA: u64 = 1 << 1;
const FLAG_SEALED: u64 = 1 << 2;
const FLAG_OVERWRITTEN: u64 = 1 << 3;
const FLAG_CHECKSUMS: u64 = 1 << 4;
const FLAG_COMPRESSED_TABLE: u64 = 1 << 5;
const FLAGS_UNKNOWN: u64 = !0x3f;

/// Block sizes that we read. Upstream's tools write 4 KiB to 64 KiB, our writer up to 32 KiB.
pub const BLOCK_BYTES_MIN: u32 = 512;
pub const BLOCK_BYTES_MAX: u32 = 1 << 20;

/// Largest original, twice the largest upper: room for its index.
const ORIGINAL_BYTES_MAX: u64 = 1 << 44;

/// Which end of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Header,
    Trailer,
}

impl Part {
    pub fn name(self) -> &'static str {
        match self {
            Part::Header => "header",
            Part::Trailer => "trailer",
        }
    }
}

/// What the ends say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fields {
    /// In a header: it already says what the trailer says.
    pub overwritten: bool,
    pub checksums: bool,
    pub table_offset: u64,
    pub blocks: u64,
    pub original_bytes: u64,
    pub table_crc: u32,
    pub block_bytes: u32,
    pub algorithm: Algorithm,
    pub level: u8,
    /// Bytes of a dictionary that is there but not used.
    pub dictionary_bytes: u32,
    pub block_checksums: bool,
}

/// Whether bytes begin as a ZFile does.
pub(crate) fn is_zfile(start: &[u8]) -> bool {
    start.starts_with(&MAGIC)
}

impl Fields {
    pub fn encode(&self, part: Part) -> [u8; HEADER_BYTES] {
        let flags = FLAG_DATA | FLAG_CHECKSUMS | if part == Part::Header { FLAG_HEADER } else { FLAG_SEALED };
        let mut bytes = [0u8; HEADER_BYTES];
        bytes[..24].copy_from_slice(&MAGIC);
        bytes[24..28].copy_from_slice(&STRUCT_BYTES.to_le_bytes());
        bytes[32..40].copy_from_slice(&flags.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.table_offset.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.blocks.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.original_bytes.to_le_bytes());
        bytes[64..68].copy_from_slice(&self.table_crc.to_le_bytes());
        bytes[72..76].copy_from_slice(&self.block_bytes.to_le_bytes());
        bytes[76] = self.algorithm as u8;
        bytes[77] = self.level;
        bytes[88] = u8::from(self.block_checksums);
        let crc = checksum::append(0, &bytes);
        bytes[28..32].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads one end and checks what can be checked without the rest of the file.
    pub fn decode(bytes: &[u8; HEADER_BYTES], part: Part) -> Result<Self, ZFileDamage> {
        if !is_zfile(bytes) {
            return Err(ZFileDamage::Magic { part: part.name() });
        }
        let flags = u64_at(bytes, 32);
        check_flags(bytes, flags, part)?;
        let fields = Fields {
            overwritten: flags & FLAG_OVERWRITTEN != 0 && part == Part::Header,
            checksums: flags & FLAG_CHECKSUMS != 0,
            table_offset: u64_at(bytes, 40),
            blocks: u64_at(bytes, 48),
            original_bytes: u64_at(bytes, 56),
            table_crc: u32_at(bytes, 64),
            block_bytes: u32_at(bytes, 72),
            algorithm: Algorithm::of_number(bytes[76]).ok_or(ZFileDamage::Algorithm { algorithm: bytes[76] })?,
            level: bytes[77],
            dictionary_bytes: u32_at(bytes, 84),
            block_checksums: bytes[88] != 0,
        };
        let block_bytes = fields.block_bytes;
        if !block_bytes.is_power_of_two() || !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block_bytes) {
            return Err(ZFileDamage::BlockSize { block_bytes });
        }
        match bytes[78] {
            0 => Ok(fields),
            _ => Err(ZFileDamage::Dictionary),
        }
    }

    /// The place of the table and the number of blocks, in a file of `length` bytes. Caller: these are the fields of the
    /// end that is the truth.
    pub fn check_place(&self, length: u64) -> Result<(), ZFileDamage> {
        let (offset, blocks, original) = (self.table_offset, self.blocks, self.original_bytes);
        if original > ORIGINAL_BYTES_MAX {
            return Err(ZFileDamage::TooLarge { length: original });
        }
        let expected = original.div_ceil(u64::from(self.block_bytes));
        if blocks != expected {
            return Err(ZFileDamage::BlockCount {
                found: blocks,
                expected,
            });
        }
        // At most 2^44 / 512 blocks, so nothing overflows but the sum.
        let end = offset.checked_add(blocks * 4);
        let limit = length - HEADER_BYTES as u64;
        if offset < self.data_offset() || end.is_none_or(|end| end > limit) {
            return Err(ZFileDamage::TableOutside { offset, blocks });
        }
        Ok(())
    }

    /// Where block 0 is stored.
    pub fn data_offset(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.dictionary_bytes)
    }
}

fn check_flags(bytes: &[u8; HEADER_BYTES], flags: u64, part: Part) -> Result<(), ZFileDamage> {
    let right_end = (flags & FLAG_HEADER != 0) == (part == Part::Header);
    let complete = part == Part::Header || flags & FLAG_SEALED != 0;
    if !right_end || !complete || flags & FLAG_DATA == 0 || flags & FLAGS_UNKNOWN != 0 {
        let part = part.name();
        return Err(ZFileDamage::Flags { part, flags });
    }
    if flags & FLAG_CHECKSUMS != 0 {
        let mut plain = *bytes;
        plain[28..32].fill(0);
        if checksum::append(0, &plain) != u32_at(bytes, 28) {
            return Err(ZFileDamage::HeaderChecksum { part: part.name() });
        }
    }
    match flags & FLAG_COMPRESSED_TABLE {
        0 => Ok(()),
        _ => Err(ZFileDamage::CompressedTable),
    }
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
