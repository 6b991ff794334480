//! The FUSE side: two mounts, each with its own descriptor, threads and limits, so that neither can hold up the other.
//!
//! Owns the protocol loop and what each opcode means on either mount. Does not own mounting (`keeper`) nor the content
//! (`export`). There is no state per open file: the handle is the inode, and inodes are on disk, so any blockd can go
//! on where the one before it was killed.

mod abi;
mod buffer;
mod channel;
mod crew;
mod data;
mod directory;
mod queue;
mod receiver;
mod ring;
mod session;

pub use abi::ROOT_INODE;
pub use channel::Channel;
pub use session::Session;

use aenv_wire::block::ExportKind;

/// What OPEN answers on each mount.
///
/// Memory: the page cache is kept over opens, it is what clones share. Disks: no cache on the host, the guest has its
/// own, and writes of one disk run side by side.
fn open_flags(kind: ExportKind) -> u32 {
    match kind {
        ExportKind::Memory => abi::open_flag::KEEP_CACHE,
        ExportKind::Disk => abi::open_flag::DIRECT_IO | abi::open_flag::PARALLEL_DIRECT_WRITES,
    }
}
