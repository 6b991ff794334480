//! Reads of local files under way without a thread each: io_uring(7), for the thread that receives requests.
//!
//! Owns the ring, the buffers that it reads into and their safety: buffers and open files stay until the kernel is done
//! with them. Does not own what a request means (`data`) nor its answer (`receiver`).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use aenv_layers::ReadPlan;
use io_uring::{IoUring, opcode, squeue, types};

use super::buffer::Buffer;
use super::data::ReadRange;
use crate::export::Export;
use crate::limits::{RING_PIECES_MAX, RING_READ_BYTES_MAX, SECTOR_BYTES};

/// What a completion says that is none of a read's: there may be a request to receive.
const REQUESTS: u64 = u64::MAX;

/// Before the kernel is asked again after an error.
const RETRY: Duration = Duration::from_millis(1);

/// A READ that is being carried out, with what it takes to answer it, or to begin it again another way.
#[derive(Debug)]
pub struct Reading {
    pub export: Arc<Export>,
    pub unique: u64,
    pub range: ReadRange,
    pub request: Vec<u8>,
}

/// A READ that ended: its data, or none if not all of it came.
#[derive(Debug)]
pub struct Finished<'a> {
    pub reading: Reading,
    pub data: Option<&'a [u8]>,
}

pub struct Ring {
    uring: IoUring,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Slots whose reads have all ended.
    ended: Vec<usize>,
    /// Whether the kernel is going to say when there are requests.
    watching: bool,
    failures: u64,
}

#[derive(Debug)]
struct Slot {
    buffer: Buffer,
    /// Pieces that the kernel is still reading.
    pending: usize,
    /// Whether every piece that ended came whole.
    whole: bool,
    /// The plan keeps the files open.
    reading: Option<(Reading, ReadPlan)>,
}

impl Ring {
    /// For so many reads at a time, to be used by the calling thread only. Errors: the kernel has no io_uring or does not
    /// allow it.
    pub fn new(reads: usize) -> io::Result<Ring> {
        let completions = (reads * RING_PIECES_MAX + 1).next_power_of_two();
        let submissions = RING_PIECES_MAX.next_power_of_two() * 2;
        let uring = IoUring::builder()
            .setup_single_issuer()
            // What ends while we run is taken at our next call: no interrupt for it.
            .setup_coop_taskrun()
            .setup_cqsize(completions as u32)
            .build(submissions as u32)?;
        let slot = |_| {
            let buffer = Buffer::new(RING_READ_BYTES_MAX + 2 * SECTOR_BYTES as usize)?;
            Ok(Slot {
                buffer,
                pending: 0,
                whole: true,
                reading: None,
            })
        };
        Ok(Ring {
            uring,
            slots: (0..reads).map(slot).collect::<io::Result<_>>()?,
            free: (0..reads).collect(),
            ended: Vec::new(),
            watching: false,
            failures: 0,
        })
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    fn is_idle(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Begins a read; `plan` says how, for the buffer that it is given. The reading comes back if there is no such plan or no
    /// room. Caller: `submit`s it.
    pub fn begin(&mut self, reading: Reading, plan: impl FnOnce(&mut [u8]) -> Option<ReadPlan>) -> Result<(), Reading> {
        let Some(&number) = self.free.last() else {
            return Err(reading);
        };
        let slot = &mut self.slots[number];
        let span = (reading.range.sectors.end - reading.range.sectors.start) as usize;
        let Some(plan) = plan(slot.buffer.first(span)).filter(|plan| plan.reads.len() <= RING_PIECES_MAX) else {
            return Err(reading);
        };
        self.free.pop();
        slot.whole = true;
        slot.pending = plan.reads.len();
        let base = slot.buffer.first(span).as_mut_ptr();
        for read in &plan.reads {
            // The length comes back in the completion; which piece it was need not be known.
            let entry = opcode::Read::new(
                types::Fd(read.descriptor),
                base.wrapping_add(read.place),
                read.length as u32,
            );
            let entry = entry.offset(read.offset).build();
            push(&mut self.uring, &entry.user_data(tag(number, read.length)));
        }
        slot.reading = Some((reading, plan));
        if slot.pending == 0 {
            self.ended.push(number);
        }
        Ok(())
    }

    /// Hands what was begun to the kernel. An error leaves it where the next call finds it.
    pub fn submit(&mut self) {
        if !self.uring.submission().is_empty() {
            let _ = self.uring.submit();
        }
    }

    /// The next read that ended, if any did; `answer` is called with it.
    pub fn next(&mut self, answer: impl FnOnce(Finished<'_>)) -> bool {
        while self.ended.is_empty() {
            let Some(completion) = self.uring.completion().next() else {
                return false;
            };
            self.completed(completion.user_data(), completion.result());
        }
        let Some(number) = self.ended.pop() else {
            return false;
        };
        let slot = &mut self.slots[number];
        self.free.push(number);
        if let Some((reading, _plan)) = slot.reading.take() {
            let ReadRange { lead, length, .. } = reading.range;
            let data = slot.whole.then(|| &slot.buffer[lead..lead + length]);
            answer(Finished { reading, data });
        }
        true
    }

    fn completed(&mut self, user_data: u64, result: i32) {
        if user_data == REQUESTS {
            self.watching = false;
            return;
        }
        let (number, length) = untag(user_data);
        let slot = &mut self.slots[number];
        slot.whole &= usize::try_from(result) == Ok(length);
        slot.pending -= 1;
        if slot.pending == 0 {
            self.ended.push(number);
        }
    }

    /// Waits until a read has ended, or, without `pause`, until there may be requests; at most for `pause`.
    pub fn wait(&mut self, requests: BorrowedFd<'_>, pause: Option<Duration>) {
        if pause.is_none() && !self.watching {
            let entry = opcode::PollAdd::new(types::Fd(requests.as_raw_fd()), libc::POLLIN as u32).build();
            push(&mut self.uring, &entry.user_data(REQUESTS));
            self.watching = true;
        }
        let waited = match pause {
            None => self.uring.submit_and_wait(1),
            Some(pause) => {
                let limit = types::Timespec::from(pause);
                let arguments = types::SubmitArgs::new().timespec(&limit);
                self.uring.submitter().submit_with_args(1, &arguments)
            }
        };
        match waited.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) | Err((Some(libc::EINTR | libc::ETIME), _)) => {}
            // No memory for a moment: what is under way may end meanwhile.
            Err((_, error)) => {
                self.failures += 1;
                if self.failures.is_power_of_two() {
                    say!("aenv-blockd: io_uring ({} failures so far): {error}", self.failures);
                }
                std::thread::sleep(RETRY);
            }
        }
    }

    /// Waits for all that is under way, so that nothing is read into memory that is given back.
    pub fn drain(&mut self) {
        while !self.is_idle() {
            if !self.next(|_| ()) {
                let _ = self.uring.submit_and_wait(1);
            }
        }
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Ring").field("slots", &self.slots).finish()
    }
}

/// What comes back with a completion: the slot and how many bytes it should say.
fn tag(number: usize, length: usize) -> u64 {
    (number as u64) << 32 | length as u64
}

fn untag(user_data: u64) -> (usize, usize) {
    ((user_data >> 32) as usize, user_data as u32 as usize)
}

fn push(uring: &mut IoUring, entry: &squeue::Entry) {
    loop {
        // SAFETY: reads go to the buffer of a slot, which is neither moved nor used otherwise before `pending` is zero and
        // is kept until then (`drain`), from files that the slot's plan keeps open; a poll names the mount's descriptor,
        // which the session keeps open.
        if unsafe { uring.submission().push(entry) }.is_ok() {
            return;
        }
        // Room for two reads' pieces: so it is full only if the kernel refused what was there, for want of memory.
        if uring.submit().is_err() {
            std::thread::sleep(RETRY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_comes_back_as_it_was() {
        for (number, length) in [(0, 0), (0, RING_READ_BYTES_MAX), (4095, 512)] {
            assert_eq!(untag(tag(number, length)), (number, length));
        }
        assert_ne!(tag(4095, RING_READ_BYTES_MAX), REQUESTS);
    }
}
