//! What the control socket asks about traces, prefetches, fills and the cache.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use aenv_cache::{CachedBlob, Patience, Trace, TraceError, with_patience};
use aenv_store::{Descriptor, Source};
use aenv_wire::block::{
    CacheEvict, CacheEvictOk, CacheOk, CachedBlobInfo, Empty, ErrorKind, Fill, Prefetch, PrefetchOk, TraceFinish,
    TraceFinishOk, TraceStart,
};

use super::{Remote, RemoteError};
use crate::control::{Refusal, chain};
use crate::export::{check_name, check_path};
use crate::limits::{BLOBS_LISTED_MAX, OPERATION_OUTAGE, PREPARE_THREADS_MAX};

impl Remote {
    pub fn trace_start(&self, asked: TraceStart) -> Result<Empty, Refusal> {
        check_name(&asked.trace)?;
        let digests = asked.paths.iter().map(|path| Ok(descriptor(path)?.digest.to_string()));
        let digests = digests.collect::<Result<HashSet<String>, Refusal>>()?;
        let only = (!digests.is_empty()).then_some(digests);
        match self.cache() {
            Ok(cache) => cache.trace_start(&asked.trace, only)?,
            // There are no remote blobs, so nothing will be read: the trace is empty.
            Err(RemoteError::NotConfigured) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Empty {})
    }

    pub fn trace_finish(&self, asked: &TraceFinish) -> Result<TraceFinishOk, Refusal> {
        check_path(&asked.into)?;
        let trace = self.cache()?.trace_finish(&asked.trace)?;
        let into = Path::new(&asked.into);
        crate::files::write_atomically(into, &trace.to_json())
            .map_err(|error| Refusal::io(&format!("cannot write {}", into.display()), &error))?;
        Ok(TraceFinishOk { blocks: trace.blocks() })
    }

    pub fn prefetch(&self, asked: &Prefetch) -> Result<PrefetchOk, Refusal> {
        let cache = self.cache()?;
        let json =
            std::fs::read(&asked.path).map_err(|error| Refusal::io(&format!("cannot read {}", asked.path), &error))?;
        let trace = Trace::parse(&json)?;
        let traced: HashSet<&str> = trace.digests().collect();
        let blobs = self.prepare(&asked.blobs, |digest| traced.contains(digest))?;
        let find = |digest: &str| {
            let named = blobs.iter().find(|blob| blob.digest() == digest).cloned();
            named.or_else(|| cache.open_blob(digest))
        };
        cache.prefetch(&trace, find);
        let number = self.prefetches.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(PrefetchOk {
            job: format!("prefetch-{number}"),
        })
    }

    pub fn fill(&self, asked: &Fill) -> Result<Empty, Refusal> {
        let cache = self.cache()?;
        let blobs = match asked.bytes_per_s_max {
            0 => Vec::new(),
            _ => self.prepare(&asked.paths, |_| true)?,
        };
        cache.fill(blobs, asked.bytes_per_s_max);
        Ok(Empty {})
    }

    pub fn state(&self) -> CacheOk {
        let Ok(cache) = self.cache() else {
            return CacheOk::default();
        };
        let state = cache.state();
        let blobs_total = state.blobs.len() as u64;
        let mut blobs: Vec<CachedBlobInfo> = state
            .blobs
            .into_iter()
            .map(|blob| CachedBlobInfo {
                digest: blob.digest,
                cached_bytes: blob.cached_bytes,
                size_bytes: blob.size_bytes,
                in_use: blob.in_use,
            })
            .collect();
        blobs.sort_by_key(|blob| (!blob.in_use, std::cmp::Reverse(blob.cached_bytes)));
        blobs.truncate(BLOBS_LISTED_MAX);
        let counts = state.counts;
        CacheOk {
            size_bytes: state.size_bytes,
            size_bytes_max: state.size_bytes_max,
            blobs,
            blobs_total,
            hits: counts.hits,
            misses: counts.misses,
            bytes_from_store: counts.bytes_from_store,
            bytes_from_cache: counts.bytes_from_cache,
            stalls: counts.stalls,
            stall_us: counts.stall_us,
            verify_failures: counts.verify_failures,
            evicted_bytes: counts.evicted_bytes,
        }
    }

    pub fn evict(&self, asked: &CacheEvict) -> Result<CacheEvictOk, Refusal> {
        let freed_bytes = match (asked.bytes, &asked.digest) {
            (Some(bytes), None) => self.cache()?.evict(bytes),
            (None, Some(digest)) => self.cache()?.evict_blob(digest),
            _ => return Err(Refusal::new(ErrorKind::Invalid, "give either bytes or a digest")),
        };
        Ok(CacheEvictOk { freed_bytes })
    }

    /// After a layer turned out to be damaged: drops the cached blocks of those blobs that no list of digests verifies,
    /// so that they are fetched again. Returns whether there were any.
    pub fn distrust(&self, layers: &[String]) -> bool {
        let Ok(cache) = self.cache() else { return false };
        let mut any = false;
        for path in layers.iter().filter(|path| super::names_a_blob(path)) {
            let Ok(descriptor) = Descriptor::read(Path::new(path)) else {
                continue;
            };
            let digest = descriptor.digest.to_string();
            if cache.open_blob(&digest).is_some_and(|blob| !blob.is_verified()) {
                any |= cache.evict_blob(&digest) > 0;
            }
        }
        any
    }

    /// The blobs of descriptors, those that are in stores and wanted. One that cannot be opened is told and left out:
    /// what is prepared here is a help and no promise.
    fn prepare(&self, paths: &[String], wanted: impl Fn(&str) -> bool + Sync) -> Result<Vec<Arc<CachedBlob>>, Refusal> {
        paths.iter().try_for_each(|path| check_path(path))?;
        let (rest, blobs) = (Mutex::new(paths.iter()), Mutex::new(Vec::new()));
        let next = || rest.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while let Some(path) = next() {
                let patience = Patience::lasting(OPERATION_OUTAGE, None);
                match with_patience(patience, || self.blob_of(path, &wanted)) {
                    Ok(blob) => blobs.lock().unwrap_or_else(PoisonError::into_inner).extend(blob),
                    Err(error) => say!("aenv-blockd: {path} is left out: {}", chain(&error)),
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..paths.len().min(PREPARE_THREADS_MAX) {
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        Ok(blobs.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn blob_of(&self, path: &str, wanted: impl Fn(&str) -> bool) -> Result<Option<Arc<CachedBlob>>, RemoteError> {
        let path = Path::new(path);
        let descriptor = Descriptor::read(path)?;
        let remote = !matches!(descriptor.source, Source::File { .. });
        match remote && wanted(&descriptor.digest.to_string()) {
            true => self.cached(path, &descriptor).map(Some),
            false => Ok(None),
        }
    }
}

fn descriptor(path: &str) -> Result<Descriptor, Refusal> {
    check_path(path)?;
    Descriptor::read(Path::new(path)).map_err(|error| RemoteError::from(error).into())
}

impl From<TraceError> for Refusal {
    fn from(error: TraceError) -> Refusal {
        let kind = match &error {
            TraceError::NotFound(_) => ErrorKind::NotFound,
            TraceError::TooMany => ErrorKind::Busy,
            _ => ErrorKind::Invalid,
        };
        Refusal::new(kind, chain(&error))
    }
}
