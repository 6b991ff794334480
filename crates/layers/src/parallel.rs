//! Work that waits for others (a store, a disk) done side by side on a bounded number of threads.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};

/// What the threads share: pieces of work with the places for their results, and how many more threads may be made.
struct Shared<I, F> {
    rest: Mutex<I>,
    helpers: Mutex<usize>,
    work: F,
}

/// `work` on each of `items`, in their order, by at most `threads_max` threads, the caller's among them. A thread that
/// cannot be made is done without.
///
/// Each thread makes the next one when it begins and leaves work over. So work that turns out to wait for nothing is done
/// by the caller before many threads exist: on a busy machine each of them costs milliseconds, since the caller must wait
/// until it has run.
pub(crate) fn map<T: Send, R: Send>(items: Vec<T>, threads_max: usize, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let helpers = items.len().min(threads_max).saturating_sub(1);
    if helpers == 0 {
        return items.into_iter().map(work).collect();
    }
    let mut outcomes: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let shared = Shared {
        rest: Mutex::new(items.into_iter().zip(&mut outcomes)),
        helpers: Mutex::new(helpers),
        work,
    };
    std::thread::scope(|scope| run(scope, &shared));
    drop(shared);
    outcomes.into_iter().flatten().collect()
}

/// One thread's part. A panic of the work ends the whole scope.
fn run<'scope, 'result: 'scope, T, R, I, F>(scope: &'scope Scope<'scope, '_>, shared: &'scope Shared<I, F>)
where
    T: Send,
    R: Send + 'result,
    I: ExactSizeIterator<Item = (T, &'result mut Option<R>)> + Send,
    F: Fn(T) -> R + Sync,
{
    let mut may_help = true;
    loop {
        let (next, left) = {
            let mut rest = locked(&shared.rest);
            (rest.next(), rest.len())
        };
        let Some((item, outcome)) = next else { return };
        if may_help && left > 0 && take(&shared.helpers) {
            may_help = false;
            let _ = Builder::new().spawn_scoped(scope, move || run(scope, shared));
        }
        *outcome = Some((shared.work)(item));
    }
}

fn take(helpers: &Mutex<usize>) -> bool {
    let mut left = locked(helpers);
    let taken = *left > 0;
    *left = left.saturating_sub(1);
    taken
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
