//! Reading a cached blob.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use aenv_layers::{Blob, Damage};

use crate::cache::BlobSpec;
use crate::claim::{Claim, Look};
use crate::entry::{Entry, Files};
use crate::error::CacheError;
use crate::fetch::Download;
use crate::limits::{CANCEL_LOOK, FETCH_BYTES_MAX, STALL};
use crate::map_file::Geometry;
use crate::metrics::add;
use crate::origin::Origin;
use crate::patience::Patience;
use crate::read_ahead::ReadAhead;
use crate::shared::Shared;

/// A remote blob, read through the cache. Shared by all who have it open.
#[derive(Debug)]
pub struct CachedBlob {
    pub(crate) shared: Arc<Shared>,
    pub(crate) entry: Arc<Entry>,
    pub(crate) files: Arc<Files>,
    pub(crate) spec: BlobSpec,
    pub(crate) origin: Arc<dyn Origin>,
    pub(crate) read_ahead: ReadAhead,
    /// For pieces of work that wait for a thread and must not keep the blob open.
    pub(crate) me: Weak<CachedBlob>,
}

/// Counts a reader among those that fetch.
struct Foreground<'a>(&'a Shared);

impl<'a> Foreground<'a> {
    fn enter(shared: &'a Shared) -> Foreground<'a> {
        shared.foreground.fetch_add(1, Ordering::Relaxed);
        Foreground(shared)
    }
}

impl Drop for Foreground<'_> {
    fn drop(&mut self) {
        self.0.foreground.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a read had to wait for.
#[derive(Debug, Default)]
struct Waits {
    since: Option<Instant>,
    failed_attempts: u32,
}

impl CachedBlob {
    pub(crate) fn new(
        shared: Arc<Shared>,
        entry: Arc<Entry>,
        files: Arc<Files>,
        spec: BlobSpec,
        origin: Arc<dyn Origin>,
    ) -> Arc<CachedBlob> {
        let read_ahead = ReadAhead::new(entry.geometry);
        Arc::new_cyclic(|me| CachedBlob {
            shared,
            entry,
            files,
            spec,
            origin,
            read_ahead,
            me: me.clone(),
        })
    }

    pub fn digest(&self) -> &str {
        &self.spec.digest
    }

    pub fn size_bytes(&self) -> u64 {
        self.spec.size_bytes
    }

    /// Bytes of it that are cached.
    pub fn cached_bytes(&self) -> u64 {
        self.entry.cached_bytes()
    }

    /// Whether its blocks are verified by a list of digests, and not only by its format.
    pub fn is_verified(&self) -> bool {
        self.spec.blocks.is_some()
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.entry.geometry
    }

    /// Blocks from before the host went down, of a blob that has no digests, may be anything.
    pub(crate) fn drop_what_cannot_be_verified(&self) {
        if self.is_verified() {
            return;
        }
        let all = 0..self.geometry().blocks();
        let mut at = 0;
        while at < all.end {
            match self.entry.look(&(at..all.end)) {
                Look::Suspect(claim) => {
                    self.drop_suspect(&claim.blocks);
                    at = claim.blocks.end;
                }
                Look::Missing(claim) => at = claim.blocks.end,
                Look::Present | Look::Busy => at += 1,
            }
        }
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), CacheError> {
        let mut waits = Waits::default();
        let outcome = self.read_parts(buf, offset, &mut waits);
        if let Some(time) = waits.since.map(|since| since.elapsed())
            && (time >= STALL || waits.failed_attempts > 0)
        {
            self.shared.metrics.stalled(time);
        }
        outcome
    }

    fn read_parts(&self, buf: &mut [u8], offset: u64, waits: &mut Waits) -> Result<(), CacheError> {
        let block_bytes = self.geometry().block_bytes;
        let end = offset + buf.len() as u64;
        let wanted = offset / block_bytes..end.div_ceil(block_bytes);
        self.shared.tracer.note(&self.spec.digest, block_bytes, &wanted);
        let mut patience = None;
        let mut at = offset;
        while at < end {
            let left = at / block_bytes..wanted.end;
            let part = &mut buf[(at - offset) as usize..];
            let read = match self.read_present(part, at, &left) {
                0 => {
                    waits.since.get_or_insert_with(Instant::now);
                    let patience = patience.get_or_insert_with(Patience::current);
                    self.read_absent(part, at, &left, patience, waits)?
                }
                read => read,
            };
            at += read;
        }
        if let Some(ahead) = self.read_ahead.follow(&wanted, waits.since.is_some()) {
            self.shared.read_ahead(self, ahead);
        }
        Ok(())
    }

    /// Reads what is there from `at` on, and returns how much that is.
    fn read_present(&self, part: &mut [u8], at: u64, left: &Range<u64>) -> u64 {
        let _pin = self.entry.pin(left);
        let run = self.entry.present_run(left);
        if run == 0 {
            return 0;
        }
        let blocks = left.start..left.start + run;
        let length = (self.geometry().end_of(blocks.end - 1) - at).min(part.len() as u64);
        if self.files.data.read_exact_at(&mut part[..length as usize], at).is_err() {
            self.forget(&blocks);
            return 0;
        }
        self.entry.touch(&blocks);
        add(&self.shared.metrics.hits, run);
        add(&self.shared.metrics.bytes_from_cache, length);
        length
    }

    /// The local disk does not give these back.
    fn forget(&self, blocks: &Range<u64>) {
        for block in blocks.clone() {
            if self.entry.forget(self.shared.ops.as_ref(), &self.files, block) {
                self.shared.give_back(self.geometry().bytes_of(block));
            }
        }
    }

    /// Gets the first block of `left`, or waits for who does. Returns the bytes read at once: none where the caller must
    /// look again.
    fn read_absent(
        &self,
        part: &mut [u8],
        at: u64,
        left: &Range<u64>,
        patience: &Patience,
        waits: &mut Waits,
    ) -> Result<u64, CacheError> {
        if patience.is_cancelled() {
            return Err(CacheError::Cancelled {
                digest: self.spec.digest.clone(),
            });
        }
        let longest = left.start..left.end.min(left.start + FETCH_BYTES_MAX / self.geometry().block_bytes);
        match self.entry.look(&longest) {
            Look::Present => Ok(0),
            Look::Busy => {
                let time = patience.left();
                if time.is_zero() {
                    let waited_s = waits.since.map_or(0, |since| since.elapsed().as_secs());
                    return Err(CacheError::WaitedForOthers {
                        digest: self.spec.digest.clone(),
                        waited_s,
                    });
                }
                self.entry.wait_for(left.start, time.min(CANCEL_LOOK));
                Ok(0)
            }
            Look::Suspect(claim) => {
                self.examine(&claim);
                Ok(0)
            }
            Look::Missing(claim) => {
                let _foreground = Foreground::enter(&self.shared);
                add(&self.shared.metrics.misses, claim.blocks.end - claim.blocks.start);
                let mut download = Download::new(patience, None);
                let bytes = self.fetch(&claim, &mut download);
                waits.failed_attempts += download.failed_attempts;
                let bytes = bytes?;
                // Not touched: one that is never read again is the first to go, however large a scan it was part of.
                let skipped = (at - claim.blocks.start * self.geometry().block_bytes) as usize;
                let length = (bytes.len() - skipped).min(part.len());
                part[..length].copy_from_slice(&bytes[skipped..skipped + length]);
                Ok(length as u64)
            }
        }
    }

    /// Verifies blocks that were cached before the host went down: they are present now or gone.
    pub(crate) fn examine(&self, claim: &Claim<'_>) {
        let geometry = self.geometry();
        let mut bytes = vec![0; geometry.block_bytes as usize];
        for block in claim.blocks.clone() {
            let bytes = &mut bytes[..geometry.bytes_of(block) as usize];
            let whole = self
                .files
                .data
                .read_exact_at(bytes, block * geometry.block_bytes)
                .is_ok();
            let one = block..block + 1;
            if !(whole && self.is_right(block, bytes)) {
                self.drop_suspect(&one);
            } else if self
                .entry
                .set_present(self.shared.ops.as_ref(), &self.files, &one)
                .is_err()
            {
                // It stays suspect, and this read would look at it for ever.
                self.drop_suspect(&one);
            }
        }
    }

    fn drop_suspect(&self, blocks: &Range<u64>) {
        let ops = self.shared.ops.as_ref();
        // Off the books in memory in any case. On a disk that does not take it the next process examines it again.
        if self.entry.clear_suspect(ops, &self.files, blocks).is_ok() {
            let _ = self.entry.punch(ops, &self.files, blocks);
        }
        let bytes = |block| self.geometry().bytes_of(block);
        self.shared.give_back(blocks.clone().map(bytes).sum());
    }
}

impl Blob for CachedBlob {
    fn len_bytes(&self) -> u64 {
        self.spec.size_bytes
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), aenv_layers::Error> {
        let size = self.spec.size_bytes;
        let end = offset.saturating_add(buf.len() as u64);
        if end > size {
            let offset = offset.max(size);
            let damage = Damage::ShortRead {
                offset: size,
                missing: end - offset.min(size),
            };
            return Err(aenv_layers::Error::Corrupt {
                path: self.spec.path.clone(),
                damage,
            });
        }
        if buf.is_empty() {
            return Ok(());
        }
        self.read(buf, offset).map_err(|source| aenv_layers::Error::Remote {
            path: self.spec.path.clone(),
            source: Box::new(source),
        })
    }

    fn distrust(&self, offset: u64, length: u64) {
        // What a list of digests verified came so from the store, and would come so again.
        if self.is_verified() {
            return;
        }
        let end = offset.saturating_add(length).min(self.spec.size_bytes);
        if offset < end {
            let block_bytes = self.geometry().block_bytes;
            self.forget(&(offset / block_bytes..end.div_ceil(block_bytes)));
        }
    }

    fn will_read(&self, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.spec.size_bytes);
        if offset < end {
            let block_bytes = self.geometry().block_bytes;
            self.shared
                .read_ahead(self, offset / block_bytes..end.div_ceil(block_bytes));
        }
    }
}
