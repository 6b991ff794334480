//! Blocks of a directory: entries in a list, and the index over them that a directory of several blocks has.
//!
//! ```text
//! entry   inode u32, length of the record u16, length of the name u8, type u8, name, padding to 4
//! leaf    entries that fill the block up to its last 12 bytes: a false entry that holds the checksum
//! root    entry ".", entry "..", at 24 the index' description, at 32 (hash, block) pairs; at the end 8 bytes of checksum
//! node    a false entry over the whole block, at 8 (hash, block) pairs; at the end 8 bytes of checksum
//! ```
//! The first pair's hash is the pair of limit and count. The checksums are filled in by the library when it writes.

use super::{Block, FileType, put_u16, put_u32, u16_at, u32_at};
use crate::device::BLOCK_BYTES;

const BLOCK: usize = BLOCK_BYTES as usize;
const TAIL_BYTES: usize = 12;
const ROOM: usize = BLOCK - TAIL_BYTES;
const ROOT_PAIRS_AT: usize = 32;
const NODE_PAIRS_AT: usize = 8;
const PAIR_BYTES: usize = 8;
const ROOT_PAIRS: usize = (BLOCK - ROOT_PAIRS_AT - 8) / PAIR_BYTES;
const NODE_PAIRS: usize = (BLOCK - NODE_PAIRS_AT - 8) / PAIR_BYTES;
/// Most leaves of an index of two levels.
pub const INDEX_FANOUT_MAX: usize = ROOT_PAIRS * NODE_PAIRS;
/// A leaf is left when it is this full, so that a guest's next files do not split every leaf at once.
const LEAF_FILL: usize = ROOM * 4 / 5;

/// One entry that was read.
#[derive(Debug, PartialEq, Eq)]
pub struct Dirent<'a> {
    pub ino: u32,
    pub code: u8,
    pub name: &'a [u8],
}

/// Bytes of the record of a name.
pub fn entry_bytes(name_bytes: usize) -> usize {
    (8 + name_bytes).next_multiple_of(4)
}

/// The entries of a block but `.` and `..`; none where the block is malformed. Blocks of an index hold none.
pub fn parse_block(block: &Block) -> Option<Vec<Dirent<'_>>> {
    let mut entries = Vec::new();
    let mut at = 0;
    while at < BLOCK {
        let record = block.get(at..)?;
        if record.len() < 8 {
            return None;
        }
        let (ino, length, name_bytes) = (
            u32_at(record, 0),
            usize::from(u16_at(record, 4)),
            usize::from(record[6]),
        );
        if length < 8 || length % 4 != 0 || length > record.len() {
            return None;
        }
        if ino != 0 {
            if 8 + name_bytes > length || name_bytes == 0 {
                return None;
            }
            let name = &record[8..8 + name_bytes];
            if name.contains(&b'/') || name.contains(&0) {
                return None;
            }
            if name != b"." && name != b".." {
                entries.push(Dirent {
                    ino,
                    code: record[7],
                    name,
                });
            }
        }
        at += length;
    }
    Some(entries)
}

/// Fills blocks with entries in the order they come.
#[derive(Debug, Default)]
pub struct Leaves {
    blocks: Vec<Block>,
    /// Hash under which each block is found.
    hashes: Vec<u32>,
    used: usize,
    last_at: usize,
    last_hash: u32,
}

impl Leaves {
    /// Entries must come by ascending hash.
    pub fn push(&mut self, hash: u32, ino: u32, code: u8, name: &[u8]) {
        let bytes = entry_bytes(name.len());
        if self.blocks.is_empty() || self.used + bytes > LEAF_FILL {
            // One hash over two blocks: the low bit tells a search to go on into the next.
            let continued = !self.blocks.is_empty() && hash == self.last_hash;
            self.start(if self.blocks.is_empty() {
                0
            } else {
                hash | u32::from(continued)
            });
        }
        self.last_hash = hash;
        self.put(ino, code, name);
    }

    fn start(&mut self, hash: u32) {
        self.blocks.push([0; BLOCK]);
        self.hashes.push(hash);
        (self.used, self.last_at) = (0, 0);
    }

    fn put(&mut self, ino: u32, code: u8, name: &[u8]) {
        let at = self.used;
        let Some(block) = self.blocks.last_mut() else {
            return;
        };
        // The last record of a block takes what is left.
        put_entry(block, at, (ino, (ROOM - at) as u16, code, name));
        if at > 0 {
            put_u16(block, self.last_at + 4, (at - self.last_at) as u16);
        }
        self.last_at = at;
        self.used = at + entry_bytes(name.len());
    }

    fn finish(mut self) -> (Vec<Block>, Vec<u32>) {
        for block in &mut self.blocks {
            put_u16(block, ROOM + 4, TAIL_BYTES as u16);
            block[ROOM + 7] = 0xde;
        }
        (self.blocks, self.hashes)
    }

    /// Blocks that were begun.
    pub fn count(&self) -> usize {
        self.blocks.len()
    }
}

/// A directory of one block; the entries fit by [`entry_bytes`].
pub fn build_single<'a>(ino: u32, parent: u32, entries: impl Iterator<Item = (u32, u8, &'a [u8])>) -> Block {
    let mut leaves = Leaves::default();
    let directory = FileType::Directory.dirent_code();
    leaves.start(0);
    leaves.put(ino, directory, b".");
    leaves.put(parent, directory, b"..");
    for (ino, code, name) in entries {
        leaves.put(ino, code, name);
    }
    leaves.finish().0[0]
}

/// A directory with an index over `leaves` (at most [`INDEX_FANOUT_MAX`]), its blocks in order.
pub fn build_index(ino: u32, parent: u32, hash_version: u8, leaves: Leaves) -> Vec<Block> {
    let (leaf_blocks, hashes) = leaves.finish();
    let direct = leaf_blocks.len() <= ROOT_PAIRS;
    let groups: Vec<&[u32]> = if direct {
        Vec::new()
    } else {
        hashes.chunks(NODE_PAIRS).collect()
    };
    let first_leaf = 1 + groups.len();
    let mut root = [0; BLOCK];
    let directory = FileType::Directory.dirent_code();
    put_entry(&mut root, 0, (ino, 12, directory, b"."));
    put_entry(&mut root, 12, (parent, (BLOCK - 12) as u16, directory, b".."));
    root[28] = hash_version;
    root[29] = 8;
    root[30] = u8::from(!direct);
    let mut blocks = Vec::with_capacity(first_leaf + leaf_blocks.len());
    if direct {
        put_pairs(
            &mut root[ROOT_PAIRS_AT..],
            ROOT_PAIRS,
            hashes.iter().copied(),
            first_leaf,
        );
        blocks.push(root);
    } else {
        let firsts = groups.iter().map(|group| group[0]);
        put_pairs(&mut root[ROOT_PAIRS_AT..], ROOT_PAIRS, firsts, 1);
        blocks.push(root);
        for (number, group) in groups.iter().enumerate() {
            let mut node = [0; BLOCK];
            put_u16(&mut node, 4, BLOCK as u16);
            let first = first_leaf + number * NODE_PAIRS;
            put_pairs(&mut node[NODE_PAIRS_AT..], NODE_PAIRS, group.iter().copied(), first);
            blocks.push(node);
        }
    }
    blocks.extend(leaf_blocks);
    blocks
}

fn put_entry(block: &mut Block, at: usize, (ino, length, code, name): (u32, u16, u8, &[u8])) {
    put_u32(block, at, ino);
    put_u16(block, at + 4, length);
    block[at + 6] = name.len() as u8;
    block[at + 7] = code;
    block[at + 8..at + 8 + name.len()].copy_from_slice(name);
}

/// Pairs for consecutive blocks from `first` on.
fn put_pairs(at: &mut [u8], limit: usize, hashes: impl ExactSizeIterator<Item = u32>, first: usize) {
    let count = hashes.len();
    for (number, hash) in hashes.enumerate() {
        put_u32(at, number * PAIR_BYTES, hash);
        put_u32(at, number * PAIR_BYTES + 4, (first + number) as u32);
    }
    put_u16(at, 0, limit as u16);
    put_u16(at, 2, count as u16);
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_was_built_is_parsed() {
        let names: [&[u8]; 3] = [b"a", &[b'x'; 255], b"name with \xff bytes"];
        let entries = names.iter().zip(11..).map(|(name, ino)| (ino, 1, *name));
        let block = build_single(5, 2, entries);
        let found: Vec<_> = parse_block(&block).unwrap();
        assert_eq!(found.iter().map(|e| e.name).collect::<Vec<_>>(), names);
        assert_eq!(found[2].ino, 13);
    }

    #[test]
    fn every_entry_of_an_index_of_two_levels_is_in_a_leaf() {
        let mut leaves = Leaves::default();
        let count = 60_000u32;
        for number in 0..count {
            leaves.push(number * 2, number + 20, 1, format!("{number:040}").as_bytes());
        }
        let blocks = build_index(12, 2, 1, leaves);
        assert_eq!(blocks[0][30], 1);
        let found: usize = blocks.iter().map(|block| parse_block(block).unwrap().len()).sum();
        assert_eq!(found, count as usize);
    }

    #[test]
    fn malformed_blocks_are_refused() {
        assert_eq!(parse_block(&[0; BLOCK]), None);
        let mut block = build_single(5, 2, std::iter::once((7, 1, &b"name"[..])));
        block[24 + 6] = 255;
        put_u16(&mut block, 24 + 4, 12);
        assert_eq!(parse_block(&block), None);
    }
}
