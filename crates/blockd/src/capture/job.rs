//! One capture from `capture_start` to its end: its state, and who may change it.
//!
//! ```text
//!            start              finish                all read          durable, renamed
//!   (none) ─────────> starting ──────> held ──> writing ─────────> closing ─────────────> published ──> ended
//!                        └── cancel ─────┴──────────┴── cancel ───────┴───────────────────────────────────┘
//! ```
//!
//! A cancel waits until the process's memory is no longer read, which takes one batch at most, but not for the disk:
//! in `closing` it removes the partial file and lets the writer find that out.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use aenv_layers::LayerWriter;
use aenv_wire::block::CaptureStart;

use super::CaptureError;
use super::buffer::Buffer;
use super::memory::Batch;
use super::pages::Below;
use crate::files::sibling;
use crate::process::Peer;

#[derive(Debug)]
pub(super) struct Job {
    pub(super) spec: CaptureStart,
    pub(super) cancelled: AtomicBool,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

#[derive(Debug)]
pub(super) enum State {
    Starting,
    Held(Box<Held>),
    Writing,
    Closing,
    /// The layer has its name: too late to cancel.
    Published,
    Ended,
}

/// What a started capture holds. Dropping it removes the partial layer.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) writer: LayerWriter,
    pub(super) batches: Vec<Batch>,
    pub(super) buffer: Option<Buffer>,
    pub(super) below: Below,
    pub(super) process: Peer,
}

impl Job {
    pub(super) fn new(spec: CaptureStart) -> Arc<Job> {
        let cancelled = AtomicBool::new(false);
        Arc::new(Job {
            spec,
            cancelled,
            state: Mutex::new(State::Starting),
            changed: Condvar::new(),
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, next: State) {
        *self.state() = next;
        self.changed.notify_all();
    }

    pub(super) fn take_held(&self) -> Result<Box<Held>, CaptureError> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Writing) {
            State::Held(held) => Ok(held),
            ended @ (State::Published | State::Ended) => {
                *state = ended;
                Err(CaptureError::NotFound(self.spec.job.clone()))
            }
            other => {
                *state = other;
                Err(CaptureError::Busy(self.spec.job.clone()))
            }
        }
    }
}

/// Where a layer grows until it is whole.
pub(super) fn partial_path(spec: &CaptureStart) -> PathBuf {
    sibling(Path::new(&spec.layer), ".partial")
}
