//! SIGTERM and SIGINT as something to poll, so that the order to stop is handled between two steps and never inside.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};

/// Readable once the process was told to stop. The signals stay blocked; children started by std begin unblocked.
pub fn termination() -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set before anything reads it; the other calls get valid pointers, and this
    // runs before any thread is started, so the mask is the whole process's.
    let descriptor = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
        libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC)
    };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
