//! Disk and memory images as stacks of LSMT layers: the on-disk format and nothing else.
//!
//! Owns: the bytes of a sealed layer, the bytes of a writable upper and its map, the merged index of a stack, and the
//! order of writes that makes a crash harmless, and what a layer is wrapped in where it leaves the node (ZFile, tar). Does
//! not own: threads, sockets, FUSE, remote stores, caches, and
//! durability (nothing here calls `fsync`; `spec/layers.md` lists what the caller must sync, and when).
//!
//! ```text
//!   Stack ── Upper (data file + map file)      writable, in place
//!     │        └─ seal ──> Layer               same file, index and trailer appended
//!     └───── Lowers (Layer, Layer, ...)        immutable, shared by all stacks through a Registry
//! ```
//!
//! All offsets and lengths of the public interface are bytes and must be multiples of [`SECTOR_BYTES`].

mod bitmap;
mod blob;
mod canonical;
mod cold;
mod digest;
mod envelope;
mod error;
mod extent;
mod file_ops;
mod header;
mod import;
mod index;
mod layer;
mod layer_file;
mod lowers;
mod map;
mod map_header;
mod merge;
mod parallel;
mod plan;
mod registry;
mod seal;
mod segment;
mod stack;
mod tar;
mod upper;
mod uuid;
mod writer;
pub mod zfile;

#[cfg(test)]
mod crash_test;

pub use blob::{Blob, FileBlob, FileIdentity, Opener};
pub use canonical::{Canonical, CanonicalReader};
pub use digest::{CompactReport, DigestReport, compact, digest, digest_layer};
pub use error::{Damage, Error, ErrorKind, Result};
pub use extent::{Extent, ExtentKind};
pub use header::HEADER_BYTES;
pub use import::{ImportReport, import_raw};
pub use index::Index;
pub use layer::Layer;
pub use merge::{MergeReport, merge, merge_with};
pub use plan::{FileRead, ReadPlan};
pub use registry::Registry;
pub use seal::SealReport;
pub use segment::{MAX_SEGMENT_SECTORS, Segment};
pub use stack::{MAX_LAYERS, Retired, Stack};
pub use tar::{TarDamage, TarFrame};
pub use upper::{FileState, MAX_UPPER_BYTES, Upper, map_path, probe, remove_upper};
pub use uuid::Uuid;
pub use writer::LayerWriter;
pub use zfile::{Algorithm, ZFile, ZFileDamage, ZFileOptions, ZFileWriter};

/// The unit of every offset and length in the format.
pub const SECTOR_BYTES: u64 = 512;
