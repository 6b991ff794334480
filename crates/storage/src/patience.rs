//! How long a store is waited for.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aenv_store::{StoreError, StoreErrorKind};

/// The slowest link that an upload is expected to get through.
const BYTES_PER_S_MIN: u64 = 1 << 20;

/// Limits of waiting for a store.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// The pause after the first failure; doubled after each further one.
    pub pause_first: Duration,
    pub pause_max: Duration,
    /// From a request's first failure on; after it the last failure is the result.
    pub deadline: Duration,
    /// One attempt, besides the time that its bytes take on a slow link.
    pub attempt: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            pause_first: Duration::from_millis(200),
            pause_max: Duration::from_secs(15),
            deadline: Duration::from_secs(600),
            attempt: Duration::from_secs(30),
        }
    }
}

impl Patience {
    /// The time of one attempt while `bytes` are on their way, those of other requests beside it included.
    pub fn attempt_for(&self, bytes: u64) -> Duration {
        self.attempt + Duration::from_secs(bytes / BYTES_PER_S_MIN)
    }

    /// Runs a request until it succeeds, fails for good, or the deadline is over.
    pub fn retry<T>(&self, mut request: impl FnMut() -> Result<T, StoreError>) -> Result<T, StoreError> {
        let mut first_failure = None;
        let mut pause = self.pause_first;
        loop {
            let error = match request() {
                Err(error) if error.kind() == StoreErrorKind::Transient => error,
                outcome => return outcome,
            };
            let since = *first_failure.get_or_insert_with(Instant::now);
            if since.elapsed() + pause >= self.deadline {
                return Err(error);
            }
            std::thread::sleep(pause.mul_f64(jitter()));
            pause = (pause * 2).min(self.pause_max);
        }
    }
}

/// Between a half and one, so that workers which failed together do not come back together.
fn jitter() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    0.5 + f64::from(now.subsec_nanos() % 1000) / 2000.0
}
