//! Which pages of a range are anonymous: written, present or swapped, and not the file's.
//!
//! Linux 6.7 has an ioctl that answers in ranges; before it, eight bytes per page are read and judged here.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::{CaptureError, Range};
use crate::limits::PAGE_BYTES;

/// Ranges that one ioctl may return; more take another round.
const REGIONS: usize = 4096;

/// Categories of pages in the kernel's interface (include/uapi/linux/fs.h).
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610u32 as libc::Ioctl;

#[repr(C)]
#[derive(Debug, Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// The anonymous pages of `[address, address + length)`, in order, as ranges relative to `address`.
pub fn dirty_ranges(pid: u32, address: u64, length: u64) -> Result<Vec<Range>, CaptureError> {
    let failed = |source: io::Error| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => CaptureError::Gone { pid },
        _ => CaptureError::Process {
            pid,
            step: "scanning the page map",
            source,
        },
    };
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(failed)?;
    match by_ioctl(&pagemap, address, length) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            by_reading(&pagemap, address, length).map_err(failed)
        }
        other => other.map_err(failed),
    }
}

fn by_ioctl(pagemap: &File, address: u64, length: u64) -> io::Result<Vec<Range>> {
    let mut ranges = Vec::new();
    let mut regions = vec![Region::default(); REGIONS];
    let (mut start, end) = (address, address + length);
    while start < end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start,
            end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: REGIONS as u64,
            category_inverted: PAGE_IS_FILE,
            category_mask: PAGE_IS_FILE,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT,
            ..ScanArgument::default()
        };
        // SAFETY: `argument` is the ioctl's structure with its own size in it, and `vec` points to REGIONS regions
        // that outlive the call; the kernel writes at most `vec_len` of them.
        let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
        let found = &regions[..found.min(REGIONS)];
        for region in found {
            push(&mut ranges, region.start - address, region.end - region.start);
        }
        // Whether there is more shows in a full vector. `walk_end` does not tell: the kernel fills the vector in pieces
        // of 512 regions, and after a walk that ran to its end it still names the end of the last full piece.
        match found.last() {
            Some(last) if found.len() == REGIONS => start = last.end,
            _ => break,
        }
    }
    Ok(ranges)
}

/// Bits of a page map entry: 63 present, 62 swapped, 61 of a file or shared.
fn by_reading(pagemap: &File, address: u64, length: u64) -> io::Result<Vec<Range>> {
    const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;
    const FILE: u64 = 1 << 61;
    let mut ranges = Vec::new();
    let mut buffer = vec![0u8; 512 << 10];
    let pages = length / PAGE_BYTES;
    let mut page = 0;
    while page < pages {
        let count = (pages - page).min(buffer.len() as u64 / 8);
        let bytes = &mut buffer[..(count * 8) as usize];
        pagemap.read_exact_at(bytes, (address / PAGE_BYTES + page) * 8)?;
        for (index, entry) in bytes.chunks_exact(8).enumerate() {
            let entry = u64::from_ne_bytes(entry.try_into().unwrap_or_default());
            if entry & PRESENT_OR_SWAPPED != 0 && entry & FILE == 0 {
                push(&mut ranges, (page + index as u64) * PAGE_BYTES, PAGE_BYTES);
            }
        }
        page += count;
    }
    Ok(ranges)
}

fn push(ranges: &mut Vec<Range>, start: u64, length: u64) {
    match ranges.last_mut() {
        Some(last) if last.start + last.length == start => last.length += length,
        _ => ranges.push(Range { start, length }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
    use std::io::Write;

    /// More regions than the kernel's pieces (512) and than our vector hold, so that every seam is crossed.
    #[test]
    fn thousands_of_ranges_are_each_found_once_and_in_order() {
        let pages = 3 * REGIONS;
        let length = pages * 4096;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping that only this test touches, unmapped at its end. No huge pages, or the pages between
        // the written ones would be there too.
        let base = unsafe {
            let base = mmap_anonymous(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE);
            let base = base.unwrap();
            let _ = madvise(base, length, Advice::LinuxNoHugepage);
            base
        };
        for page in (0..pages).step_by(2) {
            let byte = base.cast::<u8>().wrapping_add(page * 4096);
            // SAFETY: inside the mapping above.
            unsafe { byte.write_volatile(1) };
        }
        let wanted: Vec<Range> = (0..pages as u64)
            .step_by(2)
            .map(|page| Range {
                start: page * 4096,
                length: 4096,
            })
            .collect();
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        assert!(by_reading(&pagemap, base as u64, length as u64).unwrap() == wanted);
        match by_ioctl(&pagemap, base as u64, length as u64) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                say!("skipped: no PAGEMAP_SCAN here");
            }
            ranges => assert!(ranges.unwrap() == wanted),
        }
        // SAFETY: the mapping made above, not used after this.
        unsafe { munmap(base, length).unwrap() };
    }

    #[test]
    fn both_ways_find_the_written_pages_of_a_private_mapping() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7u8; 64 * 4096]).unwrap();
        let length = 64 * 4096usize;
        // SAFETY: a new mapping of a file of that length, unmapped at the end of the test; only this test touches it.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
                &file,
                0,
            )
            .unwrap()
        };
        let byte = |page: usize| base.cast::<u8>().wrapping_add(page * 4096);
        for page in [3, 4, 5, 40, 63] {
            // SAFETY: inside the mapping above.
            unsafe { byte(page).write_volatile(1) };
        }
        // A page that was only read stays the file's.
        // SAFETY: inside the mapping above.
        unsafe { byte(10).read_volatile() };
        let wanted = [(3, 3), (40, 1), (63, 1)].map(|(page, count)| Range {
            start: page * 4096,
            length: count * 4096,
        });
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        assert_eq!(by_reading(&pagemap, base as u64, length as u64).unwrap(), wanted);
        match by_ioctl(&pagemap, base as u64, length as u64) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                say!("skipped: no PAGEMAP_SCAN here")
            }
            ranges => assert_eq!(ranges.unwrap(), wanted),
        }
        // SAFETY: the mapping made above, not used after this.
        unsafe { munmap(base, length).unwrap() };
    }
}
