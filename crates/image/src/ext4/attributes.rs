//! Extended attributes as ext4 stores them, turned into the names and values that the kernel shows.
//!
//! ```text
//! in the inode  magic u32, entries, 4 bytes of zero; values counted from the first entry
//! in a block    header of 32 bytes, entries, 4 bytes of zero; values counted from the block's start
//! entry         length of the name u8, number of the prefix u8, offset u16, inode u32, size u32, hash u32, name, padding to 4
//! ```

use std::collections::BTreeMap;

use super::inode::{EXTRA_SIZE, INODE_BYTES};
use super::{Ext4Error, Inode, put_u16, put_u32, read_block, u16_at, u32_at};
use crate::device::Device;

const MAGIC: u32 = 0xea02_0000;
const BLOCK_HEADER_BYTES: usize = 32;
const ENTRY_BYTES: usize = 16;

/// Names and values, sorted by name.
pub type Attributes = BTreeMap<Vec<u8>, Vec<u8>>;

/// All attributes of an inode. Errors: `Damaged`, `Unsupported`, `Device`.
pub(super) fn read(device: &Device, ino: u32, inode: &Inode, inode_bytes: u16) -> Result<Attributes, Ext4Error> {
    let mut found = Attributes::new();
    let bytes = inode.as_bytes();
    let start = 128 + usize::from(u16_at(bytes, EXTRA_SIZE));
    if usize::from(inode_bytes) >= INODE_BYTES
        && start + 8 <= INODE_BYTES
        && start % 4 == 0
        && u32_at(bytes, start) == MAGIC
    {
        let region = &bytes[start + 4..];
        parse(region, 0, &mut found).ok_or(damaged(ino))??;
    }
    if inode.has_attribute_block() {
        let block = read_block(device, inode.attribute_block())?;
        if u32_at(&block, 0) != MAGIC {
            return Err(damaged(ino));
        }
        parse(&block, BLOCK_HEADER_BYTES, &mut found).ok_or(damaged(ino))??;
    }
    Ok(found)
}

fn damaged(ino: u32) -> Ext4Error {
    let what = "an extended attribute";
    Ext4Error::Damaged { what, ino }
}

/// Entries from `at` on; none if something lies outside of the region.
fn parse(region: &[u8], mut at: usize, found: &mut Attributes) -> Option<Result<(), Ext4Error>> {
    while u32_at(region.get(at..at + 4)?, 0) != 0 {
        let entry = region.get(at..at + ENTRY_BYTES)?;
        let name_bytes = usize::from(entry[0]);
        let name = region.get(at + ENTRY_BYTES..at + ENTRY_BYTES + name_bytes)?;
        if u32_at(entry, 4) != 0 {
            let what = "attributes in inodes of their own";
            return Some(Err(Ext4Error::Unsupported { what }));
        }
        let (offset, size) = (usize::from(u16_at(entry, 2)), u32_at(entry, 8) as usize);
        let value = match size {
            0 => &[],
            _ => region.get(offset..offset.checked_add(size)?)?,
        };
        // A prefix that we do not know is none of the kernel's names either: it shows nothing of it.
        if let Some(full) = full_name(entry[1], name) {
            let shown = if is_acl(&full) {
                acl_shown(value)?
            } else {
                value.to_vec()
            };
            found.insert(full, shown);
        }
        at += (ENTRY_BYTES + name_bytes).next_multiple_of(4);
    }
    Some(Ok(()))
}

fn full_name(prefix: u8, name: &[u8]) -> Option<Vec<u8>> {
    let prefix: &[u8] = match prefix {
        1 => b"user.",
        2 => b"system.posix_acl_access",
        3 => b"system.posix_acl_default",
        4 => b"trusted.",
        6 => b"security.",
        _ => return None,
    };
    Some([prefix, name].concat())
}

fn is_acl(name: &[u8]) -> bool {
    name.starts_with(b"system.posix_acl_")
}

/// The kernel's form (version 2, entries of 8 bytes) of the disk's (version 1, entries of 4 or 8 bytes).
fn acl_shown(stored: &[u8]) -> Option<Vec<u8>> {
    const NO_ID: u32 = u32::MAX;
    if stored.len() < 4 || u32_at(stored, 0) != 1 {
        return None;
    }
    let mut shown = vec![2, 0, 0, 0];
    let mut rest = &stored[4..];
    while !rest.is_empty() {
        let short = rest.get(..4)?;
        let tag = u16_at(short, 0);
        // Only entries of named users and groups carry one.
        let has_id = matches!(tag, 0x02 | 0x08);
        let bytes = if has_id { 8 } else { 4 };
        let id = if has_id { u32_at(rest.get(..8)?, 4) } else { NO_ID };
        let mut entry = [0; 8];
        put_u16(&mut entry, 0, tag);
        put_u16(&mut entry, 2, u16_at(short, 2));
        put_u32(&mut entry, 4, id);
        shown.extend_from_slice(&entry);
        rest = &rest[bytes..];
    }
    Some(shown)
}
