//! Where each block is stored. The file has lengths; reads need offsets.

use super::codec::stored_bytes_max;
use super::damage::ZFileDamage;
use super::header::Fields;
use super::{CRC_BYTES, checksum};
use crate::blob::Blob;
use crate::error::{Damage, Error, Result};

/// Table bytes read at a time: memory grows only with entries that passed the checks.
const CHUNK_BYTES: usize = 1 << 20;

/// Blocks that share one full offset. A group of the largest blocks stays far below 4 GiB.
const GROUP: u64 = 16;

/// The end of each block: a full offset per group and the distance from it, 4.5 bytes per block.
#[derive(Debug, Default)]
pub(super) struct JumpTable {
    bases: Vec<u64>,
    ends: Vec<u32>,
    first: u64,
}

impl JumpTable {
    /// Reads and checks the table. Caller: its place in the file is checked.
    pub fn read(blob: &dyn Blob, path: &std::path::Path, fields: &Fields) -> Result<Self> {
        let damaged = |damage| Error::corrupt(path, Damage::ZFile(damage));
        let total = fields.blocks * 4;
        let limit = BlockLimit::new(fields);
        let mut table = JumpTable {
            first: fields.data_offset(),
            ..JumpTable::default()
        };
        let mut chunk = vec![0u8; total.min(CHUNK_BYTES as u64) as usize];
        let (mut done, mut crc, mut end) = (0, 0, table.first);
        while done < total {
            let count = (total - done).min(CHUNK_BYTES as u64) as usize;
            let bytes = &mut chunk[..count];
            blob.read_exact_at(bytes, fields.table_offset + done)?;
            crc = checksum::append(crc, bytes);
            for entry in bytes.chunks_exact(4) {
                let length = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
                end = limit.end(table.ends.len() as u64, length, end).map_err(damaged)?;
                table.push(end);
            }
            done += count as u64;
        }
        if fields.checksums && crc != fields.table_crc {
            return Err(damaged(ZFileDamage::TableChecksum));
        }
        Ok(table)
    }

    /// The stored bytes of a block, its checksum included.
    pub fn place(&self, block: u64) -> std::ops::Range<u64> {
        let start = match block.checked_sub(1) {
            Some(before) => self.end(before),
            None => self.first,
        };
        start..self.end(block)
    }

    fn end(&self, block: u64) -> u64 {
        self.bases[(block / GROUP) as usize] + u64::from(self.ends[block as usize])
    }

    fn push(&mut self, end: u64) {
        if (self.ends.len() as u64).is_multiple_of(GROUP) {
            self.bases.push(end);
        }
        let base = self.bases.last().copied().unwrap_or(end);
        // At most 16 blocks of some more than a MiB.
        self.ends.push((end - base) as u32);
    }
}

/// What a stored length must satisfy.
struct BlockLimit {
    min: u32,
    max: u32,
    data_end: u64,
}

impl BlockLimit {
    fn new(fields: &Fields) -> Self {
        let crc = if fields.block_checksums { CRC_BYTES } else { 0 };
        // The largest is far below 4 GiB: a MiB and what the algorithms add.
        let max = (stored_bytes_max(fields.block_bytes as usize) + crc) as u32;
        BlockLimit {
            min: crc as u32 + 1,
            max,
            data_end: fields.table_offset,
        }
    }

    /// The end of a block that starts at `start`.
    fn end(&self, block: u64, length: u32, start: u64) -> Result<u64, ZFileDamage> {
        if length < self.min || length > self.max {
            return Err(ZFileDamage::BlockLength { block, length });
        }
        // No overflow: `start` is at most the end of the data.
        let end = start + u64::from(length);
        match end <= self.data_end {
            true => Ok(end),
            false => Err(ZFileDamage::BlockOutside { block }),
        }
    }
}
