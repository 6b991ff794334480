//! Reading another process's memory with process_vm_readv: many ranges per call, in batches of bounded size.

use std::io;

use super::{CaptureError, Range};
use crate::limits::CAPTURE_CHUNK_BYTES;

/// Ranges per call; the kernel's own limit (IOV_MAX).
const RANGES_PER_CALL: usize = 1024;

/// Ranges that are read by one call. Their bytes follow each other in the destination.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch {
    pub ranges: Vec<Range>,
    pub bytes: usize,
}

/// Cuts ranges into batches, splitting a long range where a batch is full.
pub fn batches(ranges: &[Range]) -> Vec<Batch> {
    let mut batches = Vec::new();
    let mut current = Batch {
        ranges: Vec::new(),
        bytes: 0,
    };
    for range in ranges {
        let mut rest = *range;
        while rest.length > 0 {
            if current.bytes == CAPTURE_CHUNK_BYTES || current.ranges.len() == RANGES_PER_CALL {
                batches.push(std::mem::replace(
                    &mut current,
                    Batch {
                        ranges: Vec::new(),
                        bytes: 0,
                    },
                ));
            }
            let take = rest.length.min((CAPTURE_CHUNK_BYTES - current.bytes) as u64);
            current.ranges.push(Range {
                start: rest.start,
                length: take,
            });
            current.bytes += take as usize;
            rest = Range {
                start: rest.start + take,
                length: rest.length - take,
            };
        }
    }
    if current.bytes > 0 {
        batches.push(current);
    }
    batches
}

/// Copies a batch into `destination`, which has exactly its bytes. A process that ends meanwhile, or a page that is
/// not there any more, is an error: a hole must never become zeros in a layer.
pub fn read(pid: u32, address: u64, batch: &Batch, destination: &mut [u8]) -> Result<(), CaptureError> {
    let remote: Vec<libc::iovec> = batch
        .ranges
        .iter()
        .map(|range| libc::iovec {
            iov_base: (address + range.start) as *mut libc::c_void,
            iov_len: range.length as usize,
        })
        .collect();
    let local = libc::iovec {
        iov_base: destination.as_mut_ptr().cast(),
        iov_len: destination.len(),
    };
    let process = libc::pid_t::try_from(pid).map_err(|_| CaptureError::Gone { pid })?;
    // SAFETY: the kernel writes at most `destination.len()` bytes to `destination`, which we borrow exclusively; the
    // remote addresses belong to another process and are only checked by the kernel.
    let count =
        unsafe { libc::process_vm_readv(process, &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    match usize::try_from(count) {
        Ok(count) if count == destination.len() => Ok(()),
        Ok(count) => Err(CaptureError::PageLost {
            pid,
            address: address + offset_of_byte(&batch.ranges, count as u64),
        }),
        Err(_) => Err(match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ESRCH) => CaptureError::Gone { pid },
            error if error.raw_os_error() == Some(libc::EFAULT) => CaptureError::PageLost {
                pid,
                address: address + offset_of_byte(&batch.ranges, 0),
            },
            source => CaptureError::Process {
                pid,
                step: "reading the memory",
                source,
            },
        }),
    }
}

fn offset_of_byte(ranges: &[Range], mut index: u64) -> u64 {
    for range in ranges {
        if index < range.length {
            return range.start + index;
        }
        index -= range.length;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_hold_every_byte_once_and_keep_their_limits() {
        let long = 3 * CAPTURE_CHUNK_BYTES as u64 + 4096;
        let mut ranges = vec![Range { start: 0, length: long }];
        ranges.extend((0..3000).map(|index| Range {
            start: long + 8192 * (index + 1),
            length: 4096,
        }));
        let cut = batches(&ranges);
        let mut joined: Vec<Range> = Vec::new();
        for range in cut.iter().flat_map(|batch| &batch.ranges) {
            match joined.last_mut() {
                Some(last) if last.start + last.length == range.start => last.length += range.length,
                _ => joined.push(*range),
            }
        }
        assert_eq!(joined, ranges);
        for batch in &cut {
            assert!(batch.bytes <= CAPTURE_CHUNK_BYTES && batch.ranges.len() <= RANGES_PER_CALL);
            assert_eq!(
                batch.bytes as u64,
                batch.ranges.iter().map(|range| range.length).sum::<u64>()
            );
        }
        assert!(batches(&[]).is_empty());
    }

    #[test]
    fn memory_of_a_process_is_read_in_the_order_of_its_ranges() {
        let memory: Vec<u8> = (0..=255).cycle().take(16384).collect();
        let ranges = vec![
            Range {
                start: 8192,
                length: 4096,
            },
            Range { start: 100, length: 10 },
        ];
        let mut copy = vec![0; 4106];
        let batch = Batch { ranges, bytes: 4106 };
        read(std::process::id(), memory.as_ptr() as u64, &batch, &mut copy).unwrap();
        assert_eq!(copy[..4096], memory[8192..12288]);
        assert_eq!(copy[4096..], memory[100..110]);
    }

    #[test]
    fn a_page_that_is_not_there_is_an_error_and_so_is_a_process() {
        let batch = Batch {
            ranges: vec![Range {
                start: 4096,
                length: 16,
            }],
            bytes: 16,
        };
        let lost = read(std::process::id(), 0, &batch, &mut [0; 16]).unwrap_err();
        assert!(matches!(lost, CaptureError::PageLost { address: 4096, .. }), "{lost}");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let gone = read(child.id(), 0, &batch, &mut [0; 16]).unwrap_err();
        assert!(matches!(gone, CaptureError::Gone { .. }), "{gone}");
    }
}
