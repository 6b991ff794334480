//! The two phases of a capture on its own threads: holding dirty pages, and writing them as a layer.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use aenv_layers::LayerWriter;
use aenv_wire::block::CaptureStart;

use super::buffer::{Budget, Buffer};
use super::memory::{self, Batch};
use super::pages::{self, Below, PagesError, Totals};
use super::{CaptureError, Range};

/// Below this one thread copies faster than two are started.
const TWO_THREADS_FROM_BYTES: usize = 8 << 20;

/// Copies all ranges into memory, on two threads where there is much. Returns early when cancelled.
pub fn copy(
    spec: &CaptureStart,
    batches: &[Batch],
    budget: &std::sync::Arc<Budget>,
    cancelled: &AtomicBool,
) -> Result<Buffer, CaptureError> {
    let bytes = batches.iter().map(|batch| batch.bytes).sum();
    let mut buffer = Buffer::new(budget, bytes)?;
    let mut rest = buffer.bytes_mut();
    let mut work = Vec::with_capacity(batches.len());
    for batch in batches {
        let (destination, after) = rest.split_at_mut(batch.bytes);
        work.push((batch, destination));
        rest = after;
    }
    let work = Mutex::new(work.into_iter());
    let one_thread = || -> Result<(), CaptureError> {
        loop {
            let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((batch, destination)) = next else {
                return Ok(());
            };
            check(spec, cancelled)?;
            memory::read(spec.pid, spec.address, batch, destination)?;
        }
    };
    if bytes < TWO_THREADS_FROM_BYTES {
        one_thread()?;
    } else {
        std::thread::scope(|scope| {
            let other = scope.spawn(one_thread);
            let own = one_thread();
            let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            own.and(other)
        })?;
    }
    Ok(buffer)
}

/// Appends everything to the layer, from the buffer or straight from the process.
pub fn write(
    spec: &CaptureStart,
    batches: &[Batch],
    buffer: Option<&Buffer>,
    below: &Below,
    writer: &mut LayerWriter,
    cancelled: &AtomicBool,
) -> Result<Totals, CaptureError> {
    let mut totals = Totals::default();
    let mut scratch = Vec::new();
    let mut done = 0;
    for batch in batches {
        check(spec, cancelled)?;
        let bytes = match buffer {
            Some(buffer) => &buffer.bytes()[done..done + batch.bytes],
            None => {
                scratch.resize(batch.bytes, 0);
                memory::read(spec.pid, spec.address, batch, &mut scratch)?;
                &scratch[..]
            }
        };
        append_batch(spec, &batch.ranges, bytes, below, writer, &mut totals)?;
        done += batch.bytes;
    }
    Ok(totals)
}

fn append_batch(
    spec: &CaptureStart,
    ranges: &[Range],
    mut bytes: &[u8],
    below: &Below,
    writer: &mut LayerWriter,
    totals: &mut Totals,
) -> Result<(), CaptureError> {
    for range in ranges {
        let (own, rest) = bytes.split_at(range.length as usize);
        pages::append(writer, below, *range, own, totals).map_err(|error| match error {
            PagesError::Parent(source) => CaptureError::Parent { source },
            PagesError::Layer(source) => CaptureError::Layer {
                layer: spec.layer.clone(),
                source,
            },
        })?;
        bytes = rest;
    }
    Ok(())
}

fn check(spec: &CaptureStart, cancelled: &AtomicBool) -> Result<(), CaptureError> {
    if cancelled.load(Ordering::Relaxed) {
        return Err(CaptureError::Cancelled(spec.job.clone()));
    }
    Ok(())
}
