//! The first 4096 bytes of an upper's map file.
//!
//! ```text
//!   0  8  magic "AENVUMAP"            24  16  uuid, equal to that of the data file
//!   8  4  version, 1                  40   4  CRC32C of bytes 0..40
//!  12  4  zero                        44      zero up to 4096
//!  16  8  virtual size in bytes
//! ```
//!
//! The uuid binds map and data file: a map beside the wrong file would show garbage as data. The size gives the length
//! of both bitmaps. They follow the header, each rounded up to whole pages so that it can be mapped by itself.

use crate::SECTOR_BYTES;
use crate::error::Damage;
use crate::uuid::Uuid;

pub(crate) const MAP_HEADER_BYTES: u64 = 4096;
const PAGE_BYTES: u64 = 4096;
const MAGIC: &[u8; 8] = b"AENVUMAP";
const VERSION: u32 = 1;
const CHECKED_BYTES: usize = 40;

/// What a map says about its upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MapHeader {
    pub virtual_size: u64,
    pub uuid: Uuid,
}

impl MapHeader {
    pub fn encode(&self) -> [u8; MAP_HEADER_BYTES as usize] {
        let mut bytes = [0; MAP_HEADER_BYTES as usize];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.virtual_size.to_le_bytes());
        bytes[24..40].copy_from_slice(self.uuid.as_bytes());
        let crc = crc32c::crc32c(&bytes[..CHECKED_BYTES]);
        bytes[40..44].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; MAP_HEADER_BYTES as usize]) -> Result<Self, Damage> {
        let field = |at: usize| -> [u8; 8] { std::array::from_fn(|i| bytes[at + i]) };
        let crc = crc32c::crc32c(&bytes[..CHECKED_BYTES]);
        if &bytes[..8] != MAGIC || bytes[8..12] != VERSION.to_le_bytes() || bytes[40..44] != crc.to_le_bytes() {
            return Err(Damage::Map);
        }
        let uuid = Uuid::from_bytes(std::array::from_fn(|i| bytes[24 + i]));
        Ok(MapHeader {
            virtual_size: u64::from_le_bytes(field(16)),
            uuid,
        })
    }

    pub fn sectors(&self) -> u64 {
        self.virtual_size / SECTOR_BYTES
    }

    /// Bytes of one bitmap, whole pages.
    pub fn bitmap_bytes(&self) -> u64 {
        self.sectors().div_ceil(8).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of the whole map file.
    pub fn file_bytes(&self) -> u64 {
        MAP_HEADER_BYTES + 2 * self.bitmap_bytes()
    }
}
