//! Writes a ZFile as a stream, on one thread; nothing is held back but one block and the table.

use std::io::{self, BufWriter, Read, Write};

use super::codec::{Algorithm, Compressor, stored_bytes_max};
use super::header::{Fields, Part};
use super::{CRC_BYTES, checksum};

/// Upstream's reader has 64 KiB for one stored block. A block of 64 KiB that does not shrink takes more, and it cannot read
/// what it wrote itself; half of that always fits.
const WRITTEN_BLOCK_BYTES: std::ops::RangeInclusive<u32> = 4096..=32_768;
const ZSTD_LEVELS: std::ops::RangeInclusive<i32> = 1..=19;
/// Stored bytes gathered before they go to the sink.
const SINK_BYTES: usize = 1 << 20;
/// Original bytes handled at a time by [`compress`].
const SOURCE_BYTES: usize = 512 << 10;

/// How to write a ZFile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZFileOptions {
    pub algorithm: Algorithm,
    /// 1 to 19 for zstd; LZ4 has none.
    pub level: i32,
    /// A power of two from 4 KiB to 32 KiB.
    pub block_bytes: u32,
    /// A CRC32C behind each block.
    pub checksum: bool,
}

impl Default for ZFileOptions {
    /// LZ4 in blocks of 16 KiB: a random read of 4 KiB decompresses little, and what blocks have in common is still found.
    fn default() -> Self {
        ZFileOptions {
            algorithm: Algorithm::Lz4,
            level: 3,
            block_bytes: 16 << 10,
            checksum: true,
        }
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZFileReport {
    pub original_bytes: u64,
    pub stored_bytes: u64,
    pub blocks: u64,
}

/// Why a ZFile was not written.
#[derive(Debug, thiserror::Error)]
pub enum CompressError {
    #[error("a block size of {block_bytes} bytes is no power of two between 4096 and 32768")]
    BlockSize { block_bytes: u32 },
    #[error("zstd level {level} is not between 1 and 19")]
    Level { level: i32 },
    #[error("reading what is to be compressed failed")]
    Source(#[source] io::Error),
    #[error("compressing failed")]
    Codec(#[source] io::Error),
    #[error("writing the compressed file failed")]
    Sink(#[source] io::Error),
}

/// Compresses what is written to it. Nothing is a ZFile before [`ZFileWriter::finish`].
#[derive(Debug)]
pub struct ZFileWriter<W: Write> {
    sink: BufWriter<W>,
    options: ZFileOptions,
    compressor: Compressor,
    /// The last block, not yet full.
    block: Vec<u8>,
    packed: Vec<u8>,
    lengths: Vec<u32>,
    original_bytes: u64,
    stored_bytes: u64,
}

impl<W: Write> ZFileWriter<W> {
    /// Writes the header. Errors: `BlockSize`, `Level`, `Codec`, `Sink`.
    pub fn new(sink: W, options: ZFileOptions) -> Result<Self, CompressError> {
        let (block_bytes, level) = (options.block_bytes, options.level);
        if !block_bytes.is_power_of_two() || !WRITTEN_BLOCK_BYTES.contains(&block_bytes) {
            return Err(CompressError::BlockSize { block_bytes });
        }
        if options.algorithm == Algorithm::Zstd && !ZSTD_LEVELS.contains(&level) {
            return Err(CompressError::Level { level });
        }
        let compressor = Compressor::new(options.algorithm, level).map_err(CompressError::Codec)?;
        let mut writer = ZFileWriter {
            sink: BufWriter::with_capacity(SINK_BYTES, sink),
            options,
            compressor,
            block: Vec::with_capacity(block_bytes as usize),
            packed: vec![0; stored_bytes_max(block_bytes as usize) + CRC_BYTES],
            lengths: Vec::new(),
            original_bytes: 0,
            stored_bytes: 0,
        };
        let header = writer.fields(0, 0).encode(Part::Header);
        writer.put(&header)?;
        Ok(writer)
    }

    /// Compresses more of the original. Errors: `Codec`, `Sink`; then the writer is of no use any more.
    pub fn append(&mut self, mut bytes: &[u8]) -> Result<(), CompressError> {
        let size = self.options.block_bytes as usize;
        self.original_bytes += bytes.len() as u64;
        if !self.block.is_empty() {
            let (first, rest) = bytes.split_at(bytes.len().min(size - self.block.len()));
            self.block.extend_from_slice(first);
            bytes = rest;
            if self.block.len() == size {
                self.put_last_block()?;
            }
        }
        let mut blocks = bytes.chunks_exact(size);
        for block in &mut blocks {
            self.put_block(block)?;
        }
        self.block.extend_from_slice(blocks.remainder());
        Ok(())
    }

    /// Writes the last block, the table and the trailer, and hands the sink back, flushed. Errors: `Codec`, `Sink`.
    pub fn finish(mut self) -> Result<(W, ZFileReport), CompressError> {
        if !self.block.is_empty() {
            self.put_last_block()?;
        }
        let table_offset = self.stored_bytes;
        let table: Vec<u8> = self.lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
        let trailer = self
            .fields(table_offset, checksum::append(0, &table))
            .encode(Part::Trailer);
        self.put(&table)?;
        self.put(&trailer)?;
        let report = ZFileReport {
            original_bytes: self.original_bytes,
            stored_bytes: self.stored_bytes,
            blocks: self.lengths.len() as u64,
        };
        let mut sink = self
            .sink
            .into_inner()
            .map_err(|error| CompressError::Sink(error.into_error()))?;
        sink.flush().map_err(CompressError::Sink)?;
        Ok((sink, report))
    }

    /// What the ends say; a header that knows nothing yet has zeros, as upstream's.
    fn fields(&self, table_offset: u64, table_crc: u32) -> Fields {
        let known = table_offset != 0;
        Fields {
            overwritten: false,
            checksums: true,
            table_offset,
            blocks: self.lengths.len() as u64,
            original_bytes: if known { self.original_bytes } else { 0 },
            table_crc,
            block_bytes: self.options.block_bytes,
            algorithm: self.options.algorithm,
            level: match self.options.algorithm {
                Algorithm::Lz4 => 0,
                // Checked to be at most 19.
                Algorithm::Zstd => self.options.level as u8,
            },
            dictionary_bytes: 0,
            block_checksums: self.options.checksum,
        }
    }

    fn put_last_block(&mut self) -> Result<(), CompressError> {
        let mut block = std::mem::take(&mut self.block);
        let outcome = self.put_block(&block);
        block.clear();
        self.block = block;
        outcome
    }

    fn put_block(&mut self, block: &[u8]) -> Result<(), CompressError> {
        let packed = self.compressor.compress(block, &mut self.packed);
        let mut length = packed.map_err(CompressError::Codec)?;
        if self.options.checksum {
            let crc = checksum::block(&self.packed[..length]);
            self.packed[length..length + CRC_BYTES].copy_from_slice(&crc.to_le_bytes());
            length += CRC_BYTES;
        }
        self.sink
            .write_all(&self.packed[..length])
            .map_err(CompressError::Sink)?;
        self.stored_bytes += length as u64;
        // A block of 32 KiB and little more.
        self.lengths.push(length as u32);
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), CompressError> {
        self.stored_bytes += bytes.len() as u64;
        self.sink.write_all(bytes).map_err(CompressError::Sink)
    }
}

/// For `io::copy` and its like; `append` tells more about errors.
impl<W: Write> Write for ZFileWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.append(bytes).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    /// A block is not cut short for it.
    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// Compresses all that `source` gives, for a layer its [`crate::CanonicalReader`]. Errors: all.
pub fn compress(mut source: impl Read, sink: impl Write, options: ZFileOptions) -> Result<ZFileReport, CompressError> {
    let mut writer = ZFileWriter::new(sink, options)?;
    let mut chunk = vec![0; SOURCE_BYTES];
    loop {
        match source.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => writer.append(&chunk[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(CompressError::Source(error)),
        }
    }
    Ok(writer.finish()?.1)
}
