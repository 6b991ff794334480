//! Reads a ZFile at random. Threads share it without a lock: all state is the table, and each thread has its own buffers.
//!
//! A read fetches the stored bytes of the blocks that it touches, several at once, and decompresses those only. A block
//! that does not verify is read again, since what came over a wire or out of a cache may have been bad; then the read
//! fails, naming the block, and others go on.
//!
//! Decompressed blocks are not kept: the page cache above holds what was read, and for a small read a block of 16 KiB costs
//! less than the system call around it.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::codec::{Algorithm, decompress};
use super::damage::ZFileDamage;
use super::header::{Fields, Part};
use super::jump_table::JumpTable;
use super::{CRC_BYTES, HEADER_BYTES, checksum};
use crate::blob::Blob;
use crate::error::{Damage, Error, Result};

/// Stored bytes fetched at a time (or one block, if that is more).
const BATCH_BYTES: u64 = 1 << 20;

/// How often a block that does not verify is read in all.
const ATTEMPTS: u32 = 3;

/// Bytes before the end that an open asks for ahead: a trailer, and the table of some 100 MiB.
const TAIL_BYTES: u64 = 64 << 10;

/// The original of a ZFile, as a blob.
#[derive(Debug)]
pub struct ZFile {
    path: PathBuf,
    stored: Arc<dyn Blob>,
    table: JumpTable,
    fields: Fields,
}

/// Buffers of one read, kept by its thread for the next one.
#[derive(Default)]
struct Scratch {
    stored: Vec<u8>,
    block: Vec<u8>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = const { Cell::new(Scratch { stored: Vec::new(), block: Vec::new() }) };
}

impl ZFile {
    /// Opens the ZFile in `stored`; errors name it `path`.
    ///
    /// Errors: `Corrupt` with `Damage::ZFile`, those of the blob.
    pub fn open(path: &Path, stored: Arc<dyn Blob>) -> Result<ZFile> {
        let damaged = |damage| Error::corrupt(path, Damage::ZFile(damage));
        let length = stored.len_bytes();
        if length < 2 * HEADER_BYTES as u64 {
            return Err(damaged(ZFileDamage::TooShort { length }));
        }
        stored.will_read(length - TAIL_BYTES.min(length), TAIL_BYTES.min(length));
        let mut end = [0u8; HEADER_BYTES];
        stored.read_exact_at(&mut end, 0)?;
        let mut fields = Fields::decode(&end, Part::Header).map_err(damaged)?;
        if !fields.overwritten {
            stored.read_exact_at(&mut end, length - HEADER_BYTES as u64)?;
            fields = Fields::decode(&end, Part::Trailer).map_err(damaged)?;
        }
        fields.check_place(length).map_err(damaged)?;
        stored.will_read(fields.table_offset, fields.blocks * 4);
        let table = JumpTable::read(stored.as_ref(), path, &fields)?;
        Ok(ZFile {
            path: path.to_owned(),
            stored,
            table,
            fields,
        })
    }

    pub fn algorithm(&self) -> Algorithm {
        self.fields.algorithm
    }

    /// Bytes of the original in one block.
    pub fn block_bytes(&self) -> u32 {
        self.fields.block_bytes
    }

    /// Whether blocks carry checksums: without them a wrong block is found only if it does not decompress.
    pub fn has_checksums(&self) -> bool {
        self.fields.block_checksums
    }

    /// The original's bytes of a block.
    fn span(&self, block: u64) -> std::ops::Range<u64> {
        let size = u64::from(self.fields.block_bytes);
        block * size..((block + 1) * size).min(self.fields.original_bytes)
    }

    /// Blocks that hold the range, which is not empty and lies inside.
    fn blocks(&self, offset: u64, end: u64) -> std::ops::Range<u64> {
        let size = u64::from(self.fields.block_bytes);
        offset / size..(end - 1) / size + 1
    }

    fn read(&self, buf: &mut [u8], offset: u64, scratch: &mut Scratch) -> Result<()> {
        let blocks = self.blocks(offset, offset + buf.len() as u64);
        let mut rest = buf;
        let mut at = offset;
        let mut block = blocks.start;
        while block < blocks.end {
            let batch = self.batch(block, blocks.end);
            let start = self.table.place(batch.start).start;
            let length = self.table.place(batch.end - 1).end - start;
            // Bounded by a batch or one block.
            scratch.stored.resize(length as usize, 0);
            self.stored.read_exact_at(&mut scratch.stored, start)?;
            for number in batch.clone() {
                let span = self.span(number);
                let (part, after) = rest.split_at_mut(rest.len().min((span.end - at) as usize));
                let place = self.table.place(number);
                let stored = &mut scratch.stored[(place.start - start) as usize..(place.end - start) as usize];
                self.unpack(number, stored, part, at - span.start, &mut scratch.block)?;
                at = span.end;
                rest = after;
            }
            block = batch.end;
        }
        Ok(())
    }

    /// As many blocks from `first` on as are fetched at once.
    fn batch(&self, first: u64, limit: u64) -> std::ops::Range<u64> {
        let start = self.table.place(first).start;
        let mut end = first + 1;
        while end < limit && self.table.place(end).end - start <= BATCH_BYTES {
            end += 1;
        }
        first..end
    }

    /// Fills `part` with the block's bytes from `skipped` on; reads it again while it does not verify.
    fn unpack(&self, block: u64, stored: &mut [u8], part: &mut [u8], skipped: u64, whole: &mut Vec<u8>) -> Result<()> {
        let mut attempt = 1;
        loop {
            let Err(damage) = self.try_unpack(block, stored, part, skipped, whole) else {
                return Ok(());
            };
            if attempt == ATTEMPTS {
                return Err(Error::corrupt(&self.path, Damage::ZFile(damage)));
            }
            attempt += 1;
            let place = self.table.place(block);
            self.stored.distrust(place.start, place.end - place.start);
            self.stored.read_exact_at(stored, place.start)?;
        }
    }

    fn try_unpack(
        &self,
        block: u64,
        stored: &[u8],
        part: &mut [u8],
        skipped: u64,
        whole: &mut Vec<u8>,
    ) -> Result<(), ZFileDamage> {
        let mut packed = stored;
        if self.fields.block_checksums
            && let Some((content, crc)) = stored.split_last_chunk::<CRC_BYTES>()
        {
            if checksum::block(content) != u32::from_le_bytes(*crc) {
                return Err(ZFileDamage::BlockChecksum { block });
            }
            packed = content;
        }
        let span = self.span(block);
        let length = span.end - span.start;
        let algorithm = self.fields.algorithm;
        let unpacked = if part.len() as u64 == length {
            decompress(algorithm, packed, part)
        } else {
            whole.resize(length as usize, 0);
            let unpacked = decompress(algorithm, packed, whole);
            part.copy_from_slice(&whole[skipped as usize..][..part.len()]);
            unpacked
        };
        match unpacked {
            true => Ok(()),
            false => Err(ZFileDamage::BlockContent { block, length }),
        }
    }
}

impl Blob for ZFile {
    fn len_bytes(&self) -> u64 {
        self.fields.original_bytes
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let rest = self.len_bytes().saturating_sub(offset);
        if buf.len() as u64 > rest {
            let (offset, missing) = (offset.saturating_add(rest), buf.len() as u64 - rest);
            return Err(Error::corrupt(&self.path, Damage::ShortRead { offset, missing }));
        }
        if buf.is_empty() {
            return Ok(());
        }
        // Taken out meanwhile: should the blob below be read by this thread through another ZFile, that one gets new ones.
        let mut scratch = SCRATCH.take();
        let outcome = self.read(buf, offset, &mut scratch);
        SCRATCH.set(scratch);
        outcome
    }

    fn will_read(&self, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.len_bytes());
        if offset < end {
            let blocks = self.blocks(offset, end);
            let (start, end) = (
                self.table.place(blocks.start).start,
                self.table.place(blocks.end - 1).end,
            );
            self.stored.will_read(start, end - start);
        }
    }
}
