//! A bounded cache, on local disk, of blocks of remote blobs; and the fetching of what is not in it.
//!
//! Owns: the folder of the cache, which blocks are in it, what is evicted, who fetches what and in which order, and the
//! verification of every block before a reader sees it. Does not own: how a store is reached (an [`Origin`] is handed
//! in), the layer format, encryption, and the meaning of a blob.
//!
//! ```text
//!   reader ─ CachedBlob::read_exact_at ─┬─ present: pread of the data file (no lock, pinned against eviction)
//!                                       ├─ claimed by another: wait until that one is done
//!                                       └─ missing: claim ─ fetch ─ verify ─ write data ─ set bit ─ release
//!   background threads (16 at most): what a sequential reader will want, replay of traces, fills; in this order
//!   keeper thread: takes stock of the folder once, then evicts whenever the high watermark is passed
//! ```
//!
//! A reader fetches what it misses in its own thread: it never queues behind anything that runs in the background.
//!
//! # What a crash can do
//!
//! Nothing is ever synced; the order of operations alone makes a crash harmless.
//! - *The process dies* (the page cache lives on): data is written before its bit is set, and a bit is cleared before its
//!   data is punched. So a set bit means whole, verified data. Data without a bit is waste, which the next stock-taking
//!   punches.
//! - *The host dies* (any subset of what was not written back is lost): a bit may be on disk without its data. The map
//!   carries the boot id of the kernel under which it was written. Under another one its bits mean no more than "perhaps":
//!   a block is verified again, against the blob's digests, before it is used. A blob without digests is dropped.
//!
//! # Rules that readers rely on
//!
//! - Bytes are verified against the blob's list of digests before a bit is set. A block that does not verify is fetched
//!   again, then its readers get an error that names blob and block. (A blob without a list is verified by its format.)
//! - A block that a reader is in is not evicted: readers pin the words of bits that they look at.
//! - The end of the blob inside a read is an error, never zeros.
//! - A full disk costs the caching, not the read.

mod background;
mod blob;
mod cache;
mod claim;
mod entry;
mod error;
mod evict;
mod fetch;
mod file_ops;
mod limits;
mod map_file;
mod metrics;
mod origin;
mod patience;
mod read_ahead;
mod sha256;
mod shared;
mod stock;
mod trace;

#[cfg(test)]
mod background_test;
#[cfg(test)]
mod behaviour_test;
#[cfg(test)]
mod crash_test;
#[cfg(test)]
mod keeping_test;
#[cfg(test)]
mod model_test;
#[cfg(test)]
mod testing;

pub use blob::CachedBlob;
pub use cache::{BlobSpec, BlobState, Cache, CacheLimits, CacheState};
pub use error::CacheError;
pub use fetch::attempt_until;
pub use limits::BLOCK_BYTES_MAX;
pub use metrics::Counts;
pub use origin::{BlockCheck, Origin, OriginError, OriginErrorKind};
pub use patience::{Cancel, Patience, adopt_patience, with_patience};
pub use trace::{Trace, TraceError};
