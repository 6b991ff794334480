//! Requests of one export that were read from the kernel and not answered yet.
//!
//! Owns two promises. A request is answered exactly once, although both its handler and `abandon` may want to: whoever
//! takes it out of the table answers. And one export occupies at most `RUNNING_PER_EXPORT_MAX` threads: further
//! requests are parked as bytes and carried on by the thread that finishes one of the same export.
//!
//! ```text
//!   begin ──> running ──finish──> answered by the handler
//!     │          └────abandon───> answered with EIO; the handler's own result is dropped
//!     └────> parked ──finish of another──> running
//!               └────abandon────> answered with EIO
//! ```

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::limits::{PARKED_BYTES_MAX, RUNNING_PER_EXPORT_MAX};

/// What becomes of a request that arrived.
#[derive(Debug, PartialEq, Eq)]
pub enum Begun {
    /// The caller handles it and calls `finish`.
    Run,
    /// It was kept; another thread will handle it.
    Parked,
    /// The export is abandoned: the caller answers EIO.
    Abandoned,
}

/// What `finish` leaves to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// Whether the request is still waiting for its answer.
    pub wanted: bool,
    /// A parked request, which is running from now on and is the caller's to handle.
    pub next: Option<Parked>,
}

/// A request as bytes, and since when it waits.
#[derive(Debug, PartialEq, Eq)]
pub struct Parked {
    pub request: Vec<u8>,
    pub since: Instant,
}

#[derive(Debug, Default)]
pub struct Flight {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    running: HashSet<u64>,
    /// Threads inside handlers; stays above `running.len()` while handlers of abandoned requests are still blocked.
    threads: usize,
    parked: VecDeque<(u64, Parked)>,
    parked_bytes: usize,
    abandoned: bool,
}

impl Flight {
    pub fn new(abandoned: bool) -> Flight {
        Flight {
            inner: Mutex::new(Inner {
                abandoned,
                ..Inner::default()
            }),
        }
    }

    pub fn begin(&self, unique: u64, request: &[u8]) -> Begun {
        let mut inner = self.lock();
        if inner.abandoned {
            return Begun::Abandoned;
        }
        if inner.threads >= RUNNING_PER_EXPORT_MAX && inner.parked_bytes + request.len() <= PARKED_BYTES_MAX {
            inner.parked_bytes += request.len();
            let parked = Parked {
                request: request.to_vec(),
                since: Instant::now(),
            };
            inner.parked.push_back((unique, parked));
            return Begun::Parked;
        }
        inner.threads += 1;
        inner.running.insert(unique);
        Begun::Run
    }

    pub fn finish(&self, unique: u64) -> Finished {
        let mut inner = self.lock();
        let wanted = inner.running.remove(&unique);
        let next = inner.parked.pop_front();
        match &next {
            Some((unique, parked)) => {
                inner.parked_bytes -= parked.request.len();
                inner.running.insert(*unique);
            }
            None => inner.threads -= 1,
        }
        Finished {
            wanted,
            next: next.map(|(_, parked)| parked),
        }
    }

    /// As `begin`, for a request that occupies no thread: whether it may be handled now. Ended by `finish_without_thread`.
    pub fn begin_without_thread(&self, unique: u64) -> bool {
        let mut inner = self.lock();
        !inner.abandoned && inner.running.insert(unique)
    }

    /// Whether the request is still waiting for its answer.
    pub fn finish_without_thread(&self, unique: u64) -> bool {
        self.lock().running.remove(&unique)
    }

    /// Whether everything is refused; a handler that waits for better times asks it.
    pub fn is_abandoned(&self) -> bool {
        self.lock().abandoned
    }

    /// From now on everything is refused. Returns the requests that waited; the caller answers them.
    pub fn abandon(&self) -> Vec<u64> {
        let mut inner = self.lock();
        inner.abandoned = true;
        inner.parked_bytes = 0;
        let parked = std::mem::take(&mut inner.parked);
        let running = std::mem::take(&mut inner.running);
        running
            .into_iter()
            .chain(parked.into_iter().map(|(unique, _)| unique))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic aborts the process in release builds; in tests the table is still consistent between statements.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finished_request_is_answered_by_its_handler() {
        let flight = Flight::default();
        assert_eq!(flight.begin(1, b"r"), Begun::Run);
        assert_eq!(
            flight.finish(1),
            Finished {
                wanted: true,
                next: None
            }
        );
    }

    #[test]
    fn an_abandoned_request_is_answered_once_and_not_by_its_handler() {
        let flight = Flight::default();
        flight.begin(1, b"r");
        assert_eq!(flight.abandon(), [1]);
        assert!(!flight.finish(1).wanted);
        assert_eq!(flight.begin(2, b"r"), Begun::Abandoned);
        assert!(flight.abandon().is_empty());
    }

    #[test]
    fn requests_without_a_thread_have_no_limit_and_are_abandoned_like_others() {
        let flight = Flight::default();
        let count = 2 * RUNNING_PER_EXPORT_MAX as u64;
        assert!((0..count).all(|unique| flight.begin_without_thread(unique)));
        assert!(flight.finish_without_thread(0));
        assert_eq!(flight.begin(count, b"r"), Begun::Run, "they take no thread's place");
        assert_eq!(flight.abandon().len() as u64, count);
        assert!(!flight.finish_without_thread(1));
        assert!(!flight.begin_without_thread(count + 1));
    }

    #[test]
    fn requests_over_the_thread_limit_wait_and_run_in_order() {
        let flight = Flight::default();
        for unique in 0..RUNNING_PER_EXPORT_MAX as u64 {
            assert_eq!(flight.begin(unique, b"r"), Begun::Run);
        }
        assert_eq!(flight.begin(100, b"first"), Begun::Parked);
        assert_eq!(flight.begin(101, b"second"), Begun::Parked);
        assert_eq!(flight.finish(0).next.unwrap().request, b"first");
        let finished = flight.finish(100);
        assert!(finished.wanted);
        assert_eq!(finished.next.unwrap().request, b"second");
        let mut waiting = flight.abandon();
        waiting.sort_unstable();
        assert_eq!(waiting.len(), RUNNING_PER_EXPORT_MAX);
        assert!(waiting.contains(&101));
    }

    #[test]
    fn parking_has_a_limit_in_bytes() {
        let flight = Flight::default();
        for unique in 0..RUNNING_PER_EXPORT_MAX as u64 {
            flight.begin(unique, b"r");
        }
        let large = vec![0; PARKED_BYTES_MAX];
        assert_eq!(flight.begin(100, &large), Begun::Parked);
        assert_eq!(flight.begin(101, b"r"), Begun::Run);
        assert_eq!(flight.abandon().len(), RUNNING_PER_EXPORT_MAX + 2);
    }
}
