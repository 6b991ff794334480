//! Requests on their way from the thread that receives to the threads that answer.
//!
//! Owns the request buffers: a large request is handed over in the buffer that it was received into, and the receiver
//! goes on with another one; a small one is copied, which is cheaper than memory for a large one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::buffer::Buffer;
use crate::limits::{COPIED_REQUEST_BYTES_MAX, QUEUED_BYTES_MAX, REQUEST_BYTES_MAX, SPARE_REQUEST_BUFFERS_MAX};

/// A request, in memory of its own.
#[derive(Debug)]
pub enum Job {
    Copied(Vec<u8>),
    /// The first so many bytes of a buffer.
    Received(Buffer, usize),
}

impl Job {
    pub fn request(&self) -> &[u8] {
        match self {
            Job::Copied(bytes) => bytes,
            Job::Received(buffer, length) => &buffer[..*length],
        }
    }
}

#[derive(Debug, Default)]
pub struct Queue {
    inner: Mutex<Inner>,
    added: Condvar,
    /// Of all jobs that were taken off the receiver and are not done.
    bytes: AtomicUsize,
}

#[derive(Debug, Default)]
struct Inner {
    jobs: VecDeque<Job>,
    spare: Vec<Buffer>,
    closed: bool,
}

impl Queue {
    /// Hands over the request in the first `length` bytes of `received`, which is another buffer afterwards if need be.
    /// Without memory for that one, the request is copied.
    pub fn add(&self, received: &mut Buffer, length: usize) {
        let other = match length > COPIED_REQUEST_BYTES_MAX {
            true => self.lock().spare.pop().or_else(|| request_buffer().ok()),
            false => None,
        };
        self.push(match other {
            Some(other) => Job::Received(std::mem::replace(received, other), length),
            None => Job::Copied(received[..length].to_vec()),
        });
    }

    pub fn push(&self, job: Job) {
        self.bytes.fetch_add(job.request().len(), Ordering::Relaxed);
        self.lock().jobs.push_back(job);
        self.added.notify_one();
    }

    /// Whether the receiver is to leave further requests to the kernel for a moment.
    pub fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > QUEUED_BYTES_MAX
    }

    /// The next request; waits for one. None once the queue is closed. Caller: `done` with it.
    pub fn take(&self) -> Option<Job> {
        let mut inner = self.lock();
        loop {
            if let Some(job) = inner.jobs.pop_front() {
                return Some(job);
            }
            if inner.closed {
                return None;
            }
            inner = self.added.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub fn done(&self, job: Job) {
        self.bytes.fetch_sub(job.request().len(), Ordering::Relaxed);
        let mut inner = self.lock();
        match job {
            Job::Received(buffer, _) if inner.spare.len() < SPARE_REQUEST_BUFFERS_MAX => inner.spare.push(buffer),
            other => {
                // A mapping of a mebibyte is given back by whoever holds nothing up.
                drop(inner);
                drop(other);
            }
        }
    }

    /// Who waits for requests ends; those that are there are still taken.
    pub fn close(&self) {
        self.lock().closed = true;
        self.added.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Room for the largest request. Errors: no memory left.
pub fn request_buffer() -> std::io::Result<Buffer> {
    Buffer::resident(REQUEST_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(length: usize, byte: u8) -> Buffer {
        let mut buffer = request_buffer().unwrap();
        buffer.first(length).fill(byte);
        buffer
    }

    #[test]
    fn requests_come_out_in_order_and_small_ones_are_copied() {
        let queue = Queue::default();
        let mut buffer = received(REQUEST_BYTES_MAX, 7);
        queue.add(&mut buffer, COPIED_REQUEST_BYTES_MAX);
        assert_eq!(buffer[0], 7, "the receiver keeps its buffer");
        queue.add(&mut buffer, COPIED_REQUEST_BYTES_MAX + 1);
        assert_ne!(buffer[0], 7, "the receiver has another one");
        let first = queue.take().unwrap();
        assert!(matches!(&first, Job::Copied(bytes) if bytes.len() == COPIED_REQUEST_BYTES_MAX));
        let second = queue.take().unwrap();
        assert_eq!(second.request(), vec![7; COPIED_REQUEST_BYTES_MAX + 1]);
        queue.done(first);
        queue.done(second);
        queue.add(&mut buffer, REQUEST_BYTES_MAX);
        assert_eq!(buffer[0], 7, "a buffer is used again");
    }

    #[test]
    fn it_is_full_until_requests_are_done() {
        let queue = Queue::default();
        let mut buffer = received(REQUEST_BYTES_MAX, 1);
        while !queue.is_full() {
            queue.add(&mut buffer, REQUEST_BYTES_MAX);
        }
        let job = queue.take().unwrap();
        assert!(queue.is_full(), "taken is not done");
        queue.done(job);
        assert!(!queue.is_full());
    }

    #[test]
    fn a_closed_queue_is_emptied_and_then_ends_its_takers() {
        let queue = Queue::default();
        queue.push(Job::Copied(vec![1]));
        queue.close();
        assert!(queue.take().is_some());
        assert!(queue.take().is_none());
    }
}
