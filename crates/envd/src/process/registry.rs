//! Which processes exist: the running ones, and the latest ended ones with their output and exit status.
//!
//! An exit status may arrive before the start has been registered (a fast command), so statuses of unknown
//! pids are held while a start is in flight.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use tokio::time::Instant;

use super::Shared;

/// Running processes started by clients.
pub const RUNNING_MAX: usize = 4096;
/// Ended processes that a late `Connect` can still ask about.
const ENDED_MAX: usize = 256;
/// How long an ended process can be asked about.
const ENDED_AGE_MAX: Duration = Duration::from_secs(3600);
/// Output of all ended processes together; the longest-ended ones lose their output first, never their status.
const ENDED_OUTPUT_BYTES_MAX: usize = 16 << 20;

/// How a client names a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    Pid(u32),
    Tag(String),
}

#[derive(Debug, Default)]
pub struct Registry {
    live: RefCell<HashMap<u32, Shared>>,
    ended: RefCell<VecDeque<(Instant, Shared)>>,
    starting: Cell<usize>,
    unclaimed: RefCell<HashMap<u32, i32>>,
}

/// A start in flight; while one exists, unknown exit statuses are kept.
#[derive(Debug)]
pub struct Starting<'a>(&'a Registry);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.0.starting.set(self.0.starting.get() - 1);
        if self.0.starting.get() == 0 {
            self.0.unclaimed.borrow_mut().clear();
        }
    }
}

impl Registry {
    /// Announces a start; to be held until [`Registry::add`] was called or the start failed.
    pub fn starting(&self) -> Starting<'_> {
        self.starting.set(self.starting.get() + 1);
        Starting(self)
    }

    pub fn live_count(&self) -> usize {
        self.live.borrow().len() + self.starting.get()
    }

    pub fn add(&self, process: &Shared) {
        self.live.borrow_mut().insert(process.pid, Rc::clone(process));
        if let Some(status) = self.unclaimed.borrow_mut().remove(&process.pid) {
            process.set_exit(status);
        }
    }

    /// A child has been reaped; orphans that nobody asked for are forgotten here.
    pub fn note_exit(&self, pid: u32, status: i32) {
        let known = self
            .live
            .borrow()
            .get(&pid)
            .filter(|process| process.is_running())
            .cloned();
        match known {
            Some(process) => process.set_exit(status),
            None if self.starting.get() > 0 => {
                self.unclaimed.borrow_mut().insert(pid, status);
            }
            None => {}
        }
    }

    /// The pump is done with a process: from now on it is one of the ended.
    pub fn retire(&self, process: &Shared) {
        let mut live = self.live.borrow_mut();
        // The pid may already belong to a newer process.
        if live.get(&process.pid).is_some_and(|held| Rc::ptr_eq(held, process)) {
            live.remove(&process.pid);
        }
        let mut ended = self.ended.borrow_mut();
        ended.push_back((Instant::now(), Rc::clone(process)));
        forget_old(&mut ended, Instant::now());
    }

    /// A process that still runs. The latest one, if a tag was given twice.
    pub fn find_running(&self, selector: &Selector) -> Option<Shared> {
        let live = self.live.borrow();
        let found = match selector {
            Selector::Pid(pid) => live.get(pid),
            Selector::Tag(tag) => live
                .values()
                .filter(|process| process.tag.as_ref() == Some(tag) && process.is_running())
                .max_by_key(|process| process.serial),
        };
        found.filter(|process| process.is_running()).cloned()
    }

    /// A running process, else the one that ended last under this name.
    pub fn find_any(&self, selector: &Selector) -> Option<Shared> {
        if let Some(process) = self.find_running(selector) {
            return Some(process);
        }
        let mut ended = self.ended.borrow_mut();
        forget_old(&mut ended, Instant::now());
        let matches = |process: &Shared| match selector {
            Selector::Pid(pid) => process.pid == *pid,
            Selector::Tag(tag) => process.tag.as_ref() == Some(tag),
        };
        // Between exit and end a process is still with its pump.
        let draining = self.live.borrow().values().find(|process| matches(process)).cloned();
        draining.or_else(|| {
            ended
                .iter()
                .rev()
                .map(|(_, process)| process)
                .find(|p| matches(p))
                .cloned()
        })
    }

    /// The running processes, oldest first.
    pub fn running(&self) -> Vec<Shared> {
        let mut all: Vec<Shared> = self
            .live
            .borrow()
            .values()
            .filter(|process| process.is_running())
            .cloned()
            .collect();
        all.sort_by_key(|process| process.serial);
        all
    }
}

fn forget_old(ended: &mut VecDeque<(Instant, Shared)>, now: Instant) {
    while ended.len() > ENDED_MAX
        || ended
            .front()
            .is_some_and(|(since, _)| now.duration_since(*since) > ENDED_AGE_MAX)
    {
        ended.pop_front();
    }
    let mut total: usize = ended.iter().map(|(_, process)| process.output_cost_bytes()).sum();
    for (_, process) in ended.iter() {
        if total <= ENDED_OUTPUT_BYTES_MAX {
            break;
        }
        total -= process.output_cost_bytes();
        process.drop_output();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::tests::process;

    #[test]
    fn an_exit_that_comes_before_the_registration_is_not_lost() {
        let registry = Registry::default();
        let starting = registry.starting();
        registry.note_exit(1, 3 << 8);
        let fast = process();
        registry.add(&fast);
        drop(starting);
        assert!(!fast.is_running());
        assert!(registry.unclaimed.borrow().is_empty());
    }

    #[test]
    fn exits_of_orphans_are_forgotten() {
        let registry = Registry::default();
        registry.note_exit(7, 0);
        assert!(registry.unclaimed.borrow().is_empty());
    }

    #[test]
    fn ended_processes_are_kept_up_to_a_number_and_their_output_up_to_a_size() {
        let registry = Registry::default();
        for round in 0..ENDED_MAX + 10 {
            let one = process();
            one.push(crate::process::ring::Kind::Stdout, &vec![0; 200_000]);
            one.set_exit(0);
            registry.retire(&one);
            let ended = registry.ended.borrow();
            assert_eq!(ended.len(), (round + 1).min(ENDED_MAX));
            let total: usize = ended.iter().map(|(_, process)| process.output_cost_bytes()).sum();
            assert!(total <= ENDED_OUTPUT_BYTES_MAX);
            assert!(ended.back().unwrap().1.output_cost_bytes() > 0);
        }
        assert!(registry.find_any(&Selector::Pid(1)).is_some());
        assert!(registry.find_running(&Selector::Pid(1)).is_none());
    }
}
