//! The threads that answer one mount.
//!
//! Requests come from the receiver (`receiver`) through a queue; each thread takes one, handles it where it stands and takes
//! the next. A handler blocks on local files, and on a store where the layers are remote: those have a limit of their own
//! (`remote::Waiting`).
//! Threads are started while all are inside handlers, up to `SERVE_THREADS_MAX`, and surplus ones end (`Crew`): together
//! with the limit per export (`export::Flight`), one slow file cannot take the mount down.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use aenv_cache::{Patience, with_patience};
use aenv_wire::block::ExportKind;

use super::abi::{self, Request, opcode};
use super::buffer::Buffer;
use super::channel::Channel;
use super::crew::Crew;
use super::queue::Queue;
use super::receiver::Receiver;
use super::{data, directory};
use crate::arguments::Settings;
use crate::export::{Begun, Export, Exports, Parked};
use crate::limits::{SECTOR_BYTES, TRANSFER_BYTES_MAX};
use crate::remote::Waiting;
use crate::stats::{Counter, Counters};
use crate::threads::spawn;
use crate::write_back::Withheld;

/// Everything that the threads of one mount share.
#[derive(Debug)]
pub struct Session {
    pub kind: ExportKind,
    pub channel: Channel,
    pub exports: Arc<Exports>,
    pub counters: Arc<Counters>,
    pub queue: Queue,
    waiting: Waiting,
    crew: Crew,
    /// Reads under way without a thread.
    ring_reads: usize,
    /// The clock of the crew.
    begun: Instant,
    /// Bytes that the threads' buffers hold.
    buffer_bytes: AtomicUsize,
}

/// Bytes of a thread's buffer: a disk read that is not aligned takes up to a sector more on either side.
const DATA_BYTES: usize = TRANSFER_BYTES_MAX + 2 * SECTOR_BYTES as usize;

impl Session {
    pub fn new(
        kind: ExportKind,
        channel: Channel,
        exports: Arc<Exports>,
        counters: Arc<Counters>,
        settings: &Settings,
    ) -> Arc<Session> {
        Arc::new(Session {
            kind,
            channel,
            exports,
            counters,
            queue: Queue::default(),
            waiting: Waiting::default(),
            crew: Crew::new(settings.threads),
            ring_reads: settings.ring_reads,
            begun: Instant::now(),
            buffer_bytes: AtomicUsize::new(0),
        })
    }

    /// Starts the threads that are there at rest, and then the receiver, which adds one to the eventfd `gone` when the mount
    /// is no more.
    pub fn start(self: &Arc<Self>, gone: OwnedFd) -> std::io::Result<()> {
        (0..self.crew.at_rest()).try_for_each(|_| self.start_thread())?;
        if self.kind == ExportKind::Disk {
            let session = self.clone();
            spawn("write-back", move || session.write_back())?;
        }
        let receiver = Receiver::new(self.clone())?;
        let reads = self.ring_reads;
        spawn("receiver", move || {
            receiver.run(reads);
            // Cannot fail: the counter is far from its end.
            let _ = rustix::io::write(&gone, &1u64.to_ne_bytes());
        })
    }

    pub fn threads(&self) -> usize {
        let receiver = 1;
        self.crew.threads() + receiver
    }

    /// The export that a request for content is about.
    pub fn export_of(&self, request: Request<'_>) -> Option<Arc<Export>> {
        self.exports
            .by_inode(request.inode())
            .filter(|export| export.kind == self.kind)
    }

    /// Answers requests that `Exports::abandon` or `unexport` took out of flight.
    pub fn refuse_all(&self, waiting: &[u64]) {
        waiting
            .iter()
            .for_each(|unique| self.channel.refuse(*unique, libc::EIO));
    }

    fn start_thread(self: &Arc<Self>) -> std::io::Result<()> {
        let session = self.clone();
        let data = Buffer::new(DATA_BYTES)?;
        self.crew.joins();
        let name = format!("{:?}", self.kind).to_lowercase();
        spawn(&name, move || session.serve(data)).inspect_err(|_| self.crew.leaves())
    }

    fn serve(self: Arc<Self>, mut data: Buffer) {
        while let Some(job) = self.queue.take() {
            if self.crew.begins() {
                // Without another thread requests only wait longer, so a failure is not worth more than going on.
                let _ = self.start_thread();
            }
            self.handle_data(Request::new(job.request()), &mut data);
            self.queue.done(job);
            data.settle(&self.buffer_bytes);
            if self.crew.ends(self.begun.elapsed()) {
                break;
            }
        }
        self.crew.leaves();
        data.give_back(&self.buffer_bytes);
    }

    /// A write is done. It is answered now, or when the disk has kept up with its export.
    fn answer_write(&self, export: &Export, answer: Withheld) {
        let kept = export.dirty.is_full()
            && export.flight.begin_without_thread(answer.unique)
            && (export.dirty.withhold(answer) || !export.flight.finish_without_thread(answer.unique));
        if !kept {
            self.answer_written(answer);
        }
    }

    fn answer_written(&self, Withheld { unique, count }: Withheld) {
        let body = abi::Body::default().u32s(&[count, 0]);
        self.channel.answer(unique, body.bytes());
    }

    fn write_back(&self) {
        self.exports.write_back.run(&self.counters, |export, answer| {
            if export.flight.finish_without_thread(answer.unique) {
                self.answer_written(answer);
            }
        });
    }

    /// Requests that touch no content.
    pub fn answer_at_once(&self, request: Request<'_>) {
        match request.opcode() {
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::NOTIFY_REPLY | opcode::DESTROY => {}
            _ => match directory::answer(self, request) {
                Ok(body) => self.channel.answer(request.unique(), body.bytes()),
                Err(errno) => self.channel.refuse(request.unique(), errno),
            },
        }
    }

    /// The guest gives memory back. The image stays whole for every other clone, and success lets the VMM drop its private
    /// copy. ENOSYS would be remembered by the kernel.
    pub fn ignore_punch(&self, request: Request<'_>) {
        self.counters.add(Counter::MemoryPunchIgnored);
        self.channel.answer(request.unique(), &[]);
    }

    /// Requests that touch content go through the export's flight table.
    fn handle_data(&self, request: Request<'_>, data: &mut Buffer) {
        let Some(export) = self.export_of(request) else {
            // Unexported meanwhile: the same error as for what was waiting then.
            return self.channel.refuse(request.unique(), libc::EIO);
        };
        match export.flight.begin(request.unique(), request.bytes()) {
            Begun::Parked => self.counters.add(Counter::Parked),
            Begun::Abandoned => self.channel.refuse(request.unique(), libc::EIO),
            Begun::Run if !export.is_remote => self.run_all(&export, request, data, Instant::now()),
            Begun::Run => self.run_remote(export, request, data),
        }
    }

    /// As `run_all`, unless too many threads are with exports that may wait for a store. Goes on with what was kept.
    fn run_remote(&self, export: Arc<Export>, request: Request<'_>, data: &mut Buffer) {
        if !self.waiting.enter(&export, request.bytes()) {
            return;
        }
        self.run_all(&export, request, data, Instant::now());
        while let Some(kept) = self.waiting.leave() {
            self.run_all(&kept.export, Request::new(&kept.request), data, kept.since);
        }
    }

    /// Handles one request that is in flight, then parked ones of the same export.
    fn run_all(&self, export: &Arc<Export>, request: Request<'_>, data: &mut Buffer, since: Instant) {
        let mut next = self.run(export, request, data, since);
        while let Some(parked) = next {
            next = self.run(export, Request::new(&parked.request), data, parked.since);
        }
    }

    fn run(&self, export: &Arc<Export>, request: Request<'_>, data: &mut Buffer, since: Instant) -> Option<Parked> {
        let unique = request.unique();
        let outcome = match export.is_remote {
            true => {
                let deadline = since + self.exports.layers.remote.outage(export.kind);
                let cancel = Some(export.cancel.clone());
                with_patience(Patience { deadline, cancel }, || {
                    data::carry_out(self, export, request, data)
                })
            }
            false => data::carry_out(self, export, request, data),
        };
        let finished = export.flight.finish(unique);
        if finished.wanted {
            match outcome {
                Ok(data::Done::Nothing) => self.channel.answer(unique, &[]),
                Ok(data::Done::Read(range)) => self.channel.answer(unique, &data[range]),
                Ok(data::Done::Written(count)) => self.answer_write(export, Withheld { unique, count }),
                Err(errno) => self.channel.refuse(unique, errno),
            }
        }
        finished.next
    }
}
