//! The block list of a blob: from the cache's folder, or from the store once.

use std::sync::Arc;

use aenv_cache::{BlockCheck, Cache, attempt_until};
use aenv_store::{BlockList, Descriptor, Digest, Source, Stores};

use super::RemoteError;
use super::origin::{Listed, origin_error};

/// None for a blob that has none.
pub fn of(descriptor: &Descriptor, cache: &Cache, stores: &Stores) -> Result<Option<Arc<dyn BlockCheck>>, RemoteError> {
    let (Some(source), Some(digest)) = (&descriptor.blocks, &descriptor.blocks_digest) else {
        return Ok(None);
    };
    let name = descriptor.digest.to_string();
    let encoded = match cache.kept_list(&name, &digest.0) {
        Some(kept) => kept,
        None => {
            let fetched = fetch(source, digest, descriptor.size_bytes, stores)?;
            cache.keep_list(&name, &fetched);
            fetched
        }
    };
    let list = BlockList::decode(&encoded)?;
    if list.size_bytes() != descriptor.size_bytes {
        return Err(RemoteError::ListOfAnother {
            listed: list.size_bytes(),
            size_bytes: descriptor.size_bytes,
        });
    }
    Ok(Some(Arc::new(Listed(list))))
}

/// Twice where the bytes are not those that the descriptor names: once may be an accident on the way.
fn fetch(source: &Source, digest: &Digest, size_bytes: u64, stores: &Stores) -> Result<Vec<u8>, RemoteError> {
    let ranged = stores.ranged(source)?;
    let length = BlockList::encoded_bytes(size_bytes);
    for _ in 0..2 {
        let read = attempt_until(length, |timeout| {
            ranged.read_whole(length, timeout).map_err(origin_error)
        });
        let bytes = read.map_err(RemoteError::List)?;
        if Digest::of(&bytes) == *digest {
            return Ok(bytes.to_vec());
        }
    }
    Err(RemoteError::OtherList)
}
