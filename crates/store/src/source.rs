//! Where the bytes of a blob are.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Digest;

/// One remote or local place.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Source {
    /// An object of a store of the configuration; the key is relative to that store's prefix.
    Object { store: String, key: String },
    /// A blob of an OCI registry.
    Registry {
        /// `host` or `host:port`, the name in the configuration; one that is not there is reached by https, unnamed.
        registry: String,
        repository: String,
        digest: Digest,
    },
    /// A file of this machine or of a file system shared by nodes.
    File { path: PathBuf },
}
