//! All captures of this blockd, by name.
//!
//! Jobs live in memory alone; what the next blockd must know of them, the partial file to remove, is in one small file
//! per job.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aenv_layers::{LayerWriter, Uuid};
use aenv_wire::block::{CaptureFinishOk, CaptureStart, CaptureStartOk, ExportKind, Hold};

use super::buffer::Budget;
use super::job::{Held, Job, State, partial_path};
use super::memory;
use super::pages::Below;
use super::{CaptureError, base, mapping, scan, write};
use crate::export::{Exports, check_name, check_path};
use crate::files::{remove_if_there, rename_new, sync_with_directory, write_atomically};
use crate::limits::{BUSY_WAIT, CAPTURES_MAX, PAGE_BYTES};
use crate::process::Peer;

/// All captures of this blockd.
#[derive(Debug)]
pub struct Captures {
    exports: Arc<Exports>,
    budget: Arc<Budget>,
    folder: PathBuf,
    jobs: Mutex<HashMap<String, Arc<Job>>>,
}

impl Captures {
    pub fn new(state_dir: &Path, exports: Arc<Exports>, buffer_bytes_max: u64) -> Captures {
        let folder = state_dir.join("captures");
        Captures {
            exports,
            budget: Budget::new(buffer_bytes_max),
            folder,
            jobs: Mutex::default(),
        }
    }

    /// Removes what captures of a blockd that died left behind. Call it before the first `start`.
    pub fn clean_up(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let partial = fs::read_to_string(&path)?;
            if Path::new(&partial).is_absolute() {
                say!("aenv-blockd: removing the partial layer {partial} of a capture that was cut off");
                remove_if_there(Path::new(&partial))?;
            }
            remove_if_there(&path)?;
        }
        Ok(())
    }

    pub fn count(&self) -> usize {
        self.jobs().len()
    }

    pub fn buffer_bytes(&self) -> u64 {
        self.budget.used()
    }

    pub fn start(&self, spec: CaptureStart) -> Result<CaptureStartOk, CaptureError> {
        check_name(&spec.job)?;
        check_path(&spec.layer)?;
        let job = self.insert(spec)?;
        let started = self.hold(&job);
        let mut state = job.state();
        let cancelled = job.cancelled.load(Ordering::Relaxed);
        let ended = match started {
            Ok((held, answer)) if !cancelled => {
                *state = State::Held(Box::new(held));
                return Ok(answer);
            }
            Ok(_) => Err(CaptureError::Cancelled(job.spec.job.clone())),
            Err(error) => Err(error),
        };
        self.end(&job, state);
        ended
    }

    pub fn finish(&self, name: &str) -> Result<CaptureFinishOk, CaptureError> {
        let started = Instant::now();
        let job = self.job(name)?;
        let held = job.take_held()?;
        let outcome = self.write(&job, *held, started);
        self.end(&job, job.state());
        outcome
    }

    pub fn cancel(&self, name: &str) -> Result<(), CaptureError> {
        let job = self.job(name)?;
        job.cancelled.store(true, Ordering::Relaxed);
        let mut state = job.state();
        let deadline = Instant::now() + BUSY_WAIT;
        loop {
            match &*state {
                State::Held(_) => {
                    self.end(&job, state);
                    return Ok(());
                }
                State::Published => return Err(CaptureError::NotFound(name.to_owned())),
                State::Ended => return Ok(()),
                State::Closing => {
                    let partial = partial_path(&job.spec);
                    return remove_if_there(&partial).map_err(|source| CaptureError::Record { source });
                }
                State::Starting | State::Writing => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Err(CaptureError::Busy(name.to_owned()));
            }
            state = job
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Cancels everything, when the daemon ends in order.
    pub fn cancel_all(&self) {
        let names: Vec<String> = self.jobs().keys().cloned().collect();
        for name in names {
            if let Err(error) = self.cancel(&name) {
                say!("aenv-blockd: capture {name} could not be cancelled: {error}");
            }
        }
    }

    fn insert(&self, spec: CaptureStart) -> Result<Arc<Job>, CaptureError> {
        let mut jobs = self.jobs();
        if jobs.contains_key(&spec.job) {
            return Err(CaptureError::Exists(spec.job));
        }
        if jobs.len() >= CAPTURES_MAX {
            return Err(CaptureError::TooMany);
        }
        let job = Job::new(spec);
        jobs.insert(job.spec.job.clone(), job.clone());
        Ok(job)
    }

    fn hold(&self, job: &Job) -> Result<(Held, CaptureStartOk), CaptureError> {
        let spec = &job.spec;
        let parent = self.exports.by_name(&spec.parent)?;
        if parent.kind != ExportKind::Memory {
            return Err(CaptureError::NotAnImage {
                parent: spec.parent.clone(),
            });
        }
        check_range(spec, parent.size_bytes)?;
        if Path::new(&spec.layer).exists() {
            return Err(CaptureError::LayerExists(spec.layer.clone()));
        }
        let process = Peer::of(spec.pid).map_err(|_| CaptureError::Gone { pid: spec.pid })?;
        mapping::check(spec.pid, &spec.parent, parent.inode, spec.address, spec.length_bytes)?;
        let content = parent.content(&self.exports.layers)?;
        let begun = Instant::now();
        let ranges = scan::dirty_ranges(spec.pid, spec.address, spec.length_bytes)?;
        let scan_us = micros(begun.elapsed());
        let dirty_bytes = ranges.iter().map(|range| range.length).sum();
        let base = match &spec.base {
            Some(base) => base::usable(
                &self.exports.layers,
                &parent.snapshot().layers,
                base,
                &ranges,
                parent.size_bytes,
            )?,
            None => None,
        };
        let writer = self.reserve(spec, parent.size_bytes, dirty_bytes)?;
        let begun = Instant::now();
        let batches = memory::batches(&ranges);
        let buffer = match spec.hold {
            Hold::Buffer => Some(write::copy(spec, &batches, &self.budget, &job.cancelled)?),
            Hold::Process => None,
        };
        let below = match &base {
            Some(base) => Below::Base(base.clone()),
            None => Below::Image(content),
        };
        let answer = CaptureStartOk {
            dirty_bytes,
            scan_us,
            copy_us: micros(begun.elapsed()),
            based: base.is_some(),
        };
        Ok((
            Held {
                writer,
                batches,
                buffer,
                below,
                process,
            },
            answer,
        ))
    }

    /// Makes the partial file with all the room it can need: a full disk must show while the VMM is still stopped.
    fn reserve(&self, spec: &CaptureStart, virtual_size: u64, dirty_bytes: u64) -> Result<LayerWriter, CaptureError> {
        let partial = partial_path(spec);
        let record = |source| CaptureError::Record { source };
        write_atomically(&self.record_path(&spec.job), partial.as_os_str().as_encoded_bytes()).map_err(record)?;
        let failed = |source| CaptureError::Layer {
            layer: spec.layer.clone(),
            source,
        };
        let mut writer = LayerWriter::create(&partial, virtual_size, Uuid::NIL).map_err(failed)?;
        // At worst every page is a run of its own: data and zeros in turn.
        writer.reserve(dirty_bytes, dirty_bytes / PAGE_BYTES).map_err(failed)?;
        Ok(writer)
    }

    fn write(&self, job: &Job, held: Held, started: Instant) -> Result<CaptureFinishOk, CaptureError> {
        let spec = &job.spec;
        let Held {
            mut writer,
            batches,
            buffer,
            below,
            process,
        } = held;
        let totals = write::write(spec, &batches, buffer.as_ref(), &below, &mut writer, &job.cancelled)?;
        // The number may have been given to another process while we read; the pidfd tells.
        if buffer.is_none() && process.wait(Some(Duration::ZERO)) {
            return Err(CaptureError::Gone { pid: spec.pid });
        }
        job.enter(State::Closing);
        drop((buffer, batches));
        self.close(job, writer)?;
        Ok(CaptureFinishOk {
            layer: spec.layer.clone(),
            data_bytes: totals.data_bytes,
            zero_bytes: totals.zero_bytes,
            skipped_bytes: totals.skipped_bytes,
            duration_us: micros(started.elapsed()),
        })
    }

    /// Seals, syncs, and gives the layer its name, unless it was cancelled meanwhile.
    fn close(&self, job: &Job, writer: LayerWriter) -> Result<(), CaptureError> {
        let (spec, partial) = (&job.spec, partial_path(&job.spec));
        let cancelled = || CaptureError::Cancelled(spec.job.clone());
        let finished = writer.finish();
        if job.cancelled.load(Ordering::Relaxed) {
            let _ = remove_if_there(&partial);
            return Err(cancelled());
        }
        drop(finished.map_err(|source| CaptureError::Layer {
            layer: spec.layer.clone(),
            source,
        })?);
        let durable = |source| CaptureError::Durable {
            layer: spec.layer.clone(),
            source,
        };
        let synced = fs::File::open(&partial).and_then(|file| file.sync_all());
        // From here to the rename a cancel must not come between.
        let mut state = job.state();
        if job.cancelled.load(Ordering::Relaxed) {
            let _ = remove_if_there(&partial);
            return Err(cancelled());
        }
        let named = synced.and_then(|()| rename_new(&partial, Path::new(&spec.layer)));
        match named {
            Ok(()) => *state = State::Published,
            Err(_) => drop(remove_if_there(&partial)),
        }
        drop(state);
        named
            .and_then(|()| sync_with_directory(Path::new(&spec.layer)))
            .map_err(durable)
    }

    /// The last step of every capture, whatever became of it.
    fn end(&self, job: &Arc<Job>, mut state: MutexGuard<'_, State>) {
        *state = State::Ended;
        if let Err(error) = remove_if_there(&self.record_path(&job.spec.job)) {
            say!(
                "aenv-blockd: cannot remove the record of capture {}: {error}",
                job.spec.job
            );
        }
        self.jobs().remove(&job.spec.job);
        job.changed.notify_all();
    }

    fn job(&self, name: &str) -> Result<Arc<Job>, CaptureError> {
        self.jobs()
            .get(name)
            .cloned()
            .ok_or_else(|| CaptureError::NotFound(name.to_owned()))
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<String, Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_path(&self, job: &str) -> PathBuf {
        self.folder.join(job)
    }
}

fn check_range(spec: &CaptureStart, image_bytes: u64) -> Result<(), CaptureError> {
    let (address, length_bytes) = (spec.address, spec.length_bytes);
    let aligned = address % PAGE_BYTES == 0 && length_bytes % PAGE_BYTES == 0;
    let fits = length_bytes > 0 && length_bytes <= image_bytes && address.checked_add(length_bytes).is_some();
    if aligned && fits {
        Ok(())
    } else {
        Err(CaptureError::BadRange { address, length_bytes })
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
