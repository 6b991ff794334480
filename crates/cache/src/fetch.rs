//! Getting blocks from the store: attempts, verification, storing.

use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use crate::blob::CachedBlob;
use crate::claim::Claim;
use crate::error::CacheError;
use crate::file_ops::write_all;
use crate::limits::{
    ATTEMPT_TIMEOUT, ATTEMPT_TIMEOUT_MIN, BACKOFF_FIRST, BACKOFF_MAX, CANCEL_LOOK, LINE_BYTES_PER_S_MIN, REFUSALS_MAX,
    WRONG_BYTES_MAX,
};
use crate::metrics::add;
use crate::origin::{OriginError, OriginErrorKind};
use crate::patience::Patience;

/// One fetch as its caller wants it, and what became of it.
#[derive(Debug)]
pub(crate) struct Download<'a> {
    patience: &'a Patience,
    /// None: as many as the patience lasts.
    attempts_max: Option<u32>,
    begun: Instant,
    pub failed_attempts: u32,
    refusals: u32,
}

impl<'a> Download<'a> {
    pub fn new(patience: &'a Patience, attempts_max: Option<u32>) -> Download<'a> {
        Download {
            patience,
            attempts_max,
            begun: Instant::now(),
            failed_attempts: 0,
            refusals: 0,
        }
    }

    /// Makes attempts until one succeeds or no more is due; returns the last one's error. `length` bytes are expected.
    fn attempt<T>(
        &mut self,
        length: u64,
        mut work: impl FnMut(Duration) -> Result<T, OriginError>,
    ) -> Result<T, OriginError> {
        loop {
            let time = timeout(length).min(self.patience.left()).max(ATTEMPT_TIMEOUT_MIN);
            match work(time) {
                Err(error) if self.goes_on(error.kind) => {}
                outcome => return outcome,
            }
        }
    }

    /// Waits before the next attempt; false where there is none.
    fn goes_on(&mut self, kind: OriginErrorKind) -> bool {
        self.failed_attempts += 1;
        self.refusals += u32::from(kind == OriginErrorKind::Permanent);
        let enough = self.attempts_max.is_some_and(|max| self.failed_attempts >= max);
        if enough || self.refusals >= REFUSALS_MAX {
            return false;
        }
        let pause = backoff(self.failed_attempts);
        if pause >= self.patience.left() {
            return false;
        }
        let end = Instant::now() + pause;
        while !self.patience.is_cancelled() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(CANCEL_LOOK));
        }
        false
    }

    fn gave_up(&self, blob: &CachedBlob, range: &Range<u64>, source: OriginError) -> CacheError {
        let (digest, offset, end) = (blob.spec.digest.clone(), range.start, range.end);
        if self.patience.is_cancelled() {
            return CacheError::Cancelled { digest };
        }
        match source.kind {
            OriginErrorKind::Permanent => CacheError::Refused {
                digest,
                offset,
                end,
                source,
            },
            OriginErrorKind::Transient => {
                let waited_s = self.begun.elapsed().as_secs();
                CacheError::TimedOut {
                    digest,
                    offset,
                    end,
                    waited_s,
                    source,
                }
            }
        }
    }
}

/// Asks a store for something of about `length` bytes that is not a blob's block, in the way in which blocks are asked
/// for: again and again, for as long as the thread's patience lasts. `work` makes one attempt within the given time.
///
/// Errors: that of the last attempt.
pub fn attempt_until<T>(length: u64, work: impl FnMut(Duration) -> Result<T, OriginError>) -> Result<T, OriginError> {
    Download::new(&Patience::current(), None).attempt(length, work)
}

/// Between half and the whole of a time that doubles.
fn backoff(failed: u32) -> Duration {
    let whole = BACKOFF_FIRST
        .saturating_mul(2u32.saturating_pow(failed.saturating_sub(1).min(16)))
        .min(BACKOFF_MAX);
    let half = whole / 2;
    let span = u64::try_from(half.as_nanos()).unwrap_or(u64::MAX).max(1);
    half + Duration::from_nanos(random() % span)
}

/// Enough randomness to keep readers apart: the keys of the standard library's hash maps.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

fn timeout(length: u64) -> Duration {
    ATTEMPT_TIMEOUT + Duration::from_millis(length * 1000 / LINE_BYTES_PER_S_MIN)
}

impl CachedBlob {
    /// Fetches, verifies and stores claimed blocks; returns their bytes, also where no room was left to store them.
    /// Blocks that did verify are stored even if others did not.
    pub(crate) fn fetch(&self, claim: &Claim<'_>, download: &mut Download<'_>) -> Result<Bytes, CacheError> {
        let mut bytes = self.download(&claim.blocks, download)?;
        let wrong: Vec<u64> = self.wrong_ones(&claim.blocks, &bytes);
        if wrong.is_empty() {
            self.store(&claim.blocks, &bytes);
            return Ok(bytes);
        }
        let mut own = BytesMut::from(bytes.as_ref());
        let mut failure = None;
        for block in wrong {
            match self.fetch_again(block, download) {
                Ok(right) => own[self.place(&claim.blocks, block)].copy_from_slice(&right),
                Err(error) => failure = Some(error),
            }
        }
        bytes = own.freeze();
        for block in claim.blocks.clone() {
            let part = &bytes[self.place(&claim.blocks, block)];
            if self.is_right(block, part) {
                self.store(&(block..block + 1), part);
            }
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(bytes),
        }
    }

    /// One block alone, after its bytes came wrong once.
    fn fetch_again(&self, block: u64, download: &mut Download<'_>) -> Result<Bytes, CacheError> {
        for _ in 1..WRONG_BYTES_MAX {
            let bytes = self.download(&(block..block + 1), download)?;
            if self.is_right(block, &bytes) {
                return Ok(bytes);
            }
            add(&self.shared.metrics.verify_failures, 1);
        }
        Err(CacheError::WrongBytes {
            digest: self.spec.digest.clone(),
            block,
            times: WRONG_BYTES_MAX,
        })
    }

    /// The bytes of some blocks as the store gives them, after as many attempts as it takes.
    fn download(&self, blocks: &Range<u64>, download: &mut Download<'_>) -> Result<Bytes, CacheError> {
        let range = blocks.start * self.geometry().block_bytes..self.geometry().end_of(blocks.end - 1);
        let length = range.end - range.start;
        let outcome = download.attempt(length, |time| match self.origin.read(range.start, length, time) {
            Ok(bytes) if bytes.len() as u64 != length => Err(OriginError {
                kind: OriginErrorKind::Transient,
                source: format!("{} bytes came instead of {length}", bytes.len()).into(),
            }),
            answer => answer,
        });
        match outcome {
            Ok(bytes) => {
                add(&self.shared.metrics.bytes_from_store, length);
                Ok(bytes)
            }
            Err(error) => Err(download.gave_up(self, &range, error)),
        }
    }

    fn wrong_ones(&self, blocks: &Range<u64>, bytes: &[u8]) -> Vec<u64> {
        let wrong = |block: &u64| !self.is_right(*block, &bytes[self.place(blocks, *block)]);
        let wrong: Vec<u64> = blocks.clone().filter(wrong).collect();
        add(&self.shared.metrics.verify_failures, wrong.len() as u64);
        wrong
    }

    /// Where a block is in the bytes of some blocks.
    fn place(&self, blocks: &Range<u64>, block: u64) -> Range<usize> {
        let geometry = self.geometry();
        let start = blocks.start * geometry.block_bytes;
        (block * geometry.block_bytes - start) as usize..(geometry.end_of(block) - start) as usize
    }

    /// Whether these are the bytes of that block. Without a list of digests that is for the format to say.
    pub(crate) fn is_right(&self, block: u64, bytes: &[u8]) -> bool {
        self.spec.blocks.as_ref().is_none_or(|list| list.is_right(block, bytes))
    }

    /// Writes claimed blocks to the data file, then their bits. Without room, or on a disk that fails, nothing is stored
    /// and nobody is worse off than before.
    fn store(&self, blocks: &Range<u64>, bytes: &[u8]) {
        let length = bytes.len() as u64;
        if !self.shared.take_room(length) {
            return;
        }
        let ops = self.shared.ops.as_ref();
        let offset = blocks.start * self.geometry().block_bytes;
        if write_all(ops, &self.files.data, bytes, offset).is_err() {
            // No bit was set, so nobody is in these blocks.
            let _ = self.entry.punch(ops, &self.files, blocks);
            return self.shared.give_back(length);
        }
        if self.entry.set_present(ops, &self.files, blocks).is_err() {
            // Not punched: a reader may have seen one of the bits that were set. What is left is waste.
            for block in blocks.clone() {
                self.entry.forget(ops, &self.files, block);
            }
            self.shared.give_back(length);
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_differ() {
        for failed in 1..40 {
            let pause = backoff(failed);
            assert!(pause >= BACKOFF_FIRST / 2 && pause <= BACKOFF_MAX, "{pause:?}");
        }
        assert!(backoff(30) >= BACKOFF_MAX / 2);
        let pauses: std::collections::HashSet<_> = (0..20).map(|_| backoff(5)).collect();
        assert!(pauses.len() > 1);
    }
}
