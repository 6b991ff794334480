//! A blob's way into a bucket: its block list, then its bytes, then the look whether it is there.
//!
//! ```text
//! lock the journal ─> there already? ─> block list ─> one PUT                    ─┐
//!                          │                          or parts, complete (a few  ─┼─> size and tag right? ─> done
//!                          └──────────────────────>  times, if the store forgets) ┘
//! ```
//!
//! The object appears whole: a PUT and the completion of an upload are atomic, and nothing refers to the block list
//! before the object's record does.

use std::path::Path;
use std::sync::Mutex;

use aenv_store::{Bucket, Digest, Failure, Hasher, ObjectInfo, StoreError, StoreErrorKind, UploadId};
use bytes::Bytes;

use crate::error::Failed;
use crate::journal::{Identity, Journal};
use crate::parts::Parts;
use crate::patience::Patience;
use crate::progress::Progress;
use crate::recipe::{Broken, Recipe};
use crate::sums::Summed;

/// The store's limit of parts in one upload.
const PARTS_MAX: u64 = 10_000;
/// Uploads begun anew because the store does not know the last one or its parts any more.
const ROUNDS_MAX: usize = 3;
/// Looks at an object whose size or tag is not what was stored, since a store may answer late news.
const LOOKS_MAX: usize = 3;

/// How to upload.
#[derive(Debug, Clone)]
pub(crate) struct Options<'a> {
    pub journal_dir: Option<&'a Path>,
    pub part_bytes: u64,
    pub parallel: usize,
    pub patience: Patience,
}

/// One blob on its way into one bucket.
pub(crate) struct Upload<'a> {
    pub bucket: &'a Bucket,
    pub recipe: &'a Recipe,
    pub sums: &'a Summed,
    pub key: &'a str,
    /// Key and bytes of the block list.
    pub blocks: Option<(String, Bytes)>,
    pub options: Options<'a>,
    pub progress: &'a Progress,
}

impl Upload<'_> {
    /// Stores the blob; tells whether it was there already.
    pub fn run(&self) -> Result<bool, Failed> {
        let patience = &self.options.patience;
        let mut journal = Journal::open(self.options.journal_dir, self.sums.digest, patience.deadline)?;
        let there = self.is_there(self.key, self.sums.size_bytes)?;
        if let Some((key, bytes)) = &self.blocks
            && !(there && self.is_there(key, bytes.len() as u64)?)
        {
            self.put(key, bytes)?;
        }
        if !there {
            let etag = match self.sums.size_bytes <= self.part_bytes() {
                true => self.put_whole()?,
                false => self.put_parts(&mut journal)?,
            };
            self.confirm(etag)?;
        }
        journal.finish();
        Ok(there)
    }

    /// Large enough that the number of parts is allowed.
    fn part_bytes(&self) -> u64 {
        let wanted = self.options.part_bytes;
        match self.sums.size_bytes.div_ceil(wanted) <= PARTS_MAX {
            true => wanted,
            false => self.sums.size_bytes.div_ceil(PARTS_MAX).next_multiple_of(1 << 20),
        }
    }

    fn look(&self, key: &str) -> Result<Option<ObjectInfo>, StoreError> {
        let patience = &self.options.patience;
        match patience.retry(|| self.bucket.head(key, patience.attempt)) {
            Ok(info) => Ok(Some(info)),
            Err(error) if error.kind() == StoreErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn is_there(&self, key: &str, size_bytes: u64) -> Result<bool, StoreError> {
        Ok(self.look(key)?.is_some_and(|info| info.size_bytes == size_bytes))
    }

    fn put(&self, key: &str, bytes: &Bytes) -> Result<Option<String>, StoreError> {
        let patience = &self.options.patience;
        let timeout = patience.attempt_for(bytes.len() as u64);
        patience.retry(|| self.bucket.put(key, bytes.clone(), false, timeout))
    }

    fn put_whole(&self) -> Result<Option<String>, Failed> {
        let mut bytes = Vec::with_capacity(self.sums.size_bytes as usize);
        let made = self.recipe.produce(&mut bytes, &mut |_| (), self.progress);
        made.map_err(|broken| self.failed(broken))?;
        if Digest::of(&bytes) != self.sums.digest {
            return Err(self.recipe.changed());
        }
        Ok(self.put(self.key, &bytes.into())?)
    }

    /// Sends the blob in parts and completes it; its tag, if the store told it.
    fn put_parts(&self, journal: &mut Journal) -> Result<Option<String>, Failed> {
        let identity = Identity {
            store: self.bucket.name().to_owned(),
            key: self.key.to_owned(),
            digest: self.sums.digest,
            size_bytes: self.sums.size_bytes,
            part_bytes: self.part_bytes(),
        };
        if let Some((old, upload)) = journal.stale(&identity).filter(|(old, _)| old.store == identity.store) {
            self.give_up(&old.key, &upload);
        }
        for _ in 0..ROUNDS_MAX {
            let upload = self.begin(journal, &identity)?;
            match self.round(journal, &identity, &upload) {
                Err(Failed::Store(error)) if is_gone(&error) => {
                    // A completion whose answer was lost looks the same.
                    if self.is_there(self.key, self.sums.size_bytes)? {
                        return Ok(None);
                    }
                    journal.forget()?;
                }
                Err(Failed::Store(error)) if is_refused(&error) => {
                    self.give_up(self.key, &upload);
                    journal.forget()?;
                }
                outcome => return outcome,
            }
        }
        Err(Failed::Forgotten {
            key: self.key.to_owned(),
            rounds: ROUNDS_MAX,
        })
    }

    fn begin(&self, journal: &mut Journal, identity: &Identity) -> Result<UploadId, Failed> {
        if let Some(upload) = journal.upload(identity) {
            return Ok(upload);
        }
        let patience = &self.options.patience;
        let upload = patience.retry(|| self.bucket.create_upload(self.key, patience.attempt))?;
        journal.begin(identity, &upload)?;
        Ok(upload)
    }

    /// One try of one upload, to its end; the object's tag, if the store told it.
    fn round(&self, journal: &mut Journal, identity: &Identity, upload: &UploadId) -> Result<Option<String>, Failed> {
        let count = self.send_all(journal, identity.part_bytes, upload)?;
        let tags = (0..count)
            .filter_map(|part| journal.part(part))
            .map(|sent| sent.tag.clone());
        let tags: Vec<String> = tags.collect();
        let patience = &self.options.patience;
        // A store puts thousands of parts together in this one request.
        let timeout = patience.attempt * 4;
        let complete = || self.bucket.complete(self.key, upload, tags.clone(), timeout);
        Ok(patience.retry(complete)?)
    }

    /// Sends what the journal does not have; the number of parts.
    fn send_all(&self, journal: &mut Journal, part_bytes: u64, upload: &UploadId) -> Result<usize, Failed> {
        let parts = Parts {
            bucket: self.bucket,
            key: self.key,
            upload,
            // At most a gibibyte, or a ten-thousandth of a blob.
            part_bytes: part_bytes as usize,
            parallel: self.options.parallel,
            patience: &self.options.patience,
            progress: self.progress,
            journal: Mutex::new(journal),
            failure: Mutex::default(),
        };
        let mut hasher = Hasher::new();
        let count = parts.send(|sink| {
            let mut tee = Tee {
                sink,
                hasher: &mut hasher,
            };
            self.recipe.produce(&mut tee, &mut |_| (), &self.silent())
        })?;
        match hasher.finish() == self.sums.digest {
            true => Ok(count),
            false => Err(self.recipe.changed()),
        }
    }

    /// What is sent is counted, not what is read for it.
    fn silent(&self) -> Progress {
        Progress::new(std::io::sink())
    }

    /// An upload that is left open costs its owner money; the store's own rules end what cannot be ended here.
    fn give_up(&self, key: &str, upload: &UploadId) {
        let _ = self.bucket.abort(key, upload, self.options.patience.attempt);
    }

    /// Whether the store has what was sent: size and tag.
    fn confirm(&self, etag: Option<String>) -> Result<(), Failed> {
        let mut found = None;
        for look in 0..LOOKS_MAX {
            if look > 0 {
                std::thread::sleep(self.options.patience.pause_first);
            }
            found = self.look(self.key)?;
            if found
                .as_ref()
                .is_some_and(|info| fits(info, self.sums.size_bytes, etag.as_deref()))
            {
                return Ok(());
            }
        }
        Err(Failed::NotStored {
            key: self.key.to_owned(),
            size_bytes: self.sums.size_bytes,
            etag,
            found: found.map_or("nothing".into(), |info| {
                format!("{} bytes with the tag {:?}", info.size_bytes, info.etag)
            }),
        })
    }

    fn failed(&self, broken: Broken) -> Failed {
        match broken {
            Broken::Source(failed) => failed,
            Broken::Sink(source) => Failed::File {
                path: self.recipe.path.clone(),
                step: "make the stored bytes",
                source,
            },
        }
    }
}

fn fits(info: &ObjectInfo, size_bytes: u64, etag: Option<&str>) -> bool {
    let same = match (&info.etag, etag) {
        (Some(found), Some(told)) => found.trim_matches('"') == told.trim_matches('"'),
        _ => true,
    };
    info.size_bytes == size_bytes && same
}

/// The store does not know the upload.
fn is_gone(error: &StoreError) -> bool {
    error.kind() == StoreErrorKind::NotFound
}

/// The store knows the upload, but not with these parts.
fn is_refused(error: &StoreError) -> bool {
    const CODES: [&str; 3] = ["InvalidPart", "InvalidPartOrder", "EntityTooSmall"];
    matches!(error.failure(), Failure::Status { code: Some(code), .. } if CODES.contains(&code.as_str()))
}

/// Hashes what passes.
struct Tee<'a> {
    sink: &'a mut dyn std::io::Write,
    hasher: &'a mut Hasher,
}

impl std::io::Write for Tee<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.sink.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.sink.flush()
    }
}
