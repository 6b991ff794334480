//! Why the cache could not give what was asked.

use std::io;
use std::path::PathBuf;

use crate::origin::OriginError;

#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("the cache in {} is in use by another process", .0.display())]
    InUse(PathBuf),
    #[error("cannot {step} {}", path.display())]
    File {
        step: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("not a blob that can be cached: {0}")]
    BadSpec(String),
    #[error("blob {digest} is open with another {field}")]
    Differs { digest: String, field: &'static str },
    #[error("block {block} of blob {digest}: the store gave wrong bytes {times} times")]
    WrongBytes { digest: String, block: u64, times: u32 },
    #[error("blob {digest}, bytes {offset} to {end}: the store failed for {waited_s} s")]
    TimedOut {
        digest: String,
        offset: u64,
        end: u64,
        waited_s: u64,
        #[source]
        source: OriginError,
    },
    #[error("blob {digest}, bytes {offset} to {end}")]
    Refused {
        digest: String,
        offset: u64,
        end: u64,
        #[source]
        source: OriginError,
    },
    #[error("blob {digest}: nobody wants this read any more")]
    Cancelled { digest: String },
    #[error("blob {digest}: others fetched this block for {waited_s} s and did not get it")]
    WaitedForOthers { digest: String, waited_s: u64 },
}
