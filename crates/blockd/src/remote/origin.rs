//! Stores and block lists as the cache wants them.

use std::sync::Arc;
use std::time::Duration;

use aenv_cache::{BlockCheck, Origin, OriginError, OriginErrorKind};
use aenv_store::{BlockList, Ranged, StoreError, StoreErrorKind};
use bytes::Bytes;

/// A blob in a store.
#[derive(Debug)]
pub struct StoreOrigin(pub Arc<dyn Ranged>);

impl Origin for StoreOrigin {
    fn read(&self, offset: u64, length: u64, timeout: Duration) -> Result<Bytes, OriginError> {
        self.0.read(offset, length, timeout).map_err(origin_error)
    }
}

pub fn origin_error(error: StoreError) -> OriginError {
    let kind = match error.kind() {
        StoreErrorKind::Transient => OriginErrorKind::Transient,
        StoreErrorKind::NotFound | StoreErrorKind::Denied | StoreErrorKind::Invalid => OriginErrorKind::Permanent,
    };
    OriginError {
        kind,
        source: Box::new(error),
    }
}

/// The digests of a blob's blocks.
#[derive(Debug)]
pub struct Listed(pub BlockList);

impl BlockCheck for Listed {
    fn blocks(&self) -> u64 {
        self.0.blocks()
    }

    fn is_right(&self, block: u64, bytes: &[u8]) -> bool {
        self.0.verify(block, bytes).is_ok()
    }
}
