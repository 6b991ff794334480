//! ZFile: a compressed file that is read at random, the format of containerd/overlaybd.
//!
//! ```text
//!   header 512 | block 0 [crc] | block 1 [crc] | ... | jump table | trailer 512
//! ```
//!
//! The original is cut into blocks of one size; each is compressed by itself (LZ4 or zstd) and followed by a CRC32C. The
//! jump table holds the stored length of each. `spec/layers.md` has the bytes.
//!
//! Owns: reading and writing such files. Does not own: what is inside, where the bytes are stored, caching.

mod checksum;
mod codec;
mod damage;
mod header;
mod jump_table;
mod reader;
mod writer;

pub use codec::Algorithm;
pub use damage::ZFileDamage;
pub use header::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN};
pub use reader::ZFile;
pub use writer::{CompressError, ZFileOptions, ZFileReport, ZFileWriter, compress};

pub(crate) use header::is_zfile;

/// Length of header and of trailer.
pub(crate) const HEADER_BYTES: usize = 512;

/// Length of the checksum behind a block.
pub(crate) const CRC_BYTES: usize = 4;
