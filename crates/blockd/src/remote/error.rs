//! Why a remote blob could not be opened.

use aenv_cache::{CacheError, OriginError};
use aenv_store::{BlockListError, DescriptorError, StoreError};

#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    #[error("this blockd was given no stores and no cache")]
    NotConfigured,
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error("its block list cannot be had")]
    List(#[source] OriginError),
    #[error("the store's block list is another than the descriptor names")]
    OtherList,
    #[error("its block list is damaged")]
    BadList(#[from] BlockListError),
    #[error("its block list is of a blob of {listed} bytes, and it has {size_bytes}")]
    ListOfAnother { listed: u64, size_bytes: u64 },
    #[error("it is encrypted, and the stores' file has no key")]
    NoKey,
}
