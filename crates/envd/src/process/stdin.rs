//! The input side of a process: its stdin pipe, or its terminal.
//!
//! Writers of one process are served in the order in which they came (a fair lock), so input sent by several
//! calls is never mixed inside one call's bytes. A writer waits while the process does not read; it is
//! released with an error when the process ends.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, Notify};

/// Which input a client believes the process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    Stdin,
    Pty,
}

#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error("the process has no {0:?} input")]
    Absent(Channel),
    #[error("the input of the process is closed")]
    Closed,
    #[error("writing to the process failed")]
    Write(#[source] io::Error),
}

#[derive(Debug)]
pub struct Input {
    channel: Channel,
    fd: RefCell<Option<Rc<AsyncFd<OwnedFd>>>>,
    turn: Mutex<()>,
    closed: Cell<bool>,
    closing: Notify,
}

impl Input {
    /// `fd` is non-blocking; `None` when the process was started without stdin.
    pub fn new(channel: Channel, fd: Option<AsyncFd<OwnedFd>>) -> Self {
        Input {
            channel,
            fd: RefCell::new(fd.map(Rc::new)),
            turn: Mutex::new(()),
            closed: Cell::new(false),
            closing: Notify::new(),
        }
    }

    /// Writes all bytes, waiting while the process does not read. Cancelling may leave a prefix written.
    pub async fn write(&self, channel: Channel, mut bytes: &[u8]) -> Result<(), InputError> {
        let _turn = self.turn.lock().await;
        let fd = self.open_fd(channel)?;
        while !bytes.is_empty() {
            let closing = self.closing.notified();
            if self.closed.get() {
                return Err(InputError::Closed);
            }
            let ready = tokio::select! {
                ready = fd.writable() => ready,
                () = closing => return Err(InputError::Closed),
            };
            let mut guard = ready.map_err(InputError::Write)?;
            match guard.try_io(|fd| rustix::io::write(fd, bytes).map_err(io::Error::from)) {
                Ok(Ok(written)) => bytes = bytes.get(written..).unwrap_or_default(),
                Ok(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                    return Err(InputError::Closed);
                }
                Ok(Err(error)) => return Err(InputError::Write(error)),
                Err(_would_block) => {}
            }
        }
        Ok(())
    }

    /// Closes stdin after the writes that came before. Closing twice is fine; a terminal has no such end
    /// (its EOF is a typed character).
    pub async fn close_stdin(&self) -> Result<(), InputError> {
        let _turn = self.turn.lock().await;
        if self.channel == Channel::Pty {
            return Err(InputError::Absent(Channel::Stdin));
        }
        self.fd.borrow_mut().take();
        Ok(())
    }

    /// The process has ended: closes at once and releases waiting writers.
    pub fn abandon(&self) {
        self.closed.set(true);
        self.fd.borrow_mut().take();
        self.closing.notify_waiters();
    }

    /// Changes the size of the terminal.
    pub fn resize(&self, cols: u16, rows: u16) -> Result<(), InputError> {
        let fd = self.open_fd(Channel::Pty)?;
        let size = Winsize {
            ws_row: rows,
            ws_col: cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        rustix::termios::tcsetwinsize(fd.get_ref(), size).map_err(|error| InputError::Write(error.into()))
    }

    fn open_fd(&self, channel: Channel) -> Result<Rc<AsyncFd<OwnedFd>>, InputError> {
        if channel != self.channel {
            return Err(InputError::Absent(channel));
        }
        self.fd.borrow().clone().ok_or(InputError::Closed)
    }
}
