//! One task per process: moves output into the ring and decides when the process has ended.
//!
//! The end is told only when no output can be missing: after both pipes reached end of file, or, when a
//! background grandchild keeps them open, after the process exited, [`DRAIN_MAX`] passed, and every byte that
//! was in the pipes at the exit was read. What such a grandchild writes later is read and thrown away, so that
//! a server started in the background neither blocks on a full pipe nor dies of SIGPIPE.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::task::Poll;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use super::ring::{Kind, PIECE_BYTES_MAX};
use super::{End, Shared};

/// How long to wait for end of file after the exit. Enough for a `tee` behind a process substitution to
/// write its last lines; short against what a client notices.
const DRAIN_MAX: Duration = Duration::from_millis(100);

/// Pipes of ended processes that are still read for a living grandchild; beyond it they are closed.
const LINGERING_PIPES_MAX: usize = 1024;

/// Far enough away to mean never.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

thread_local! {
    /// One read buffer for all pumps: it is used between two awaits only.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE_BYTES_MAX].into());
    static LINGERING: Cell<usize> = const { Cell::new(0) };
}

/// One output of a process, non-blocking.
#[derive(Debug)]
pub struct Source {
    pub kind: Kind,
    pub fd: AsyncFd<OwnedFd>,
}

impl Source {
    /// Reads once into the shared buffer; `Ready(0)` is end of file. A terminal reports its end as EIO.
    fn poll_read(&self, cx: &mut std::task::Context<'_>, take: impl FnOnce(&[u8])) -> Poll<usize> {
        loop {
            let Poll::Ready(ready) = self.fd.poll_read_ready(cx) else {
                return Poll::Pending;
            };
            let Ok(mut guard) = ready else {
                return Poll::Ready(0);
            };
            let length = SCRATCH.with_borrow_mut(|scratch| {
                guard.try_io(|fd| rustix::io::read(fd, scratch.as_mut()).map_err(io::Error::from))
            });
            match length {
                Ok(Ok(length)) => {
                    SCRATCH.with_borrow(|scratch| take(scratch.get(..length).unwrap_or_default()));
                    return Poll::Ready(length);
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(_)) => return Poll::Ready(0),
                Err(_would_block) => {}
            }
        }
    }

    /// Bytes that could be read right now.
    fn waiting_bytes(&self) -> u64 {
        rustix::io::ioctl_fionread(self.fd.get_ref()).unwrap_or(0)
    }
}

struct Pump {
    process: Shared,
    sources: Vec<Source>,
    /// Bytes of each source that were there at the exit and are not read yet.
    owed: u64,
    drain_until: Option<Instant>,
    timed_out: bool,
}

/// Runs until the process has ended and its output is complete, then tells the readers.
pub async fn run(process: Shared, sources: Vec<Source>, deadline: Option<Instant>) {
    let mut pump = Pump {
        process: process.clone(),
        sources,
        owed: 0,
        drain_until: None,
        timed_out: false,
    };
    let deadline_timer = tokio::time::sleep_until(deadline.unwrap_or_else(|| Instant::now() + NEVER));
    tokio::pin!(deadline_timer);
    let mut deadline_armed = deadline.is_some();
    while !pump.is_complete() {
        let blocked = process.blocked_until(Instant::now());
        let (drain_until, draining) = (pump.drain_until, pump.is_draining());
        tokio::select! {
            biased;
            () = &mut deadline_timer, if deadline_armed => {
                deadline_armed = false;
                pump.timed_out = process.signal(rustix::process::Signal::KILL);
            }
            () = process.exited.notified(), if drain_until.is_none() => pump.note_exit(),
            () = process.room.notified(), if blocked.is_some() => {}
            () = sleep_until(blocked), if blocked.is_some() => {}
            () = sleep_until(drain_until), if draining => {}
            () = pump.read(), if blocked.is_none() && !pump.sources.is_empty() => {}
        }
    }
    let end = pump.end();
    process.input.abandon();
    process.finish(end);
    pump.sources
        .into_iter()
        .filter(|source| source.kind != Kind::Pty)
        .for_each(linger);
}

async fn sleep_until(instant: Option<Instant>) {
    if let Some(instant) = instant {
        tokio::time::sleep_until(instant).await;
    }
}

impl Pump {
    fn is_complete(&self) -> bool {
        let Some(until) = self.drain_until else {
            return false;
        };
        self.sources.is_empty() || (self.owed == 0 && Instant::now() >= until)
    }

    /// The drain time is still running, so its end is worth waking for.
    fn is_draining(&self) -> bool {
        self.drain_until.is_some_and(|until| Instant::now() < until)
    }

    fn note_exit(&mut self) {
        self.owed = self.sources.iter().map(Source::waiting_bytes).sum();
        self.drain_until = Some(Instant::now() + DRAIN_MAX);
    }

    /// Reads once from whichever output has something.
    async fn read(&mut self) {
        let process = &self.process;
        let sources = &self.sources;
        let (index, length) = poll_fn(|cx| {
            for (index, source) in sources.iter().enumerate() {
                if let Poll::Ready(length) = source.poll_read(cx, |bytes| process.push(source.kind, bytes)) {
                    return Poll::Ready((index, length));
                }
            }
            Poll::Pending
        })
        .await;
        self.owed = self.owed.saturating_sub(length as u64);
        if length == 0 {
            self.sources.remove(index);
        } else if self.sources.len() > 1 {
            // The other output goes first the next time, so that a chatty one cannot starve it.
            self.sources.rotate_left(1);
        }
    }

    fn end(&self) -> End {
        let status = self.process.exit.get().unwrap_or(0);
        if let Some((exit_code, text)) = &self.process.exec_error {
            return End {
                error: Some(text.clone()),
                ..end_of(exit_code << 8, self.timed_out)
            };
        }
        let mut end = end_of(status, self.timed_out);
        if libc::WIFSIGNALED(status)
            && libc::WTERMSIG(status) == libc::SIGKILL
            && !self.process.killed_by_us.get()
            && super::reaper::oom_kills_have_risen()
        {
            end.error = Some("signal: killed (out of memory)".into());
        }
        end
    }
}

/// Keeps reading for a grandchild that still holds the pipe, and forgets the bytes.
fn linger(source: Source) {
    if LINGERING.get() >= LINGERING_PIPES_MAX {
        return;
    }
    LINGERING.set(LINGERING.get() + 1);
    tokio::task::spawn_local(async move {
        while poll_fn(|cx| source.poll_read(cx, |_| {})).await > 0 {}
        LINGERING.set(LINGERING.get() - 1);
    });
}

fn end_of(status: i32, timed_out: bool) -> End {
    if libc::WIFSIGNALED(status) {
        let core = if libc::WCOREDUMP(status) { " (core dumped)" } else { "" };
        let text = format!("signal: {}{core}", signal_name(libc::WTERMSIG(status)));
        return End {
            exit_code: -1,
            exited: false,
            error: Some(text.clone()),
            status: text,
            timed_out,
        };
    }
    let exit_code = libc::WEXITSTATUS(status);
    let status = format!("exit status {exit_code}");
    let error = (exit_code != 0).then(|| status.clone());
    End {
        exit_code,
        exited: true,
        status,
        error,
        timed_out,
    }
}

/// Names as the clients know them from the original daemon (Go's names).
fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        libc::SIGXCPU => "CPU time limit exceeded",
        libc::SIGXFSZ => "file size limit exceeded",
        libc::SIGSYS => "bad system call",
        other => return format!("signal {other}"),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_code_is_told_as_go_prints_it() {
        let end = end_of(3 << 8, false);
        assert_eq!(
            (end.exit_code, end.exited, end.status.as_str()),
            (3, true, "exit status 3")
        );
        assert_eq!(end.error.as_deref(), Some("exit status 3"));
        assert_eq!(end_of(0, false).error, None);
    }

    #[test]
    fn a_signal_is_told_as_go_prints_it() {
        let end = end_of(libc::SIGKILL, false);
        assert_eq!(
            (end.exit_code, end.exited, end.status.as_str()),
            (-1, false, "signal: killed")
        );
        assert_eq!(
            end_of(libc::SIGSEGV | 0x80, false).status,
            "signal: segmentation fault (core dumped)"
        );
    }
}
