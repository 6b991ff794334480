//! Processes of the sandbox: starting them, keeping their output and exit status, talking to them.
//!
//! ```text
//! rpc ---- registry ----- Process (ring, end, stdin, terminal)
//!                           ^ pump: one task per process reads the pipes, ends the process
//!                           v stream: one body per attached client reads the ring at its own cursor
//! spawn: clone + exec      reaper: collects every exit status, ours and orphans'
//! ```
//!
//! A process never depends on a stream: clients come and go, the pump goes on.

pub mod launch;
pub mod pump;
pub mod reaper;
pub mod registry;
pub mod ring;
pub mod rpc;
pub mod spawn;
pub mod stdin;
mod stdio;
pub mod stream;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use ring::{Read, Ring};
use stdin::Input;
use stream::Readers;

/// Why a process could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("process needs a cmd")]
    NoCommand,
    #[error("{what} holds a NUL byte")]
    Nul { what: &'static str },
    #[error("cwd '{path}' does not exist")]
    DirectoryMissing { path: String },
    #[error("cwd '{path}' is not a directory")]
    DirectoryNot { path: String },
    #[error("invalid username: '{name}'")]
    UserUnknown { name: String },
    #[error("cannot open a pipe")]
    Pipe(#[source] std::io::Error),
    #[error("cannot open a terminal")]
    Terminal(#[source] std::io::Error),
    #[error("cannot create a process")]
    Clone(#[source] std::io::Error),
    #[error("{running} processes are running, the limit")]
    TooMany { running: usize },
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Exit code, -1 after a signal.
    pub exit_code: i32,
    pub exited: bool,
    /// `exit status N` or `signal: killed`, as Go prints them; clients show it.
    pub status: String,
    pub error: Option<String>,
    /// The deadline of the starting call killed it.
    pub timed_out: bool,
}

/// What a client asked for; `List` gives it back.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Config {
    #[serde(deserialize_with = "crate::json::null_default")]
    pub cmd: String,
    #[serde(deserialize_with = "crate::json::null_default")]
    pub args: Vec<String>,
    #[serde(deserialize_with = "crate::json::null_default")]
    pub envs: std::collections::BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// One started process, running or ended. Shared by the registry, its pump and the attached streams; all run
/// on one thread, so cells are enough.
#[derive(Debug)]
pub struct Process {
    pub pid: u32,
    /// Order of the starts; pids are reused, serials are not.
    pub serial: u64,
    pub tag: Option<String>,
    pub config: Config,
    pub input: Input,
    ring: RefCell<Ring>,
    readers: RefCell<Readers>,
    /// Wakes the pump when a reader has made room.
    room: Notify,
    /// Raw wait status, set by the reaper.
    exit: Cell<Option<i32>>,
    exited: Notify,
    /// Wakes the callers that wait for the exit; `exited` is the pump's alone.
    gone: Notify,
    end: RefCell<Option<End>>,
    /// A SIGKILL of ours, so a kill by the kernel's OOM killer can be told apart.
    killed_by_us: Cell<bool>,
    /// Exit code and reason, when the program could not be run at all.
    exec_error: Option<(i32, String)>,
}

impl Process {
    pub fn is_running(&self) -> bool {
        self.exit.get().is_none()
    }

    /// Called by the reaper, once.
    pub fn set_exit(&self, wait_status: i32) {
        self.exit.set(Some(wait_status));
        self.exited.notify_one();
        self.gone.notify_waiters();
    }

    /// Waits until the process has exited and been reaped, so that its pid is free.
    pub async fn wait_gone(&self) {
        let gone = self.gone.notified();
        if self.is_running() {
            gone.await;
        }
    }

    /// Sends a signal to the process group. `false` when the process has already ended.
    pub fn signal(&self, signal: rustix::process::Signal) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw);
        let Some(pid) = pid.filter(|_| self.is_running()) else {
            return false;
        };
        if signal == rustix::process::Signal::KILL {
            self.killed_by_us.set(true);
        }
        // The leader is not reaped yet, so the group id cannot have been reused.
        rustix::process::kill_process_group(pid, signal).is_ok()
    }

    fn push(&self, kind: ring::Kind, bytes: &[u8]) {
        self.ring.borrow_mut().push(kind, bytes);
        self.readers.borrow_mut().wake();
    }

    fn finish(&self, end: End) {
        self.ring.borrow_mut().shrink();
        *self.end.borrow_mut() = Some(end);
        self.readers.borrow_mut().wake();
    }

    pub fn output_cost_bytes(&self) -> usize {
        self.ring.borrow().cost_bytes()
    }

    /// Forgets the output of an ended process; its exit status stays.
    pub fn drop_output(&self) {
        self.ring.borrow_mut().clear();
    }

    fn read(&self, cursor: u64) -> Read {
        self.ring.borrow().read(cursor)
    }

    /// Until when the pump must pause: output that an attached reader has not taken yet is not overwritten
    /// before the reader has stood still for [`stream::STALL_MAX`]. `None`: there is room.
    fn blocked_until(&self, now: Instant) -> Option<Instant> {
        let safe = self.ring.borrow().oldest_after_push();
        self.readers.borrow_mut().blocked_until(safe, now)
    }
}

/// A duration that a client gave in a header; nothing or a value <= 0 means none.
pub fn positive_ms(text: Option<&str>) -> Option<Duration> {
    let value: i64 = text?.trim().parse().ok()?;
    u64::try_from(value)
        .ok()
        .filter(|value| *value > 0)
        .map(Duration::from_millis)
}

/// The shared handle that everything passes around.
pub type Shared = Rc<Process>;

#[cfg(test)]
mod tests {
    use super::*;

    /// A running process that exists only here.
    pub fn process() -> Shared {
        Rc::new(Process {
            pid: 1,
            serial: 1,
            tag: None,
            config: Config::default(),
            input: Input::new(stdin::Channel::Stdin, None),
            ring: RefCell::default(),
            readers: RefCell::default(),
            room: Notify::new(),
            exit: Cell::new(None),
            exited: Notify::new(),
            gone: Notify::new(),
            end: RefCell::default(),
            killed_by_us: Cell::new(false),
            exec_error: None,
        })
    }

    #[test]
    fn a_duration_of_nothing_or_less_is_none() {
        assert_eq!(positive_ms(Some("1500")), Some(Duration::from_millis(1500)));
        for text in [None, Some("0"), Some("-1"), Some("x"), Some("")] {
            assert_eq!(positive_ms(text), None);
        }
    }
}
