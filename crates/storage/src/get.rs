//! Getting the plain bytes of a blob as a local file: verified, decrypted, whole or not at all.
//!
//! For what no daemon reads by ranges: device states, which a VMM loads from a file.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_layers::{Blob, FileBlob};
use aenv_store::{Descriptor, Digest, Hasher, Source};
use serde::Serialize;

use crate::directory::{NewFile, split};
use crate::error::{At, Failed};
use crate::patience::Patience;
use crate::progress::Progress;
use crate::stored::{Access, digest_of, expect, read_whole};
use crate::verify::Subject;

/// It may have been encrypted for a reason: for its owner alone.
const MODE: u32 = 0o600;

/// One command `get`.
#[derive(Debug, Clone)]
pub struct Fetch {
    pub subject: Subject,
    /// The configuration of stores; needed for a store and for what is encrypted.
    pub stores: Option<PathBuf>,
    /// What is there is replaced.
    pub into: PathBuf,
    pub patience: Patience,
}

/// What was fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fetched {
    /// Of the stored bytes.
    pub digest: Digest,
    pub size_bytes: u64,
    /// Of the file that was written.
    pub plain_digest: Digest,
    pub plain_size_bytes: u64,
}

/// Fetches. Durable on return; a kill leaves nothing.
///
/// Errors: kind `corrupt` if the stored bytes are not those of the name, `invalid` without the right key.
pub fn get(fetch: &Fetch, progress: &Progress) -> Result<Fetched, Failed> {
    let access = Access {
        stores: fetch.stores.as_deref(),
        patience: fetch.patience,
    };
    let (path, stored, expected, is_encrypted) = stored(&access, &fetch.subject)?;
    let digest = digest_of(stored.as_ref(), progress)?;
    expected.map_or(Ok(()), |expected| expect(path, expected, digest))?;
    let plain = match is_encrypted {
        Some(true) => access.decrypted(path, &stored)?,
        Some(false) => stored.clone(),
        None => access.opened(path, &stored)?,
    };
    let plain_digest = write(plain.as_ref(), &fetch.into, progress)?;
    Ok(Fetched {
        digest,
        size_bytes: stored.len_bytes(),
        plain_digest,
        plain_size_bytes: plain.len_bytes(),
    })
}

/// Stored bytes, their name if it is known, and whether they are encrypted; none where only they themselves can tell.
type Stored<'a> = (&'a Path, Arc<dyn Blob>, Option<Digest>, Option<bool>);

fn stored<'a>(access: &Access<'_>, subject: &'a Subject) -> Result<Stored<'a>, Failed> {
    let path = match subject {
        Subject::File { path, digest } => return Ok((path, Arc::new(FileBlob::open(path)?), *digest, None)),
        Subject::Descriptor(path) => path,
    };
    let descriptor = Descriptor::read(path)?;
    let stored: Arc<dyn Blob> = match &descriptor.source {
        Source::File { path } => Arc::new(FileBlob::open(path)?),
        _ => access.remote(path, &descriptor)?.0,
    };
    Ok((
        path,
        stored,
        Some(descriptor.digest),
        Some(descriptor.encryption.is_some()),
    ))
}

fn write(plain: &dyn Blob, into: &Path, progress: &Progress) -> Result<Digest, Failed> {
    let (folder, name) = split(into)?;
    let mut file = NewFile::with_mode(folder, MODE)?;
    file.reserve(plain.len_bytes())?;
    let mut hasher = Hasher::new();
    read_whole(plain, progress, |part| {
        hasher.update(part);
        file.write_all(part).at(into, "write")
    })?;
    file.replace(name)?;
    Ok(hasher.finish())
}
