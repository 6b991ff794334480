//! The memory that a thread reads a request into and puts the answered bytes in.
//!
//! Mapped and not taken from the heap: a page costs nothing before it is used, and most requests use one or two of the
//! hundreds that the largest needs. Pages that were used stay with the thread while all buffers of the mount together
//! hold at most `BUFFER_BYTES_KEPT`; beyond that a thread gives its own back after each request.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::limits::BUFFER_BYTES_KEPT;

#[derive(Debug)]
pub struct Buffer {
    base: NonNull<u8>,
    length: usize,
    /// Bytes from the start that may have pages, and how many of them the mount's sum counts.
    used: usize,
    counted: usize,
}

// SAFETY: the mapping belongs to the value alone and is bound to no thread.
unsafe impl Send for Buffer {}

impl Buffer {
    /// `length` zero bytes. Errors: no address space or memory left.
    pub fn new(length: usize) -> std::io::Result<Buffer> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address that the kernel chooses aliases nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length,
                protection,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Buffer {
            base,
            length,
            used: 0,
            counted: 0,
        })
    }

    /// As `new`, with every page there from the start and for good (`give_back` is not to be called). The kernel copies a
    /// request into it: a page that is missing when the process is being killed would fail the copy, and with it, by
    /// EIO, a request that the next blockd could have answered.
    pub fn resident(length: usize) -> std::io::Result<Buffer> {
        let mut buffer = Self::new(length)?;
        // Touched and not asked for by MAP_POPULATE, which does nothing under MCL_ONFAULT.
        buffer.first(length).fill(1);
        Ok(buffer)
    }

    /// All of it, to be filled by `fill`. For a resident buffer: what was used is not counted.
    pub fn fill<T>(&mut self, fill: impl FnOnce(&mut [u8]) -> T) -> T {
        // SAFETY: the mapping has `length` bytes, is initialised (zero pages), and the borrow is exclusive.
        fill(unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.length) })
    }

    /// The first `length` bytes, to be written. Panics beyond the end, as a slice does.
    pub fn first(&mut self, length: usize) -> &mut [u8] {
        assert!(length <= self.length);
        self.used = self.used.max(length);
        // SAFETY: as above, and within the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), length) }
    }

    /// Between requests: keeps the used pages or gives them back. `kept` is the mount's sum.
    pub fn settle(&mut self, kept: &AtomicUsize) {
        let more = self.used - self.counted;
        if more == 0 {
            return;
        }
        self.counted = self.used;
        if kept.fetch_add(more, Ordering::Relaxed) + more > BUFFER_BYTES_KEPT {
            self.give_back(kept);
        }
    }

    /// Gives all pages back; the buffer reads zero and can be used again.
    pub fn give_back(&mut self, kept: &AtomicUsize) {
        // SAFETY: exactly the mapping of this value, which is borrowed mutably; its bytes are zero afterwards, which is as
        // good a value as any. A failure keeps the pages, which is only memory.
        let _ = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.length, Advice::LinuxDontNeed) };
        kept.fetch_sub(self.counted, Ordering::Relaxed);
        (self.used, self.counted) = (0, 0);
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has `length` bytes, is initialised (zero pages) and lives as long as the value.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping of this value, to which no borrow is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_kept_up_to_the_limit_and_given_back_beyond_it() {
        let kept = AtomicUsize::new(0);
        let mut first = Buffer::new(1 << 20).unwrap();
        for length in [8192, 4096] {
            first.first(length).fill(7);
            first.settle(&kept);
        }
        assert_eq!((kept.load(Ordering::Relaxed), first[8191]), (8192, 7));

        kept.store(BUFFER_BYTES_KEPT, Ordering::Relaxed);
        let mut second = Buffer::new(1 << 20).unwrap();
        second.first(4096).fill(7);
        second.settle(&kept);
        assert_eq!((kept.load(Ordering::Relaxed), second[0]), (BUFFER_BYTES_KEPT, 0));
        first.first(8193);
        first.settle(&kept);
        assert_eq!((kept.load(Ordering::Relaxed), first[0]), (BUFFER_BYTES_KEPT - 8192, 0));
    }
}
