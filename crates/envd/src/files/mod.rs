//! Files of the sandbox: the REST routes that move content, and the service `filesystem.Filesystem`.
//!
//! Paths are taken lexically, as the clients expect; whoever may call this API is root in this guest anyway,
//! so nothing is confined here. Blocking calls run on blocking threads: a hanging file system (FUSE, NFS in
//! the guest) must not stop the daemon.

pub mod download;
pub mod entry;
mod filename;
pub mod metadata;
mod negotiate;
pub mod path;
pub mod query;
pub mod rpc;
pub mod upload;
