//! Where a blob's bytes come from, as far as the cache needs to know.

use std::time::Duration;

use bytes::Bytes;

/// Ranges of one blob, read by one attempt each.
pub trait Origin: Send + Sync + std::fmt::Debug {
    /// One attempt. Returns exactly `length` bytes or an error, and not (much) later than `timeout`.
    fn read(&self, offset: u64, length: u64, timeout: Duration) -> Result<Bytes, OriginError>;
}

/// What every block of a blob must be.
pub trait BlockCheck: Send + Sync + std::fmt::Debug {
    /// Blocks of the blob.
    fn blocks(&self) -> u64;
    /// Whether these are the bytes of that block, all of them.
    fn is_right(&self, block: u64, bytes: &[u8]) -> bool;
}

/// Whether trying again can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OriginErrorKind {
    /// A timeout, a broken connection, a server that is busy or answers nonsense.
    Transient,
    /// The object is not there, access is denied, the request makes no sense.
    Permanent,
}

/// Why an attempt failed. The message of the source names store, object and range.
#[derive(Debug, thiserror::Error)]
#[error("the store did not give it")]
pub struct OriginError {
    pub kind: OriginErrorKind,
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}
