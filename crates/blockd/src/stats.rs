//! Counters of events since this blockd started. Cheap enough for every request; read by the `stats` operation.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use aenv_wire::block::ExportKind;

/// What is counted; the name is the protocol's.
#[derive(Debug, Clone, Copy)]
pub enum Counter {
    DiskRead,
    DiskWrite,
    DiskDiscard,
    Flush,
    MemoryRead,
    MemoryPunchIgnored,
    ReadBytes,
    WrittenBytes,
    /// Bytes that the disk was asked to take before anybody synced, and writes whose answers waited for it.
    WrittenBackBytes,
    WriteKeptBack,
    Parked,
    RequestFailed,
    Captured,
    CaptureFailed,
}

impl Counter {
    /// The reads of exports of this kind.
    pub fn read_of(kind: ExportKind) -> Counter {
        match kind {
            ExportKind::Memory => Counter::MemoryRead,
            ExportKind::Disk => Counter::DiskRead,
        }
    }
}

const NAMES: [(Counter, &str); 14] = [
    (Counter::DiskRead, "disk.read"),
    (Counter::DiskWrite, "disk.write"),
    (Counter::DiskDiscard, "disk.discard"),
    (Counter::Flush, "disk.flush"),
    (Counter::MemoryRead, "memory.read"),
    (Counter::MemoryPunchIgnored, "memory.punch_ignored"),
    (Counter::ReadBytes, "read_bytes"),
    (Counter::WrittenBytes, "written_bytes"),
    (Counter::WrittenBackBytes, "disk.written_back_bytes"),
    (Counter::WriteKeptBack, "disk.write_kept_back"),
    (Counter::Parked, "request.parked"),
    (Counter::RequestFailed, "request.failed"),
    (Counter::Captured, "capture.finished"),
    (Counter::CaptureFailed, "capture.failed"),
];

#[derive(Debug, Default)]
pub struct Counters {
    values: [AtomicU64; NAMES.len()],
}

impl Counters {
    pub fn add(&self, counter: Counter) {
        self.add_many(counter, 1);
    }

    pub fn add_many(&self, counter: Counter, count: u64) {
        self.values[counter as usize].fetch_add(count, Ordering::Relaxed);
    }

    pub fn by_name(&self) -> BTreeMap<String, u64> {
        let value = |counter: Counter| self.values[counter as usize].load(Ordering::Relaxed);
        NAMES
            .iter()
            .map(|(counter, name)| ((*name).to_owned(), value(*counter)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_is_reported_under_its_own_name() {
        for (index, (counter, _)) in NAMES.iter().enumerate() {
            assert_eq!(*counter as usize, index);
        }
        let counters = Counters::default();
        counters.add_many(Counter::ReadBytes, 7);
        assert_eq!(counters.by_name()["read_bytes"], 7);
        assert_eq!(counters.by_name().len(), NAMES.len());
    }
}
