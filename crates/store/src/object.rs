//! An object of an S3 store, read by ranges.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::TryStreamExt;
use object_store::{GetOptions, GetRange, GetResult, ObjectStore};

use crate::bucket::Bucket;
use crate::error::{Failure, StoreError};
use crate::ranged::Ranged;
use crate::stores::Shared;

/// One object, by store and key. The store is looked up at each read: keys that were renewed in the configuration count
/// from the next read on.
#[derive(Debug)]
pub(crate) struct RangedObject {
    shared: Arc<Shared>,
    store: String,
    key: String,
    /// The tag of the object as it was last seen.
    etag: Mutex<Option<String>>,
}

/// What came of a request.
struct Answer {
    /// Bytes that the answer announced.
    announced: u64,
    etag: Option<String>,
    /// None if more were announced than are allowed.
    bytes: Option<Bytes>,
}

impl RangedObject {
    pub fn new(shared: Arc<Shared>, store: &str, key: &str) -> RangedObject {
        RangedObject {
            shared,
            store: store.to_owned(),
            key: key.to_owned(),
            etag: Mutex::default(),
        }
    }

    /// Gets the object, or a part of it; `limit` bytes at most.
    fn get(&self, range: Option<(u64, u64)>, limit: u64, timeout: Duration) -> Result<Bytes, StoreError> {
        let bucket = self.shared.bucket(&self.store)?;
        let path = bucket.path(&self.key)?;
        let options = GetOptions {
            range: range.map(|(offset, length)| GetRange::Bounded(offset..offset.saturating_add(length))),
            ..GetOptions::default()
        };
        let get = async { Answer::take(bucket.s3.get_opts(&path, options).await?, limit).await };
        let answer = bucket.run(&self.key, range, timeout, get)?;
        let fail = |failure| Err(bucket.fail(&self.key, range, failure));
        let Some(bytes) = answer.bytes else {
            let found = answer.announced;
            return fail(Failure::TooLarge { found, limit });
        };
        let expected = range.map_or(answer.announced, |(_, length)| length);
        let found = bytes.len() as u64;
        if found != expected {
            return fail(Failure::Truncated { expected, found });
        }
        self.check_tag(&bucket, range, answer.etag)?;
        Ok(bytes)
    }

    /// The read that sees another tag than the last one fails; those after it go by the new one. Within one read there is
    /// one answer, so its bytes are always of one object.
    fn check_tag(&self, bucket: &Bucket, range: Option<(u64, u64)>, found: Option<String>) -> Result<(), StoreError> {
        let Some(found) = found else {
            return Ok(());
        };
        let mut known = self.etag.lock().unwrap_or_else(PoisonError::into_inner);
        match known.replace(found.clone()) {
            Some(expected) if expected != found => {
                Err(bucket.fail(&self.key, range, Failure::Replaced { expected, found }))
            }
            _ => Ok(()),
        }
    }
}

impl Answer {
    async fn take(found: GetResult, limit: u64) -> object_store::Result<Answer> {
        let announced = found.range.end - found.range.start;
        let etag = found.meta.e_tag.clone();
        let bytes = match announced <= limit {
            true => Some(drain(found, announced).await?),
            false => None,
        };
        Ok(Answer { announced, etag, bytes })
    }
}

/// Reads a body: all that was announced, and enough of what comes beyond to know that it does.
async fn drain(found: GetResult, announced: u64) -> object_store::Result<Bytes> {
    let mut stream = found.into_stream();
    let mut bytes = BytesMut::with_capacity(announced as usize);
    while let Some(piece) = stream.try_next().await? {
        bytes.extend_from_slice(&piece);
        if bytes.len() as u64 > announced {
            break;
        }
    }
    Ok(bytes.freeze())
}

impl Ranged for RangedObject {
    fn read(&self, offset: u64, length: u64, timeout: Duration) -> Result<Bytes, StoreError> {
        match length {
            0 => Ok(Bytes::new()),
            _ => self.get(Some((offset, length)), length, timeout),
        }
    }

    fn read_whole(&self, limit_bytes: u64, timeout: Duration) -> Result<Bytes, StoreError> {
        self.get(None, limit_bytes, timeout)
    }
}
