//! How many threads answer one mount: counts them and says when one is to be started or ended.
//!
//! Knows no thread and reads no clock; the session asks with the time at hand. One more is wanted whenever the last idle
//! one takes a request. Surplus ones end slowly: a thread costs tens of microseconds to start and a queue of small reads
//! goes from all busy to all idle thousands of times a second, so only those end that were idle throughout a whole
//! `SURPLUS_WINDOW`. A thread that waits for a request cannot be told to end; the next ones to come back do.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::limits::{SERVE_THREADS_MAX, SURPLUS_WINDOW};

#[derive(Debug)]
pub struct Crew {
    at_rest: usize,
    threads: AtomicUsize,
    idle: AtomicUsize,
    /// Fewest idle threads seen in this window: so many were never needed.
    fewest_idle: AtomicUsize,
    window_ends_ms: AtomicU64,
    /// How many of the idle threads may still end for the window before.
    surplus: AtomicUsize,
}

impl Crew {
    pub fn new(at_rest: usize) -> Crew {
        Crew {
            at_rest,
            threads: AtomicUsize::new(0),
            idle: AtomicUsize::new(0),
            fewest_idle: AtomicUsize::new(usize::MAX),
            window_ends_ms: AtomicU64::new(SURPLUS_WINDOW.as_millis() as u64),
            surplus: AtomicUsize::new(0),
        }
    }

    pub fn at_rest(&self) -> usize {
        self.at_rest
    }

    pub fn threads(&self) -> usize {
        self.threads.load(Ordering::Relaxed)
    }

    /// A thread is being started; it counts as idle until its first request.
    pub fn joins(&self) {
        self.threads.fetch_add(1, Ordering::Relaxed);
        self.idle.fetch_add(1, Ordering::Relaxed);
    }

    /// An idle thread ended, or was not started after all.
    pub fn leaves(&self) {
        self.idle.fetch_sub(1, Ordering::Relaxed);
        self.threads.fetch_sub(1, Ordering::Relaxed);
    }

    /// An idle thread took a request. Returns whether another one is to be started.
    pub fn begins(&self) -> bool {
        let left = self.idle.fetch_sub(1, Ordering::Relaxed) - 1;
        // Mostly it is lower already: a store here would take the line from the other threads each time.
        if left < self.fewest_idle.load(Ordering::Relaxed) {
            self.fewest_idle.fetch_min(left, Ordering::Relaxed);
        }
        left == 0 && self.threads() < SERVE_THREADS_MAX
    }

    /// A thread is done with its request and idle. Returns whether it is to end.
    pub fn ends(&self, now: Duration) -> bool {
        self.idle.fetch_add(1, Ordering::Relaxed);
        self.turn_window(now);
        self.surplus.load(Ordering::Relaxed) > 0
            && self
                .surplus
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |surplus| surplus.checked_sub(1))
                .is_ok()
    }

    /// At the end of a window, one thread counts who was not needed in it.
    fn turn_window(&self, now: Duration) {
        let now_ms = now.as_millis() as u64;
        let end_ms = self.window_ends_ms.load(Ordering::Relaxed);
        if now_ms < end_ms {
            return;
        }
        let next_ms = now_ms + SURPLUS_WINDOW.as_millis() as u64;
        let turned = self
            .window_ends_ms
            .compare_exchange(end_ms, next_ms, Ordering::Relaxed, Ordering::Relaxed);
        if turned.is_ok() {
            let never_needed = self.fewest_idle.swap(usize::MAX, Ordering::Relaxed);
            let surplus = never_needed.min(self.threads()).saturating_sub(self.at_rest);
            self.surplus.store(surplus, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A burst of so many requests at a time; returns how many threads were asked to end.
    fn burst(crew: &Crew, requests: usize, now: Duration) -> usize {
        for _ in 0..requests {
            if crew.begins() {
                crew.joins();
            }
        }
        let ending = (0..requests).filter(|_| crew.ends(now)).count();
        (0..ending).for_each(|_| crew.leaves());
        ending
    }

    fn at_rest(threads: usize) -> Crew {
        let crew = Crew::new(threads);
        (0..threads).for_each(|_| crew.joins());
        crew
    }

    #[test]
    fn bursts_start_threads_once_and_keep_them() {
        let crew = at_rest(4);
        for number in 0..1000 {
            let now = Duration::from_millis(number * 10);
            assert_eq!(burst(&crew, 20, now), 0, "at {now:?}");
        }
        assert_eq!(crew.threads(), 21);
    }

    #[test]
    fn threads_that_were_not_needed_for_a_window_end() {
        let crew = at_rest(4);
        burst(&crew, 20, Duration::ZERO);
        let after = |windows: u32| SURPLUS_WINDOW * windows + Duration::from_millis(windows.into());
        // The window of the burst ends, then one in which a single thread was in use.
        assert_eq!(burst(&crew, 1, after(1)), 0);
        let mut ended = 0;
        for number in 0..100 {
            ended += burst(&crew, 1, after(2) + Duration::from_micros(number));
        }
        assert_eq!((ended, crew.threads()), (16, 5));
    }

    #[test]
    fn there_is_a_limit_to_threads() {
        let crew = at_rest(4);
        for _ in 0..SERVE_THREADS_MAX {
            if crew.begins() {
                crew.joins();
            }
        }
        assert_eq!(crew.threads(), SERVE_THREADS_MAX);
        assert!(!crew.ends(Duration::ZERO));
        assert!(!crew.begins());
    }
}
