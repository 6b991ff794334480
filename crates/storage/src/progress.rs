//! How far a command is, told as JSON lines: at most five a second, and one now and then while nothing moves, so that the
//! server can tell a store that is waited for from a process that hangs.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

const BETWEEN_LINES: Duration = Duration::from_millis(200);
/// Well below the silence after which the server takes a worker for dead (300 s).
const HEARTBEAT: Duration = Duration::from_secs(20);

/// A counter that reports itself. Bytes are those of every pass over the data, hashing and sending alike.
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
    out: Mutex<Out>,
}

struct Out {
    to: Box<dyn Write + Send>,
    last: Option<Instant>,
}

impl Progress {
    /// Reports go to `to`.
    pub fn new(to: impl Write + Send + 'static) -> Progress {
        let out = Out {
            to: Box::new(to),
            last: None,
        };
        Progress {
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            out: Mutex::new(out),
        }
    }

    /// Reports as long as somebody holds the counter.
    pub fn keep_talking(self: &Arc<Self>) {
        let progress: Weak<Progress> = Arc::downgrade(self);
        std::thread::spawn(move || {
            while let Some(progress) = progress.upgrade() {
                progress.report(HEARTBEAT);
                drop(progress);
                std::thread::sleep(HEARTBEAT);
            }
        });
    }

    /// More has to be done than was known.
    pub fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        self.report(BETWEEN_LINES);
    }

    fn report(&self, between: Duration) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        if out.last.is_some_and(|last| last.elapsed() < between) {
            return;
        }
        out.last = Some(Instant::now());
        let (done, total) = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed));
        // Nobody listening is no reason to stop.
        let _ = writeln!(out.to, "{{\"done_bytes\":{done},\"total_bytes\":{total}}}");
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Progress({}/{})",
            self.done.load(Ordering::Relaxed),
            self.total.load(Ordering::Relaxed)
        )
    }
}
