//! The block list of a blob: the digest of each of its blocks, so that any part of it can be verified alone.
//!
//! ```text
//! offset  bytes
//!      0      8   magic "AENVBLKS"
//!      8      4   version, 1
//!     12      4   0
//!     16      8   size of the blob in bytes
//!     24      4   bytes of a block, 65536
//!     28     32n  SHA-256 of each block; the last one may be short
//! ```
//!
//! Little endian. The list is named by its own SHA-256, which the record of the blob holds: a list that was changed with
//! the blob is found out too.

use std::ops::Range;

use crate::{Digest, Hasher};

/// Bytes of a block: the unit that is fetched, verified and cached.
pub const BLOCK_BYTES: u32 = 64 << 10;

const MAGIC: &[u8; 8] = b"AENVBLKS";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 28;
const HASH_BYTES: usize = 32;

/// The digests of all blocks of one blob.
#[derive(Clone, PartialEq, Eq)]
pub struct BlockList {
    size_bytes: u64,
    hashes: Box<[[u8; HASH_BYTES]]>,
}

/// Bytes that are no block list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlockListError {
    #[error("{length} bytes are too few for a block list")]
    TooShort { length: u64 },
    #[error("these bytes are no block list")]
    NotABlockList,
    #[error("block lists of version {version} are not known")]
    Version { version: u32 },
    #[error("the block list has blocks of {block_bytes} bytes; {BLOCK_BYTES} are expected")]
    BlockBytes { block_bytes: u32 },
    #[error("the block list has {found} bytes; {expected} belong to a blob of {size_bytes} bytes")]
    Length { size_bytes: u64, expected: u64, found: u64 },
}

/// A block that is not what the list says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlockMismatch {
    #[error("block {block} has {found} bytes and not {expected}")]
    Length { block: u64, expected: u64, found: u64 },
    #[error("block {block} does not have the content that it was stored with")]
    Content { block: u64 },
    #[error("the blob has {blocks} blocks and no block {block}")]
    NoSuchBlock { block: u64, blocks: u64 },
}

/// Blocks of a blob.
pub fn block_count(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(BLOCK_BYTES.into())
}

impl BlockList {
    /// Bytes of the list of a blob of `size_bytes`.
    pub fn encoded_bytes(size_bytes: u64) -> u64 {
        (block_count(size_bytes).saturating_mul(HASH_BYTES as u64)).saturating_add(HEADER_BYTES as u64)
    }

    /// Bytes of the blob.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub fn blocks(&self) -> u64 {
        self.hashes.len() as u64
    }

    /// The bytes of the blob that are block `block`; empty beyond the end.
    pub fn range(&self, block: u64) -> Range<u64> {
        let at = |block: u64| block.saturating_mul(BLOCK_BYTES.into()).min(self.size_bytes);
        at(block)..at(block.saturating_add(1))
    }

    /// Whether `bytes` are block `block`, whole. Errors: [`BlockMismatch`].
    pub fn verify(&self, block: u64, bytes: &[u8]) -> Result<(), BlockMismatch> {
        let hash = usize::try_from(block).ok().and_then(|block| self.hashes.get(block));
        let hash = hash.ok_or(BlockMismatch::NoSuchBlock {
            block,
            blocks: self.blocks(),
        })?;
        let range = self.range(block);
        let (expected, found) = (range.end - range.start, bytes.len() as u64);
        if expected != found {
            return Err(BlockMismatch::Length { block, expected, found });
        }
        match Digest::of(bytes).0 == *hash {
            true => Ok(()),
            false => Err(BlockMismatch::Content { block }),
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.hashes.len() * HASH_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&self.size_bytes.to_le_bytes());
        bytes.extend_from_slice(&BLOCK_BYTES.to_le_bytes());
        self.hashes.iter().for_each(|hash| bytes.extend_from_slice(hash));
        bytes
    }

    /// Reads an encoded list; its length must be exactly that of its blob's size. Errors: [`BlockListError`].
    pub fn decode(bytes: &[u8]) -> Result<BlockList, BlockListError> {
        let Some((header, hashes)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Err(BlockListError::TooShort {
                length: bytes.len() as u64,
            });
        };
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if !header.starts_with(MAGIC) || word(12) != 0 {
            return Err(BlockListError::NotABlockList);
        }
        let (version, block_bytes) = (word(8), word(24));
        if version != VERSION {
            return Err(BlockListError::Version { version });
        }
        if block_bytes != BLOCK_BYTES {
            return Err(BlockListError::BlockBytes { block_bytes });
        }
        let size_bytes = u64::from(word(16)) | u64::from(word(20)) << 32;
        let (expected, found) = (BlockList::encoded_bytes(size_bytes), bytes.len() as u64);
        if expected != found {
            return Err(BlockListError::Length {
                size_bytes,
                expected,
                found,
            });
        }
        let (hashes, _) = hashes.as_chunks::<HASH_BYTES>();
        Ok(BlockList {
            size_bytes,
            hashes: hashes.into(),
        })
    }

    /// The name of the list: the digest of its encoded bytes.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.encode())
    }
}

impl std::fmt::Debug for BlockList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockList({} bytes, {} blocks)", self.size_bytes, self.hashes.len())
    }
}

/// Makes a block list of bytes that come in pieces of any size.
#[derive(Debug, Default)]
pub struct BlockListBuilder {
    size_bytes: u64,
    current: Hasher,
    hashes: Vec<[u8; HASH_BYTES]>,
}

impl BlockListBuilder {
    pub fn new() -> BlockListBuilder {
        BlockListBuilder::default()
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = u64::from(BLOCK_BYTES) - self.size_bytes % u64::from(BLOCK_BYTES);
            let (part, rest) = bytes.split_at(bytes.len().min(room as usize));
            self.current.update(part);
            self.size_bytes += part.len() as u64;
            if self.size_bytes.is_multiple_of(BLOCK_BYTES.into()) {
                self.close_block();
            }
            bytes = rest;
        }
    }

    pub fn finish(mut self) -> BlockList {
        if !self.size_bytes.is_multiple_of(BLOCK_BYTES.into()) {
            self.close_block();
        }
        BlockList {
            size_bytes: self.size_bytes,
            hashes: self.hashes.into(),
        }
    }

    fn close_block(&mut self) {
        self.hashes.push(std::mem::take(&mut self.current).finish().0);
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: usize = BLOCK_BYTES as usize;

    fn list_of(bytes: &[u8]) -> BlockList {
        let mut builder = BlockListBuilder::new();
        builder.update(bytes);
        builder.finish()
    }

    #[test]
    fn the_list_has_the_bytes_of_the_format() {
        let bytes = list_of(b"abc").encode();
        assert_eq!(&bytes[..16], b"AENVBLKS\x01\0\0\0\0\0\0\0");
        assert_eq!(&bytes[16..28], [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(bytes[28..], Digest::of(b"abc").0);
    }

    #[test]
    fn only_the_block_itself_passes() {
        let blob: Vec<u8> = (0..BLOCK + 10).map(|i| (i / 7) as u8).collect();
        let list = list_of(&blob);
        assert_eq!(
            (list.blocks(), list.range(1), list.range(9)),
            (2, 65536..65546, 65546..65546)
        );
        list.verify(0, &blob[..BLOCK]).unwrap();
        list.verify(1, &blob[BLOCK..]).unwrap();
        let length = |block, expected, found| Err(BlockMismatch::Length { block, expected, found });
        assert_eq!(list.verify(0, &blob[..BLOCK - 1]), length(0, 65536, 65535));
        assert_eq!(list.verify(1, &blob[..BLOCK]), length(1, 10, 65536));
        let other = vec![0; 10];
        assert_eq!(list.verify(1, &other), Err(BlockMismatch::Content { block: 1 }));
        assert_eq!(
            list.verify(2, &[]),
            Err(BlockMismatch::NoSuchBlock { block: 2, blocks: 2 })
        );
    }

    #[test]
    fn hostile_lists_are_errors() {
        let good = list_of(&vec![7; BLOCK * 3]).encode();
        assert_eq!(
            BlockList::decode(&good[..27]),
            Err(BlockListError::TooShort { length: 27 })
        );
        for (at, error) in [
            (0, BlockListError::NotABlockList),
            (12, BlockListError::NotABlockList),
            (8, BlockListError::Version { version: 0xfe }),
            (
                24,
                BlockListError::BlockBytes {
                    block_bytes: 65536 + 0xff,
                },
            ),
        ] {
            let mut bytes = good.clone();
            bytes[at] = !bytes[at];
            assert_eq!(BlockList::decode(&bytes), Err(error));
        }
        // A size that no list could hold must not be asked for, nor overflow.
        for size in [0, 1, u64::MAX] {
            let mut bytes = good.clone();
            bytes[16..24].copy_from_slice(&u64::to_le_bytes(size));
            assert!(matches!(BlockList::decode(&bytes), Err(BlockListError::Length { .. })));
        }
    }

    proptest! {
        #[test]
        fn pieces_make_the_list_of_the_whole(pieces in prop::collection::vec(0usize..3 * BLOCK, 0..6)) {
            let blob: Vec<u8> = (0..pieces.iter().sum::<usize>()).map(|i| (i * 31 / 1000) as u8).collect();
            let mut builder = BlockListBuilder::new();
            let mut rest = &blob[..];
            for piece in pieces {
                let (part, tail) = rest.split_at(piece);
                builder.update(part);
                rest = tail;
            }
            let list = builder.finish();
            prop_assert_eq!(list.blocks(), block_count(blob.len() as u64));
            for (block, bytes) in blob.chunks(BLOCK).enumerate() {
                prop_assert_eq!(list.verify(block as u64, bytes), Ok(()));
            }
            prop_assert_eq!(BlockList::decode(&list.encode()), Ok(list));
        }
    }
}
