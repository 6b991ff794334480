//! Says once that something is gone and once that it is back, instead of once per request.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::sandbox::chain;

/// Whether one peer is known to be away.
#[derive(Debug)]
pub struct Outage {
    peer: &'static str,
    is_away: AtomicBool,
}

impl Outage {
    pub fn of(peer: &'static str) -> Self {
        Self {
            peer,
            is_away: AtomicBool::new(false),
        }
    }

    pub fn begin(&self, error: &dyn std::error::Error) {
        if !self.is_away.swap(true, Ordering::Relaxed) {
            say!("proxy: {} cannot be reached: {}", self.peer, chain(error));
        }
    }

    pub fn end(&self) {
        // A load is cheaper than a swap, and this runs for every request.
        if self.is_away.load(Ordering::Relaxed) && self.is_away.swap(false, Ordering::Relaxed) {
            say!("proxy: {} is back", self.peer);
        }
    }
}
