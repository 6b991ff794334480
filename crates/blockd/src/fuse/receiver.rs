//! The one thread of a mount that receives requests.
//!
//! It never waits inside of a request: small reads of local files go through its ring, what needs neither files nor locks
//! is answered on the spot, and the rest goes to the threads of the session. A few at a time, in turns: whole batches would
//! leave the disk idle while answers go out and the guest idle while the disk works; single ones cost more calls.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use aenv_wire::block::ExportKind;
use rustix::event::{PollFd, PollFlags, poll};

use super::abi::{Request, opcode};
use super::buffer::Buffer;
use super::channel::Received;
use super::data::ReadRange;
use super::queue::Job;
use super::ring::{Finished, Reading, Ring};
use super::session::Session;
use crate::export::Content;
use crate::limits::RING_READ_BYTES_MAX;
use crate::stats::Counter;

/// Requests received, and reads answered, before the other is seen to.
const AT_A_TIME: usize = 4;

/// How long requests stay with the kernel when there are too many here, before we look again.
const FULL_PAUSE: Duration = Duration::from_millis(1);

pub struct Receiver {
    session: Arc<Session>,
    buffer: Buffer,
    ring: Option<Ring>,
}

impl Receiver {
    /// Errors: no memory.
    pub fn new(session: Arc<Session>) -> std::io::Result<Receiver> {
        Ok(Receiver {
            session,
            buffer: super::queue::request_buffer()?,
            ring: None,
        })
    }

    /// Receives until the mount is gone, with a ring of so many reads. None, or a kernel that does not allow one: threads
    /// carry all reads out.
    pub fn run(mut self, reads: usize) {
        // Here and not in `new`: a ring belongs to the thread that made it.
        self.ring = (reads > 0).then(|| Ring::new(reads)).and_then(|ring| {
            ring.inspect_err(|error| say!("aenv-blockd: no io_uring ({error}): threads carry out all reads"))
                .ok()
        });
        while let Some(received) = self.receive_some() {
            let answered = self.answer_some();
            if received + answered == 0 {
                self.wait();
            }
        }
        if let Some(ring) = &mut self.ring {
            ring.drain();
        }
        self.session.queue.close();
    }

    /// How many requests were received and are under way; None when the mount is gone.
    fn receive_some(&mut self) -> Option<usize> {
        let mut received = 0;
        while received < AT_A_TIME && !self.session.queue.is_full() {
            match self.buffer.fill(|all| self.session.channel.receive(all)) {
                Received::Request(length) => self.dispatch(length),
                Received::Nothing => break,
                Received::Gone => return None,
            }
            received += 1;
        }
        if let Some(ring) = &mut self.ring {
            ring.submit();
        }
        Some(received)
    }

    /// How many reads of the ring have ended and are answered.
    fn answer_some(&mut self) -> usize {
        let Some(ring) = &mut self.ring else { return 0 };
        let session = &self.session;
        (0..AT_A_TIME)
            .take_while(|_| ring.next(|finished| answer(session, finished)))
            .count()
    }

    fn wait(&mut self) {
        let pause = self.session.queue.is_full().then_some(FULL_PAUSE);
        let descriptor = self.session.channel.descriptor();
        match (&mut self.ring, pause) {
            (Some(ring), _) => ring.wait(descriptor.as_fd(), pause),
            (None, Some(pause)) => std::thread::sleep(pause),
            // An error is an interruption; the next look at the descriptor says what there is.
            (None, None) => drop(poll(&mut [PollFd::new(descriptor, PollFlags::IN)], None)),
        }
    }

    fn dispatch(&mut self, length: usize) {
        let session = &self.session;
        let request = Request::new(&self.buffer[..length]);
        match request.opcode() {
            opcode::READ if begin_read(session, self.ring.as_mut(), request) => {}
            opcode::FALLOCATE if session.kind == ExportKind::Memory => session.ignore_punch(request),
            opcode::READ | opcode::WRITE | opcode::FALLOCATE => session.queue.add(&mut self.buffer, length),
            _ => session.answer_at_once(request),
        }
    }
}

/// Whether the read is under way in the ring.
fn begin_read(session: &Session, ring: Option<&mut Ring>, request: Request<'_>) -> bool {
    let Some(ring) = ring.filter(|ring| ring.has_room()) else {
        return false;
    };
    let Some(export) = session.export_of(request).filter(|export| !export.is_remote) else {
        return false;
    };
    let (Some(content), Ok(range)) = (export.opened(), ReadRange::of(&export, request)) else {
        return false;
    };
    // Large reads are mostly the copying of their bytes, which several threads do faster than one.
    if range.length == 0 || range.length > RING_READ_BYTES_MAX {
        return false;
    }
    if !export.flight.begin_without_thread(request.unique()) {
        return false;
    }
    session.exports.write_back.saw_read(export.inode);
    let start = range.sectors.start;
    let reading = Reading {
        unique: request.unique(),
        request: request.bytes().to_vec(),
        range,
        export,
    };
    let begun = ring.begin(reading, |buf| plan(&content, buf, start));
    begun
        .map_err(|reading| reading.export.flight.finish_without_thread(reading.unique))
        .is_ok()
}

fn plan(content: &Content, buf: &mut [u8], offset: u64) -> Option<aenv_layers::ReadPlan> {
    content.plan_read(buf, offset).ok().flatten()
}

/// What did not come whole is read again by a thread, which knows what to say of it.
fn answer(session: &Session, finished: Finished<'_>) {
    let Finished { reading, data } = finished;
    let wanted = reading.export.flight.finish_without_thread(reading.unique);
    match data {
        _ if !wanted => {}
        Some(data) => {
            session.counters.add(Counter::read_of(session.kind));
            session.counters.add_many(Counter::ReadBytes, data.len() as u64);
            session.channel.answer(reading.unique, data);
        }
        None => session.queue.push(Job::Copied(reading.request)),
    }
}
