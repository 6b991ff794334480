//! The control protocol of blockd (`spec/wire/block.md`).
//!
//! Owns the frame, the operations and the answers. Does not own what they do: that is `crates/blockd`.
//! A frame is a little-endian u32 with the length of the JSON text that follows. Requests carry an id which the answer
//! repeats; answers come in any order.

mod answer;
mod frame;
mod operation;

pub use answer::{
    AbandonOk, CacheEvictOk, CacheOk, CachedBlobInfo, CaptureFinishOk, CaptureStartOk, CompactOk, DigestOk, Empty,
    ErrorBody, ErrorKind, ExportFailure, ExportInfo, ExportKind, ExportOk, ExportsOk, HelloOk, ImportRawOk, MergeOk,
    Outcome, PrefetchOk, SealDiskOk, StatsOk, TraceFinishOk, decode_answer, encode_error, encode_ok,
};
pub use frame::{FRAME_BYTES_MAX, FrameError, read_frame, write_frame};
pub use operation::{
    BadRequest, CacheEvict, CaptureStart, Compact, Digest, ExportDisk, ExportMemory, Fill, Hold, ImportRaw, Job, Merge,
    Name, Operation, Prefetch, Request, SealDisk, Sync, TraceFinish, TraceStart,
};

/// The protocol's number, answered by `hello`; it changes when an old client could no longer talk to a new daemon.
pub const PROTOCOL_VERSION: u32 = 1;

#[cfg(test)]
mod golden;
