//! Reaching remote bytes: objects of S3 stores and blobs of OCI registries, by ranges, from threads that block.
//!
//! Owns: the configuration file of stores, one HTTP client, authentication, the check that an answer is what was asked
//! for, the formats of blob descriptors, block lists and encryption at rest. Does not own: retries, caching, and the
//! order in which things are written (crates/cache and crates/storage).
//!
//! ```text
//! Descriptor ──> Source ──> Stores::ranged ──> Ranged::read ──> bytes ──> BlockList::verify ──> DecryptedBlob
//!                                │
//!                                └ Stores::bucket ──> Bucket: put, put_part, complete, head
//! ```
//!
//! Every call makes one attempt and has a timeout. Behind the blocking interface is one small async runtime per
//! [`Stores`]; none of the calls may be made on a thread of another one.

mod block_list;
mod bucket;
mod challenge;
mod cipher;
mod config;
mod decrypted;
mod descriptor;
mod digest;
mod error;
mod http;
mod object;
mod ranged;
mod registry;
mod source;
mod stores;

pub use block_list::{BLOCK_BYTES, BlockList, BlockListBuilder, BlockListError, BlockMismatch, block_count};
pub use bucket::{Bucket, ObjectInfo, UploadId};
pub use cipher::{Cipher, CipherError, EncryptWriter};
pub use decrypted::DecryptedBlob;
pub use descriptor::{BLOB_BYTES_MAX, DESCRIPTOR_BYTES_MAX, Descriptor, DescriptorError, Encryption};
pub use digest::{BadDigest, Digest, Hasher};
pub use error::{Failure, Place, StoreError, StoreErrorKind};
pub use ranged::Ranged;
pub use source::Source;
pub use stores::Stores;
