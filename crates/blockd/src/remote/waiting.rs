//! How many threads of a mount may be inside handlers of exports with remote layers.
//!
//! A store that is silent holds every reader of its blobs for as long as their patience lasts. The limit per export does
//! not help when many exports have their layers there; so beyond this limit such requests are kept as bytes, and the
//! threads that are left always serve the exports whose layers are local.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::export::Export;
use crate::limits::{REMOTE_RUNNING_MAX, REMOTE_WAITING_BYTES_MAX};

/// A request that waits for its turn; it is in flight already, so that it can be abandoned.
#[derive(Debug)]
pub struct Kept {
    pub export: Arc<Export>,
    pub request: Vec<u8>,
    pub since: Instant,
}

#[derive(Debug, Default)]
pub struct Waiting {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    running: usize,
    kept: VecDeque<Kept>,
    kept_bytes: usize,
}

impl Waiting {
    /// True: the caller goes on and calls `leave` at its end. False: the request was kept for another thread.
    pub fn enter(&self, export: &Arc<Export>, request: &[u8]) -> bool {
        let mut inner = self.lock();
        if inner.running < REMOTE_RUNNING_MAX || inner.kept_bytes + request.len() > REMOTE_WAITING_BYTES_MAX {
            inner.running += 1;
            return true;
        }
        inner.kept_bytes += request.len();
        inner.kept.push_back(Kept {
            export: export.clone(),
            request: request.to_vec(),
            since: Instant::now(),
        });
        false
    }

    /// A request that the caller goes on with in place of the one it has finished.
    pub fn leave(&self) -> Option<Kept> {
        let mut inner = self.lock();
        let next = inner.kept.pop_front();
        match &next {
            Some(kept) => inner.kept_bytes -= kept.request.len(),
            None => inner.running -= 1,
        }
        next
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::Record;

    #[test]
    fn requests_over_the_limit_are_kept_in_order_and_taken_over() {
        let record: Record = serde_json::from_str(
            r#"{"name":"d","kind":"disk","inode":1,"size_bytes":512,"layers":["/l/a.blob"],"upper":null,
                "abandoned":false,"sealing":null,"last_seal":null}"#,
        )
        .unwrap();
        let export = Arc::new(Export::new(record, None));
        assert!(export.is_remote);
        let waiting = Waiting::default();
        for _ in 0..REMOTE_RUNNING_MAX {
            assert!(waiting.enter(&export, b"r"));
        }
        assert!(!waiting.enter(&export, b"first") && !waiting.enter(&export, b"second"));
        assert!(
            waiting.enter(&export, &vec![0; REMOTE_WAITING_BYTES_MAX]),
            "memory has a limit too"
        );
        assert_eq!(waiting.leave().unwrap().request, b"first");
        assert_eq!(waiting.leave().unwrap().request, b"second");
        for _ in 0..=REMOTE_RUNNING_MAX {
            assert!(waiting.leave().is_none());
        }
        assert_eq!(waiting.lock().running, 0);
    }
}
