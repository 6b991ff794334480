//! Memory for dirty pages: anonymous mappings within one budget, given back to the system the moment they are dropped.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::CaptureError;

/// How much memory all captures together may hold.
#[derive(Debug)]
pub struct Budget {
    used: AtomicU64,
    limit: u64,
}

impl Budget {
    pub fn new(limit: u64) -> Arc<Budget> {
        Arc::new(Budget {
            used: AtomicU64::new(0),
            limit,
        })
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

/// A zeroed buffer that counts against the budget as long as it lives.
#[derive(Debug)]
pub struct Buffer {
    base: *mut u8,
    bytes: usize,
    budget: Arc<Budget>,
}

// SAFETY: the mapping is owned by this value alone, like a Box of bytes.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub fn new(budget: &Arc<Budget>, bytes: usize) -> Result<Buffer, CaptureError> {
        let asked = bytes as u64;
        let fits = |used: u64| used.checked_add(asked).filter(|sum| *sum <= budget.limit);
        if let Err(used) = budget.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            return Err(CaptureError::BufferFull {
                asked,
                used,
                limit: budget.limit,
            });
        }
        // From here on dropping the buffer gives the budget back, also when the mapping failed.
        let mut buffer = Buffer {
            base: std::ptr::null_mut(),
            bytes,
            budget: budget.clone(),
        };
        if bytes > 0 {
            buffer.base = Self::map(bytes).map_err(|source| CaptureError::Memory { bytes, source })?;
        }
        Ok(buffer)
    }

    fn map(bytes: usize) -> io::Result<*mut u8> {
        // Small pages on purpose: with MADV_HUGEPAGE filling took three times the CPU time on a host whose memory was
        // fragmented, since the kernel compacts for each of them, while the VMM stands still.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)? };
        Ok(base.cast())
    }

    pub fn bytes(&self) -> &[u8] {
        if self.base.is_null() {
            return &[];
        }
        // SAFETY: `base` is a readable mapping of `bytes` bytes, initialised (zeroed) by the kernel, alive as `self`.
        unsafe { std::slice::from_raw_parts(self.base, self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.base.is_null() {
            return &mut [];
        }
        // SAFETY: as above, and `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.base.is_null() {
            // SAFETY: the mapping made by `map`, with its length; no slice of it outlives `self`.
            let _ = unsafe { munmap(self.base.cast(), self.bytes) };
        }
        self.budget.used.fetch_sub(self.bytes as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_count_against_the_budget_until_they_are_dropped() {
        let budget = Budget::new(10_000);
        let mut first = Buffer::new(&budget, 8192).unwrap();
        first.bytes_mut()[8191] = 1;
        assert!(matches!(
            Buffer::new(&budget, 4096),
            Err(CaptureError::BufferFull { used: 8192, .. })
        ));
        drop(first);
        assert_eq!(budget.used(), 0);
        assert!(Buffer::new(&budget, 0).unwrap().bytes().is_empty());
    }
}
