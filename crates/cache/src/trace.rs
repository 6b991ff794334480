//! The order in which blocks of remote blobs were first read: noted at one start, replayed as a prefetch at the next.
//!
//! A trace's file is JSON: `{"aenv_trace":1,"blobs":[{"digest","block_bytes"}],"runs":[[blob, first block, count],...]}`,
//! blobs by their place in the list.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::limits::{TRACE_BLOCKS_MAX, TRACE_FILE_BYTES_MAX, TRACE_GAP_BLOCKS_MAX, TRACE_WINDOW_RUNS, TRACES_MAX};

/// A finished trace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    aenv_trace: u32,
    blobs: Vec<TracedBlob>,
    runs: Vec<(u32, u64, u64)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct TracedBlob {
    digest: String,
    block_bytes: u64,
}

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("not a trace: {0}")]
    Malformed(#[from] serde_json::Error),
    #[error("a trace of {0} bytes is over the limit of {TRACE_FILE_BYTES_MAX}")]
    TooLong(u64),
    #[error("trace version {0} is not known")]
    Version(u32),
    #[error("run {0} of the trace names a blob that it does not list, or no block")]
    BadRun(usize),
    #[error("no trace is named {0:?}")]
    NotFound(String),
    #[error("{TRACES_MAX} traces are running")]
    TooMany,
}

impl Trace {
    /// Errors: `Malformed`, `TooLong`, `Version`, `BadRun`.
    pub fn parse(json: &[u8]) -> Result<Trace, TraceError> {
        if json.len() as u64 > TRACE_FILE_BYTES_MAX {
            return Err(TraceError::TooLong(json.len() as u64));
        }
        let trace: Trace = serde_json::from_slice(json)?;
        if trace.aenv_trace != 1 {
            return Err(TraceError::Version(trace.aenv_trace));
        }
        let bad = |(blob, first, count): &(u32, u64, u64)| {
            let listed = trace.blobs.get(*blob as usize).is_some_and(|blob| blob.block_bytes > 0);
            !listed || *count == 0 || first.checked_add(*count).is_none_or(|end| end > u64::from(u32::MAX))
        };
        match trace.runs.iter().position(bad) {
            Some(run) => Err(TraceError::BadRun(run)),
            None => Ok(trace),
        }
    }

    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_else(|error| unreachable!("a trace is always JSON: {error}"))
    }

    pub fn blocks(&self) -> u64 {
        self.runs.iter().map(|(_, _, count)| count).sum()
    }

    pub fn digests(&self) -> impl Iterator<Item = &str> {
        self.blobs.iter().map(|blob| blob.digest.as_str())
    }

    /// Ranges of bytes to fetch, by place of the blob in `digests`: nearly in the order of the reads. Within a window of
    /// runs, neighbours become one range, since every range costs a round trip.
    pub(crate) fn ranges(&self) -> Vec<(usize, Range<u64>)> {
        let mut ranges = Vec::new();
        for window in self.runs.chunks(TRACE_WINDOW_RUNS) {
            let mut sorted = window.to_vec();
            sorted.sort_unstable();
            let mut joined: Vec<(u32, u64, u64)> = Vec::new();
            for (blob, first, count) in sorted {
                match joined.last_mut() {
                    Some(last) if last.0 == blob && first <= last.1 + last.2 + TRACE_GAP_BLOCKS_MAX => {
                        last.2 = last.2.max(first + count - last.1);
                    }
                    _ => joined.push((blob, first, count)),
                }
            }
            ranges.extend(joined.into_iter().map(|(blob, first, count)| {
                let blob = blob as usize;
                let bytes = self.blobs[blob].block_bytes;
                (blob, first.saturating_mul(bytes)..(first + count).saturating_mul(bytes))
            }));
        }
        ranges
    }
}

/// The traces that are being noted.
#[derive(Debug, Default)]
pub(crate) struct Tracer {
    running: AtomicUsize,
    traces: Mutex<HashMap<String, Recording>>,
}

#[derive(Debug, Default)]
struct Recording {
    /// None: every blob.
    only: Option<HashSet<String>>,
    trace: Trace,
    places: HashMap<String, u32>,
    seen: HashSet<(u32, u64)>,
}

impl Tracer {
    pub fn start(&self, name: &str, only: Option<HashSet<String>>) -> Result<(), TraceError> {
        let mut traces = self.traces();
        if traces.contains_key(name) {
            return Ok(());
        }
        if traces.len() >= TRACES_MAX {
            return Err(TraceError::TooMany);
        }
        let recording = Recording {
            only,
            trace: Trace {
                aenv_trace: 1,
                ..Trace::default()
            },
            ..Recording::default()
        };
        traces.insert(name.to_owned(), recording);
        self.running.store(traces.len(), Ordering::Relaxed);
        Ok(())
    }

    pub fn finish(&self, name: &str) -> Result<Trace, TraceError> {
        let mut traces = self.traces();
        let recording = traces
            .remove(name)
            .ok_or_else(|| TraceError::NotFound(name.to_owned()))?;
        self.running.store(traces.len(), Ordering::Relaxed);
        Ok(recording.trace)
    }

    /// Told of every read; costs one load while nothing is traced.
    pub fn note(&self, digest: &str, block_bytes: u64, blocks: &Range<u64>) {
        if self.running.load(Ordering::Relaxed) > 0 {
            self.traces()
                .values_mut()
                .for_each(|recording| recording.note(digest, block_bytes, blocks));
        }
    }

    fn traces(&self) -> MutexGuard<'_, HashMap<String, Recording>> {
        self.traces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recording {
    fn note(&mut self, digest: &str, block_bytes: u64, blocks: &Range<u64>) {
        if self.only.as_ref().is_some_and(|only| !only.contains(digest)) {
            return;
        }
        let place = match self.places.get(digest) {
            Some(place) => *place,
            None => {
                let place = self.trace.blobs.len() as u32;
                self.trace.blobs.push(TracedBlob {
                    digest: digest.to_owned(),
                    block_bytes,
                });
                self.places.insert(digest.to_owned(), place);
                place
            }
        };
        for block in blocks.clone() {
            if self.seen.len() >= TRACE_BLOCKS_MAX || !self.seen.insert((place, block)) {
                continue;
            }
            match self.trace.runs.last_mut() {
                Some((blob, first, count)) if *blob == place && *first + *count == block => *count += 1,
                _ => self.trace.runs.push((place, block, 1)),
            }
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn traced(reads: &[(&str, Range<u64>)]) -> Trace {
        let tracer = Tracer::default();
        tracer.note("before", 4096, &(0..1));
        tracer.start("t", None).unwrap();
        reads
            .iter()
            .for_each(|(digest, blocks)| tracer.note(digest, 4096, blocks));
        tracer.finish("t").unwrap()
    }

    #[test]
    fn blocks_are_noted_once_in_the_order_of_their_first_reads() {
        let trace = traced(&[("a", 9..11), ("b", 0..1), ("a", 9..12), ("a", 12..13), ("a", 0..1)]);
        let expected = br#"{"aenv_trace":1,"blobs":[{"digest":"a","block_bytes":4096},{"digest":"b","block_bytes":4096}],"runs":[[0,9,2],[1,0,1],[0,11,2],[0,0,1]]}"#;
        assert_eq!(trace.to_json(), expected);
        assert_eq!(trace.blocks(), 6);
        assert_eq!(Trace::parse(expected).unwrap(), trace);
    }

    #[test]
    fn neighbours_and_small_gaps_become_one_range() {
        let trace = traced(&[("a", 9..10), ("b", 0..1), ("a", 11..12), ("a", 30..31)]);
        let ranges: Vec<_> = trace
            .ranges()
            .into_iter()
            .map(|(blob, range)| (blob, range.start / 4096, range.end / 4096))
            .collect();
        assert_eq!(ranges, [(0, 9, 12), (0, 30, 31), (1, 0, 1)]);
    }

    #[test]
    fn only_the_named_blobs_count() {
        let tracer = Tracer::default();
        tracer.start("t", Some(HashSet::from(["b".to_owned()]))).unwrap();
        tracer.note("a", 4096, &(0..5));
        tracer.note("b", 4096, &(0..2));
        assert_eq!(tracer.finish("t").unwrap().blocks(), 2);
        assert!(matches!(tracer.finish("t"), Err(TraceError::NotFound(_))));
    }

    #[test]
    fn files_that_are_no_traces_are_refused() {
        let bad = [
            "",
            "{}",
            r#"{"aenv_trace":2,"blobs":[],"runs":[]}"#,
            r#"{"aenv_trace":1,"blobs":[],"runs":[[0,0,1]]}"#,
            r#"{"aenv_trace":1,"blobs":[{"digest":"a","block_bytes":0}],"runs":[[0,0,1]]}"#,
            r#"{"aenv_trace":1,"blobs":[{"digest":"a","block_bytes":4096}],"runs":[[0,18446744073709551615,1]]}"#,
            r#"{"aenv_trace":1,"blobs":[{"digest":"a","block_bytes":4096}],"runs":[[0,0,0]]}"#,
        ];
        for text in bad {
            assert!(Trace::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
