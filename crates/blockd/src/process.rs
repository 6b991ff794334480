//! What both daemons do with processes: locks, watching a peer by pidfd, handing descriptors on, standing orders to
//! the kernel. Owns no policy: when to restart whom is the keeper's and the watcher's.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::limits::{BACKOFF_FIRST, BACKOFF_MAX, IMMEDIATE_RESTARTS, SHORT_LIFE};

/// A held lock file; dropped (or the process dead) it is free.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Why a lock was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error("{} is held by another process", .0.display())]
    Held(PathBuf),
    #[error("cannot lock {}", .0.display())]
    Io(PathBuf, #[source] io::Error),
}

impl Lock {
    /// Takes the lock, trying until `wait` is over: a peer that has just been killed frees it within milliseconds.
    pub fn take(path: &Path, wait: Duration) -> Result<Lock, LockError> {
        let failed = |error: io::Error| LockError::Io(path.to_owned(), error);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed)?;
        let deadline = Instant::now() + wait;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock { _file: file }),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(LockError::Held(path.to_owned())),
                Err(error) => return Err(failed(error.into())),
            }
        }
    }
}

/// Another process, watched by pidfd: its number can be reused, this cannot.
#[derive(Debug)]
pub struct Peer {
    pub pid: u32,
    pidfd: OwnedFd,
}

impl Peer {
    pub fn of(pid: u32) -> io::Result<Peer> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let raw = raw.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(Peer {
            pid,
            pidfd: pidfd_open(raw, PidfdFlags::empty())?,
        })
    }

    pub fn inherited(pid: u32, pidfd: OwnedFd) -> Peer {
        Peer { pid, pidfd }
    }

    /// Readable once the process (all its threads) has ended and its descriptors are closed.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub fn signal(&self, signal: Signal) {
        // The only failure is that it is gone already, which is what the caller wants to hear anyway.
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    /// True when the process ended within the time; None waits without end.
    pub fn wait(&self, time: Option<Duration>) -> bool {
        let deadline = time.map(|time| Instant::now() + time);
        loop {
            let left = deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], left.as_ref()) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(_) => {}
            }
        }
    }

    /// Reaps it if it was our child; a peer's child is reaped by init.
    pub fn reap(&self) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
        }
    }
}

pub fn timespec(time: Duration) -> rustix::time::Timespec {
    rustix::time::Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

/// Starts this program again with `arguments`, and each descriptor under its option: `--name N`.
/// The copies are made without close-on-exec and closed right after, so no other child can inherit them unless it is
/// started in the same instant, which neither daemon does: each starts processes from one thread only.
pub fn start_self(arguments: &[String], descriptors: &[(&str, BorrowedFd<'_>)]) -> io::Result<Peer> {
    // The running file, also when another was installed in its place meanwhile; under the name that it has now.
    let mut command = Command::new("/proc/self/exe");
    command.arg0(std::env::args_os().next().unwrap_or_else(|| "aenv-blockd".into()));
    command.args(arguments);
    let mut copies = Vec::new();
    for (name, descriptor) in descriptors {
        let copy = rustix::io::dup(descriptor)?;
        command
            .arg(name)
            .arg(std::os::fd::AsRawFd::as_raw_fd(&copy).to_string());
        copies.push(copy);
    }
    let child = command.stdin(std::process::Stdio::null()).spawn()?;
    Peer::of(child.id())
}

/// Owns a descriptor that the parent left for us, closed again for our own children.
pub fn adopt(number: RawFd) -> io::Result<OwnedFd> {
    if number < 3 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "an inherited descriptor is 3 or higher",
        ));
    }
    // SAFETY: the number comes from our parent's command line, which passes each descriptor to exactly one option,
    // and options are adopted once at start; nothing else in this process owns it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)?;
    Ok(descriptor)
}

/// How long to wait before the next start of a daemon that keeps dying: nothing for the first few times.
#[derive(Debug, Default)]
pub struct Backoff {
    short_lives: u32,
}

impl Backoff {
    /// Called with how long the last one lived.
    pub fn delay(&mut self, lived: Duration) -> Duration {
        if lived >= SHORT_LIFE {
            self.short_lives = 0;
            return Duration::ZERO;
        }
        self.short_lives += 1;
        match self.short_lives.checked_sub(IMMEDIATE_RESTARTS + 1) {
            None => Duration::ZERO,
            Some(over) => (BACKOFF_FIRST * 2u32.saturating_pow(over.min(16))).min(BACKOFF_MAX),
        }
    }
}

/// What `ps` and `top` show: after an exec of /proc/self/exe it would be "exe".
pub fn be_called(name: &std::ffi::CStr) {
    let _ = rustix::thread::set_name(name);
}

/// The OOM killer takes these two last: their death stalls every guest.
pub fn stay_out_of_the_oom_killers_reach() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-900") {
        say!("aenv-blockd: cannot set oom_score_adj to -900: {error}");
    }
}

/// Writes `{"pid","start_time_ticks","argv"}`, the record that aenv-launch writes for what it starts: a daemon that
/// was started by its peer keeps that record true.
pub fn write_record(path: &Path) -> io::Result<()> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The command name may hold spaces and parentheses: count the fields after the last parenthesis.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let start_time_ticks: u64 = after_name
        .split_whitespace()
        .nth(19)
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    let argv: Vec<String> = std::env::args().collect();
    let record = serde_json::json!({"pid": std::process::id(), "start_time_ticks": start_time_ticks, "argv": argv});
    crate::files::write_atomically(path, record.to_string().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_exclusive_and_free_after_its_holder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = Lock::take(&path, Duration::ZERO).unwrap();
        assert!(matches!(Lock::take(&path, Duration::ZERO), Err(LockError::Held(_))));
        drop(held);
        Lock::take(&path, Duration::ZERO).unwrap();
    }

    #[test]
    fn restarts_are_immediate_until_short_lives_repeat() {
        let mut backoff = Backoff::default();
        for _ in 0..IMMEDIATE_RESTARTS {
            assert_eq!(backoff.delay(Duration::from_millis(10)), Duration::ZERO);
        }
        assert_eq!(backoff.delay(Duration::from_millis(10)), BACKOFF_FIRST);
        assert_eq!(backoff.delay(Duration::from_millis(10)), BACKOFF_FIRST * 2);
        assert_eq!(backoff.delay(SHORT_LIFE), Duration::ZERO);
        assert_eq!(backoff.delay(Duration::from_millis(10)), Duration::ZERO);
        for _ in 0..100 {
            assert!(backoff.delay(Duration::ZERO) <= BACKOFF_MAX);
        }
    }

    #[test]
    fn a_process_is_waited_for_by_its_pidfd() {
        let mut child = Command::new("true").spawn().unwrap();
        let peer = Peer::of(child.id()).unwrap();
        assert!(peer.wait(Some(Duration::from_secs(10))));
        child.wait().unwrap();
        assert!(!Peer::of(std::process::id()).unwrap().wait(Some(Duration::ZERO)));
    }
}
