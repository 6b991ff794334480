//! Work that waits for others (a store, a disk) done side by side on a bounded number of threads.

use std::sync::{Mutex, PoisonError};

/// `work` on each of `items`, in their order, by at most `threads_max` threads, the caller's among them. A thread that
/// cannot be made is done without.
pub(crate) fn map<T: Send, R: Send>(items: Vec<T>, threads_max: usize, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let helpers = items.len().min(threads_max).saturating_sub(1);
    if helpers == 0 {
        return items.into_iter().map(work).collect();
    }
    let mut outcomes: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let rest = Mutex::new(items.into_iter().zip(&mut outcomes));
    let worker = || {
        // The guard is dropped before the work begins. A panic inside of it ends the whole scope.
        while let Some((item, outcome)) = next(&rest) {
            *outcome = Some(work(item));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            let _ = std::thread::Builder::new().spawn_scoped(scope, worker);
        }
        worker();
    });
    drop(rest);
    outcomes.into_iter().flatten().collect()
}

fn next<I: Iterator>(rest: &Mutex<I>) -> Option<I::Item> {
    rest.lock().unwrap_or_else(PoisonError::into_inner).next()
}

#[cfg(test)]
mod test {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_items() {
        for threads in [0, 1, 2, 7, 100] {
            assert_eq!(
                map((0..20).collect(), threads, |n| n * n),
                (0..20).map(|n| n * n).collect::<Vec<_>>()
            );
        }
        assert!(map(Vec::<u8>::new(), 4, |n| n).is_empty());
    }

    #[test]
    fn as_many_as_allowed_run_at_once() {
        // Each waits for the three others, so fewer threads would never end.
        let barrier = Barrier::new(4);
        map(vec![(); 8], 4, |()| barrier.wait());
    }
}
