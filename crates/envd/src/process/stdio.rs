//! The pipes and terminals between the daemon and a child. Our ends never block.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use super::SpawnError;
use super::ring::Kind;
use super::spawn::Stdio;
use crate::users::User;

/// The child's side, our writing end, our reading ends.
pub type Opened = (Stdio, Option<OwnedFd>, Vec<(Kind, OwnedFd)>);

/// Two output pipes, and an input pipe or /dev/null.
pub fn open_pipes(stdin: bool) -> Result<Opened, SpawnError> {
    let (stdin, input) = if stdin {
        let (read, write) = pipe()?;
        set_nonblocking(&write).map_err(SpawnError::Pipe)?;
        (read, Some(write))
    } else {
        (open_null()?, None)
    };
    let (out_read, stdout) = pipe()?;
    let (err_read, stderr) = pipe()?;
    set_nonblocking(&out_read)
        .and_then(|()| set_nonblocking(&err_read))
        .map_err(SpawnError::Pipe)?;
    let outputs = vec![(Kind::Stdout, out_read), (Kind::Stderr, err_read)];
    Ok((Stdio::Pipes { stdin, stdout, stderr }, input, outputs))
}

/// /dev/null, or what behaves the same for a reader where the image's /dev could not be made.
fn open_null() -> Result<OwnedFd, SpawnError> {
    match rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(fd) => Ok(fd),
        Err(_) => pipe().map(|(read, _closed)| read),
    }
}

fn pipe() -> Result<(OwnedFd, OwnedFd), SpawnError> {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|error| SpawnError::Pipe(error.into()))
}

fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    rustix::io::ioctl_fionbio(fd, true).map_err(io::Error::from)
}

/// A terminal of the given columns and rows, owned by the user.
pub fn open_terminal((cols, rows): (u16, u16), user: &User) -> Result<Opened, SpawnError> {
    let open = || -> rustix::io::Result<(OwnedFd, OwnedFd)> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags)?;
        rustix::pty::unlockpt(&master)?;
        // By descriptor, not by name: the name means nothing where /dev/pts is elsewhere.
        let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        let size = Winsize {
            ws_row: rows,
            ws_col: cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        rustix::termios::tcsetwinsize(&slave, size)?;
        // The user's programs open their terminal by name, so it must be theirs (a test daemon that is not
        // root owns it already).
        let _ = rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(user.uid)), None);
        rustix::io::ioctl_fionbio(&master, true)?;
        Ok((master, slave))
    };
    let (master, slave) = open().map_err(|error| SpawnError::Terminal(error.into()))?;
    let input = master.try_clone().map_err(SpawnError::Terminal)?;
    Ok((Stdio::Terminal(slave), Some(input), vec![(Kind::Pty, master)]))
}
