//! Sends a stream in parts, several at a time, each until the store has it.
//!
//! The stream is cut into parts by the thread that makes it; workers send them. A part that an earlier process sent is
//! not sent again, if its content is still the same. Memory: one part per worker and the one that is being filled.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use aenv_store::{Bucket, Digest, UploadId};
use bytes::Bytes;

use crate::error::Failed;
use crate::journal::{Journal, SentPart};
use crate::patience::Patience;
use crate::progress::Progress;
use crate::recipe::Broken;

/// One upload under way.
pub(crate) struct Parts<'a> {
    pub bucket: &'a Bucket,
    pub key: &'a str,
    pub upload: &'a UploadId,
    pub part_bytes: usize,
    pub parallel: usize,
    pub patience: &'a Patience,
    pub progress: &'a Progress,
    pub journal: Mutex<&'a mut Journal>,
    /// The first failure of a worker; it ends the whole.
    pub failure: Mutex<Option<Failed>>,
}

struct Part {
    number: usize,
    bytes: Vec<u8>,
}

impl Parts<'_> {
    /// Sends all that `produce` writes; returns how many parts that were. All are in the journal then.
    pub fn send(&self, produce: impl FnOnce(&mut dyn Write) -> Result<(), Broken>) -> Result<usize, Failed> {
        // No buffer between: a part in a queue would be memory that nobody works on.
        let (sender, receiver) = sync_channel(0);
        let receiver = Mutex::new(receiver);
        let produced = std::thread::scope(|scope| {
            for _ in 0..self.parallel {
                scope.spawn(|| self.work(&receiver));
            }
            let mut cutter = Cutter {
                sender,
                part: Vec::new(),
                number: 0,
                part_bytes: self.part_bytes,
                failed: &self.failure,
            };
            produce(&mut cutter)?;
            cutter.finish().map_err(Broken::Sink)
        });
        // The worker's failure comes first: what the producer met is its consequence.
        match (locked(&self.failure).take(), produced) {
            (Some(failure), _) => Err(failure),
            (None, Ok(count)) => Ok(count),
            (None, Err(Broken::Source(failure))) => Err(failure),
            (None, Err(Broken::Sink(source))) => Err(Failed::File {
                path: self.key.into(),
                step: "send a part",
                source,
            }),
        }
    }

    fn work(&self, parts: &Mutex<Receiver<Part>>) {
        loop {
            let next = locked(parts).recv();
            let Ok(part) = next else {
                return;
            };
            // After a failure the rest is only taken off the producer's hands until it notices.
            if locked(&self.failure).is_some() {
                continue;
            }
            if let Err(failure) = self.send_part(part) {
                locked(&self.failure).get_or_insert(failure);
            }
        }
    }

    fn send_part(&self, part: Part) -> Result<(), Failed> {
        let (number, length) = (part.number, part.bytes.len() as u64);
        let sha256 = Digest::of(&part.bytes);
        let known = locked(&self.journal)
            .part(number)
            .is_some_and(|sent| sent.sha256 == sha256);
        if !known {
            let bytes = Bytes::from(part.bytes);
            let timeout = self.patience.attempt_for(length * self.parallel as u64);
            let put = || {
                self.bucket
                    .put_part(self.key, self.upload, number, bytes.clone(), timeout)
            };
            let tag = self.patience.retry(put)?;
            locked(&self.journal).record(SentPart {
                part: number,
                tag,
                sha256,
            })?;
        }
        self.progress.advance(length);
        Ok(())
    }
}

/// Cuts what is written to it into parts.
struct Cutter<'a> {
    sender: SyncSender<Part>,
    part: Vec<u8>,
    number: usize,
    part_bytes: usize,
    failed: &'a Mutex<Option<Failed>>,
}

impl Cutter<'_> {
    fn hand_over(&mut self) -> io::Result<()> {
        let part = Part {
            number: self.number,
            bytes: std::mem::take(&mut self.part),
        };
        self.number += 1;
        self.sender.send(part).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn finish(mut self) -> io::Result<usize> {
        if !self.part.is_empty() {
            self.hand_over()?;
        }
        Ok(self.number)
    }
}

impl Write for Cutter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if locked(self.failed).is_some() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if self.part.is_empty() {
            self.part.reserve_exact(self.part_bytes);
        }
        let taken = bytes.len().min(self.part_bytes - self.part.len());
        self.part.extend_from_slice(&bytes[..taken]);
        if self.part.len() == self.part_bytes {
            self.hand_over()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A poisoned lock is still a lock: what it guards is changed by single calls.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
