//! Chooses the blocks for content: large runs, one after the other, the same ones for the same input.

use crate::ext2::{Ext2, Ext2Error};
use crate::ext4::{EXTENT_BLOCKS_MAX, Extent};

/// A file larger than this is not begun in a smaller hole while there are larger ones.
const GOOD_RUN_BLOCKS: u64 = 256;
/// Holes that are looked at before a small one is taken.
const HOLES_MAX: usize = 64;

/// Where the next free run is looked for.
#[derive(Debug, Default)]
pub struct Space {
    cursor: u64,
}

impl Space {
    /// Takes `blocks` blocks for a file's blocks from `logical` on. None if so many are not free (then nothing is taken).
    pub fn take(&mut self, ext2: &mut Ext2, logical: u32, blocks: u64) -> Result<Option<Vec<Extent>>, Ext2Error> {
        if ext2.free_blocks() < blocks {
            return Ok(None);
        }
        let mut extents: Vec<Extent> = Vec::new();
        let mut rest = blocks;
        let mut logical = logical;
        while rest > 0 {
            let Some((start, length)) = self.find(ext2, rest.min(u64::from(EXTENT_BLOCKS_MAX)))? else {
                // The count says that they are there; a bitmap that says otherwise is as full.
                extents
                    .iter()
                    .for_each(|extent| ext2.mark_blocks(extent.physical, extent.count, false));
                return Ok(None);
            };
            let count = u32::try_from(length).unwrap_or(EXTENT_BLOCKS_MAX);
            ext2.mark_blocks(start, count, true);
            self.cursor = start + length;
            rest -= length;
            extents.push(Extent {
                logical,
                physical: start,
                count,
                unwritten: false,
            });
            logical += count;
        }
        Ok(Some(extents))
    }

    /// A free run of at most `wanted` blocks.
    fn find(&mut self, ext2: &mut Ext2, wanted: u64) -> Result<Option<(u64, u64)>, Ext2Error> {
        let good = wanted.min(GOOD_RUN_BLOCKS);
        let mut best: Option<(u64, u64)> = None;
        let mut at = self.cursor;
        let mut wrapped = false;
        for _ in 0..HOLES_MAX {
            match ext2.free_run(at, wanted)? {
                Some((start, length)) if length >= good => return Ok(Some((start, length))),
                Some((start, length)) => {
                    if best.is_none_or(|(_, longest)| length > longest) {
                        best = Some((start, length));
                    }
                    at = start + length;
                }
                None if wrapped => break,
                None => (wrapped, at) = (true, 0),
            }
        }
        Ok(best)
    }
}
