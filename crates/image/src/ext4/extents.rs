//! Where a file's content lies: runs of blocks, listed in the inode or in a tree below it.

use super::inode::CONTENT_BYTES;
use super::{Block, Ext4Error, Inode, put_u16, put_u32, read_block, u16_at, u32_at};
use crate::device::Device;

const MAGIC: u16 = 0xf30a;
const ENTRY_BYTES: usize = 12;
/// Extents that an inode itself has room for.
pub const INLINE_EXTENTS: usize = 4;
/// Most blocks of one written extent.
pub const EXTENT_BLOCKS_MAX: u32 = 1 << 15;
/// Levels of a tree, the kernel's limit.
const DEPTH_MAX: u16 = 5;
/// Extents of one file that a reader keeps in memory; 128 GiB in the smallest pieces.
const EXTENTS_MAX: usize = 1 << 25;
/// Nodes of one file that a reader follows: all that `EXTENTS_MAX` extents need, and a limit on a tree of empty ones.
const NODES_MAX: usize = 1 << 18;

/// A run of blocks: `count` from the file's block `logical` on lie from `physical` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub logical: u32,
    pub physical: u64,
    pub count: u32,
    /// Allocated but never written: reads zero.
    pub unwritten: bool,
}

/// The node in an inode for at most [`INLINE_EXTENTS`] extents.
pub fn encode_inline(extents: &[Extent]) -> [u8; CONTENT_BYTES] {
    assert!(extents.len() <= INLINE_EXTENTS, "more extents than an inode holds");
    let mut node = [0; CONTENT_BYTES];
    put_u16(&mut node, 0, MAGIC);
    put_u16(&mut node, 2, extents.len() as u16);
    put_u16(&mut node, 4, INLINE_EXTENTS as u16);
    for (extent, entry) in extents.iter().zip(node[ENTRY_BYTES..].chunks_mut(ENTRY_BYTES)) {
        put_u32(entry, 0, extent.logical);
        put_u16(entry, 4, extent.count as u16);
        put_u16(entry, 6, (extent.physical >> 32) as u16);
        put_u32(entry, 8, extent.physical as u32);
    }
    node
}

/// All extents of an inode in order. Errors: `Unsupported` for an older map of blocks, `Damaged`, `Device`.
pub fn walk(device: &Device, ino: u32, inode: &Inode) -> Result<Vec<Extent>, Ext4Error> {
    if inode.has_inline_data() {
        return Err(Ext4Error::Unsupported { what: "inline data" });
    }
    if !inode.has_extents() {
        return match inode.sectors() {
            0 => Ok(Vec::new()),
            _ => Err(Ext4Error::Unsupported { what: "block maps" }),
        };
    }
    let mut walk = Walk {
        device,
        ino,
        nodes: 0,
        extents: Vec::new(),
    };
    walk.node(inode.content(), None)?;
    Ok(walk.extents)
}

struct Walk<'a> {
    device: &'a Device,
    ino: u32,
    nodes: usize,
    extents: Vec<Extent>,
}

impl Walk<'_> {
    /// `depth` is what the parent says; none for the root.
    fn node(&mut self, node: &[u8], depth: Option<u16>) -> Result<(), Ext4Error> {
        self.nodes += 1;
        let (magic, count, own) = (u16_at(node, 0), usize::from(u16_at(node, 2)), u16_at(node, 6));
        let fits = ENTRY_BYTES * (count + 1) <= node.len();
        if magic != MAGIC || !fits || own > DEPTH_MAX || depth.is_some_and(|depth| depth != own) {
            return Err(self.damaged("a node of extents"));
        }
        if self.nodes > NODES_MAX {
            return Err(self.damaged("the size of the extent tree"));
        }
        for entry in node[ENTRY_BYTES..].chunks_exact(ENTRY_BYTES).take(count) {
            match own {
                0 => self.leaf_entry(entry)?,
                _ => {
                    let child = u64::from(u32_at(entry, 4)) | u64::from(u16_at(entry, 8)) << 32;
                    let block: Block = read_block(self.device, child)?;
                    self.node(&block, Some(own - 1))?;
                }
            }
        }
        Ok(())
    }

    fn leaf_entry(&mut self, entry: &[u8]) -> Result<(), Ext4Error> {
        let stored = u32::from(u16_at(entry, 4));
        let unwritten = stored > EXTENT_BLOCKS_MAX;
        let extent = Extent {
            logical: u32_at(entry, 0),
            physical: u64::from(u32_at(entry, 8)) | u64::from(u16_at(entry, 6)) << 32,
            count: if unwritten { stored - EXTENT_BLOCKS_MAX } else { stored },
            unwritten,
        };
        let after = self
            .extents
            .last()
            .map_or(0, |last| u64::from(last.logical) + u64::from(last.count));
        let in_order = u64::from(extent.logical) >= after && extent.count > 0;
        let inside = extent.physical.saturating_add(u64::from(extent.count)) <= self.device.blocks();
        if !in_order || !inside || self.extents.len() >= EXTENTS_MAX {
            return Err(self.damaged("an extent"));
        }
        self.extents.push(extent);
        Ok(())
    }

    fn damaged(&self, what: &'static str) -> Ext4Error {
        Ext4Error::Damaged { what, ino: self.ino }
    }
}
