//! Incremental memory capture: what a stopped process wrote to its private mapping of an image, as a new layer.
//!
//! In a private mapping a page that was written is anonymous, and one that was only read is the image's. So the layer
//! is the list of anonymous pages; its parent is the mapped image. Works for any VMM and for a forked holder of one.
//!
//! Owns the steps (check the mapping, scan, copy, write) and the jobs between `capture_start` and `capture_finish`.
//! Never runs on a thread that answers FUSE and reads only anonymous pages: touching a file page of the mapping could
//! wait for blockd itself.

mod base;
mod buffer;
mod captures;
mod error;
mod job;
mod mapping;
mod memory;
mod pages;
mod scan;
mod write;

pub use captures::Captures;
pub use error::CaptureError;

/// Bytes `start..start + length` of the image, which the process maps at `address + start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    pub start: u64,
    pub length: u64,
}
