//! What the fuzz targets share: input to file, and what is done with a layer that opens.
//!
//! Owns no rules of the format beyond where its checksums lie: a target must not know better than the code it tests.

// The parsing half of crates/store, by its sources: the crate itself brings TLS and HTTP, which take minutes to build with
// libFuzzer's flags and are not what is fuzzed.
#[path = "../../crates/store/src/block_list.rs"]
mod block_list;
#[path = "../../crates/store/src/descriptor.rs"]
mod descriptor;
#[path = "../../crates/store/src/digest.rs"]
mod digest;
#[path = "../../crates/store/src/source.rs"]
mod source;

mod exercise;
mod form;
mod memory;
mod repair;

pub use exercise::{is_layer, read_enveloped, read_stack, read_whole};
pub use form::{compact_lsmt, lsmt_file};
pub use memory::{MemoryBlob, MemoryFile};
pub use repair::{repair_tar, repair_zfile};
// What those sources call their crate's own, and more of them.
pub use block_list::{BLOCK_BYTES, BlockList, BlockListBuilder, BlockListError, BlockMismatch};
pub use descriptor::{DESCRIPTOR_BYTES_MAX, Descriptor, DescriptorError, Encryption};
pub use digest::{BadDigest, Digest, Hasher};
pub use source::Source;
