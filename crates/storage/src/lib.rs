//! `aenv-storage`: one-shot work on the blobs of a repository, in a process of its own.
//!
//! Owns: making a sealed layer or a file a blob of a directory or a bucket (compressed and encrypted if asked for, with a
//! resumable upload), verifying one, and getting one back as a file. Does not own: which blobs there should be, records, collection (the server), and
//! reading for guests (aenv-blockd).
//!
//! ```text
//! args -> publish ─┬─ recipe (canonical -> zfile -> encrypt) ─┬─ directory: a file that appears whole
//!                  │                                          └─ upload: parts, journal, patience
//!                  └─ verify, get: digest, block list, envelopes, index
//! ```
//!
//! The library exists for the tests; the program is its only user.

mod args;
mod directory;
mod error;
mod get;
mod journal;
mod parts;
mod patience;
mod progress;
mod publish;
mod recipe;
mod remote;
mod repair;
mod stored;
mod sums;
mod upload;
mod verify;

pub use args::{ArgsError, Command, USAGE, parse};
pub use error::{Failed, chain};
pub use get::{Fetch, Fetched, get};
pub use patience::Patience;
pub use progress::Progress;
pub use publish::{Content, Publication, Published, Target, publish};
pub use repair::{Compacted, Digested, compact, digest};
pub use verify::{Subject, Verification, Verified, verify};
