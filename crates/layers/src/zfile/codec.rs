//! One block at a time: compression and decompression, with both lengths bounded by the caller's buffers.

use std::cell::RefCell;
use std::io;

use zstd::bulk::{Compressor as ZstdCompressor, Decompressor as ZstdDecompressor};

/// How blocks are compressed. The numbers are those of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Raw LZ4 blocks.
    Lz4 = 1,
    /// One zstd frame per block.
    Zstd = 2,
}

impl Algorithm {
    pub(super) fn of_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Algorithm::Lz4),
            2 => Some(Algorithm::Zstd),
            _ => None,
        }
    }
}

/// Most bytes that any algorithm makes of a block; both expand what they cannot compress.
pub(super) fn stored_bytes_max(block_bytes: usize) -> usize {
    lz4_flex::block::get_maximum_output_size(block_bytes).max(zstd::zstd_safe::compress_bound(block_bytes))
}

/// Compresses blocks; the same block gives the same bytes.
pub(super) enum Compressor {
    Lz4,
    Zstd(ZstdCompressor<'static>),
}

impl Compressor {
    pub fn new(algorithm: Algorithm, level: i32) -> io::Result<Self> {
        Ok(match algorithm {
            Algorithm::Lz4 => Compressor::Lz4,
            Algorithm::Zstd => Compressor::Zstd(ZstdCompressor::new(level)?),
        })
    }

    /// Returns how many bytes of `into` it took. Caller: `into` has `stored_bytes_max` bytes.
    pub fn compress(&mut self, block: &[u8], into: &mut [u8]) -> io::Result<usize> {
        match self {
            Compressor::Lz4 => lz4_flex::block::compress_into(block, into).map_err(io::Error::other),
            Compressor::Zstd(context) => context.compress_to_buffer(block, into),
        }
    }
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Compressor::Lz4 => "Lz4",
            Compressor::Zstd(_) => "Zstd",
        })
    }
}

thread_local! {
    /// Making a context costs more than a block; blocks are decompressed by whichever thread reads.
    static ZSTD: RefCell<Option<ZstdDecompressor<'static>>> = const { RefCell::new(None) };
}

/// Whether `stored` decompresses to exactly the length of `into`. Never writes or allocates more than that.
pub(super) fn decompress(algorithm: Algorithm, stored: &[u8], into: &mut [u8]) -> bool {
    let length = into.len();
    match algorithm {
        Algorithm::Lz4 => lz4_flex::block::decompress_into(stored, into).is_ok_and(|count| count == length),
        Algorithm::Zstd => ZSTD.with_borrow_mut(|context| {
            if context.is_none() {
                *context = ZstdDecompressor::new().ok();
            }
            let outcome = context
                .as_mut()
                .map(|context| context.decompress_to_buffer(stored, into));
            matches!(outcome, Some(Ok(count)) if count == length)
        }),
    }
}
