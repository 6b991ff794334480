//! Starts the write-back of an upper while it is being written.
//!
//! Left alone the kernel keeps up to a tenth of the machine's memory dirty and then stalls whoever writes, also the
//! neighbours, and a pause to durable has all of it before it. So the bytes of one upper that the disk has not been asked
//! to take are bounded here. Only asks: nothing is durable because of it, and an error is seen by who syncs.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

/// Bytes written between two requests for write-back: long enough for the kernel to sort small ones.
const STEP_BYTES: u64 = 64 << 20;

/// Bytes written at which a writer waits for the request under way, which itself waits for room in the disk's queue.
const BYTES_MAX: u64 = 256 << 20;

#[derive(Debug, Default)]
pub(crate) struct WriteBack {
    /// Bytes written since the last request.
    written: AtomicU64,
    /// Held by who asks the kernel.
    asking: Mutex<()>,
}

impl WriteBack {
    /// After a write of so many bytes. Caller: holds no lock that others need at once.
    pub fn wrote(&self, file: &File, bytes: u64) {
        let written = self.written.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if written < STEP_BYTES {
            return;
        }
        let asking = match self.asking.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::WouldBlock) if written < BYTES_MAX => return,
            Err(_) => self.asking.lock().unwrap_or_else(PoisonError::into_inner),
        };
        // Who waited finds that there is little left.
        if self.written.load(Ordering::Relaxed) >= STEP_BYTES {
            self.written.store(0, Ordering::Relaxed);
            start(file);
        }
        drop(asking);
    }
}

/// All dirty pages of the file that the disk is not writing yet.
fn start(file: &File) {
    let to_the_end = 0;
    // SAFETY: takes a descriptor that the borrow keeps open, and numbers. A failure leaves the pages to the kernel's own
    // write-back; a failing disk is told to who reads or syncs.
    let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, to_the_end, libc::SYNC_FILE_RANGE_WRITE) };
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn bytes_count_up_to_a_step_and_then_anew() {
        let file = tempfile::tempfile().unwrap();
        let write_back = WriteBack::default();
        let counted = || write_back.written.load(Ordering::Relaxed);
        write_back.wrote(&file, STEP_BYTES - 1);
        assert_eq!(counted(), STEP_BYTES - 1);
        write_back.wrote(&file, 1);
        assert_eq!(counted(), 0);
    }

    #[test]
    fn a_request_under_way_holds_up_nobody_before_the_bound() {
        let file = tempfile::tempfile().unwrap();
        let write_back = WriteBack::default();
        let _asking = write_back.asking.lock().unwrap();
        write_back.wrote(&file, BYTES_MAX - 1);
        assert_eq!(write_back.written.load(Ordering::Relaxed), BYTES_MAX - 1);
    }
}
