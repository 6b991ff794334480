//! A guest's memory for tests of captures, and the operations on it.

use std::ffi::c_void;

use aenv_wire::block::{CaptureStart, Hold, Job, Operation};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{Random, open};

pub const PAGE: usize = 4096;

/// A private mapping of an exported image in this process, which stands for the guest memory of a stopped VMM.
pub struct Guest {
    pub base: *mut c_void,
    pub length: usize,
}

impl Guest {
    pub fn map(path: &str, length: u64) -> Guest {
        let file = open(path);
        let length = usize::try_from(length).unwrap();
        // SAFETY: a new mapping at an address of the kernel's choice; unmapped when the guest is dropped.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
                &file,
                0,
            )
        };
        Guest {
            base: base.unwrap(),
            length,
        }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable and writable, `length` bytes long, and borrowed from the guest that owns it.
        unsafe { std::slice::from_raw_parts_mut(self.base.cast(), self.length) }
    }

    pub fn write_page(&mut self, page: usize, content: &[u8]) {
        self.bytes()[page * PAGE..(page + 1) * PAGE].copy_from_slice(content);
    }

    pub fn start(&self, job: &str, parent: &str, layer: &str, hold: Hold) -> Operation {
        Operation::CaptureStart(CaptureStart {
            job: job.to_owned(),
            pid: std::process::id(),
            address: self.base as u64,
            length_bytes: self.length as u64,
            parent: parent.to_owned(),
            layer: layer.to_owned(),
            hold,
            base: None,
        })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // SAFETY: made by `map`, and no slice of it is alive.
        unsafe { munmap(self.base, self.length).unwrap() };
    }
}

pub fn finish(job: &str) -> Operation {
    Operation::CaptureFinish(Job { job: job.to_owned() })
}

pub fn cancel(job: &str) -> Operation {
    Operation::CaptureCancel(Job { job: job.to_owned() })
}

pub fn dirty(guest: &mut Guest, random: &mut Random, pages: usize) {
    let mut content = [0u8; PAGE];
    for _ in 0..pages {
        random.fill(&mut content);
        let first = random.below((guest.length / PAGE) as u64) as usize;
        for page in first..(first + 1 + random.below(6) as usize).min(guest.length / PAGE) {
            guest.write_page(page, &content);
        }
    }
    // Pages that the guest zeroed, some over content of the parent and some over nothing.
    for _ in 0..pages / 4 {
        guest.write_page(random.below((guest.length / PAGE) as u64) as usize, &[0; PAGE]);
    }
}
