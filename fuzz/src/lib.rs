//! What the fuzz targets share: input to file, and what is done with a layer that opens.
//!
//! Owns no rules of the format beyond where its checksums lie: a target must not know better than the code it tests.

mod exercise;
mod form;
mod memory;

pub use exercise::{read_stack, read_whole};
pub use form::{compact_lsmt, lsmt_file};
pub use memory::MemoryFile;
