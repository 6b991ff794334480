//! How long a read may wait for a store, as said by whoever serves the reader.
//!
//! It travels with the thread and not through `Blob::read_exact_at`: between the two lie the layer format, decryption
//! and decompression, which have no business with it.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// For reads of threads that said nothing.
const DEFAULT: Duration = Duration::from_secs(60);

/// Says that nobody waits for a read any more.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// When a read gives up.
#[derive(Debug, Clone)]
pub struct Patience {
    pub deadline: Instant,
    pub cancel: Option<Cancel>,
}

impl Patience {
    pub fn lasting(time: Duration, cancel: Option<Cancel>) -> Patience {
        Patience {
            deadline: Instant::now() + time,
            cancel,
        }
    }

    /// That of the current thread.
    pub fn current() -> Patience {
        let current = CURRENT.with_borrow(|current| match current {
            Some(Current { patience, adopted }) if !adopted || !patience.left().is_zero() => Some(patience.clone()),
            _ => None,
        });
        current.unwrap_or_else(|| Patience::lasting(DEFAULT, None))
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.as_ref().is_some_and(Cancel::is_cancelled)
    }

    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

/// What was said to a thread.
#[derive(Debug)]
struct Current {
    patience: Patience,
    adopted: bool,
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// Runs `work` so that its reads of cached blobs, in this thread, give up as `patience` says.
pub fn with_patience<T>(patience: Patience, work: impl FnOnce() -> T) -> T {
    struct Restore(Option<Current>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
    let current = Current {
        patience,
        adopted: false,
    };
    let _restore = Restore(CURRENT.replace(Some(current)));
    work()
}

/// Gives a thread that has no patience yet this one until its deadline: for threads that somebody between the reader and
/// the cache starts for one piece of work.
pub fn adopt_patience(patience: Patience) {
    CURRENT.with_borrow_mut(|current| {
        if current.as_ref().is_none_or(|current| current.adopted) {
            *current = Some(Current {
                patience,
                adopted: true,
            });
        }
    });
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn patience_ends_with_the_work_it_was_given_for() {
        let cancel = Cancel::default();
        cancel.cancel();
        with_patience(Patience::lasting(Duration::ZERO, Some(cancel)), || {
            assert!(Patience::current().is_cancelled());
            assert_eq!(Patience::current().left(), Duration::ZERO);
        });
        assert!(!Patience::current().is_cancelled());
        assert!(Patience::current().left() > Duration::from_secs(1));
    }

    #[test]
    fn an_adopted_patience_gives_way_to_a_given_one_and_ends_with_its_deadline() {
        adopt_patience(Patience::lasting(Duration::from_secs(1000), None));
        assert!(Patience::current().left() > Duration::from_secs(900));
        with_patience(Patience::lasting(Duration::from_secs(5), None), || {
            adopt_patience(Patience::lasting(Duration::from_secs(1000), None));
            assert!(Patience::current().left() <= Duration::from_secs(5));
        });
        adopt_patience(Patience::lasting(Duration::ZERO, None));
        assert!(Patience::current().left() > Duration::from_secs(1));
    }
}
