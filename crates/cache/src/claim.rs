//! Who works on a block: one at a time, whatever the work is (fetching, verifying again, evicting, punching).
//!
//! A claim is given back when it is dropped, also by a panic, and everybody who waits for one of its blocks looks again:
//! the block is there now, or it can be claimed by the next one.

use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;

use crate::entry::Entry;

#[derive(Debug)]
pub(crate) struct Claim<'a> {
    entry: &'a Entry,
    pub blocks: Range<u64>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.entry.release(&self.blocks);
    }
}

/// How the first of some blocks is, and what can be done about it.
#[derive(Debug)]
pub(crate) enum Look<'a> {
    Present,
    /// Another works on it.
    Busy,
    /// Blocks from the first on that may be in the data file; now ours.
    Suspect(Claim<'a>),
    /// Blocks from the first on that are not; now ours.
    Missing(Claim<'a>),
}

impl Entry {
    /// Looks at the first block; where there is work to do, claims it and as many of the following ones as are alike.
    pub fn look(&self, blocks: &Range<u64>) -> Look<'_> {
        let mut claims = self.claims();
        let first = blocks.start;
        if claims.contains(&first) {
            return Look::Busy;
        }
        if self.is_present(first) {
            return Look::Present;
        }
        let suspect = self.is_suspect(first);
        let alike =
            |block: &u64| !claims.contains(block) && !self.is_present(*block) && self.is_suspect(*block) == suspect;
        let end = first + blocks.clone().take_while(alike).count() as u64;
        claims.extend(first..end);
        let claim = Claim {
            entry: self,
            blocks: first..end,
        };
        match suspect {
            true => Look::Suspect(claim),
            false => Look::Missing(claim),
        }
    }

    /// Waits until nobody works on the block, or the time is over.
    pub fn wait_for(&self, block: u64, time: Duration) {
        let claims = self.claims();
        let waited = self
            .released()
            .wait_timeout_while(claims, time, |claims| claims.contains(&block));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
