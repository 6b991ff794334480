//! Mutations of the golden files, for a second or for as long as `AENV_FUZZ_SECONDS` says (CI: 60), from the seed in
//! `AENV_FUZZ_SEED` or a fixed one. An open may refuse; nothing may panic, and nothing may take much memory because a file
//! claims to be large. Checksums are made right again in half of the cases, or little would get past them.
//!
//! Coverage-guided fuzzing needs a nightly compiler; the formats are small enough to know where their numbers are.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use aenv_layers::{Blob, Canonical, Layer};
use support::Memory;

/// The largest file of the corpus has 100 KiB; a chunk of an index or of a batch is a MiB.
const ALLOCATION_BYTES_MAX: usize = 16 << 20;
const DEFAULT_SECONDS: u64 = 1;
const DEFAULT_SEED: u64 = 0x5eed;
const INTERESTING: [u64; 12] = [
    0,
    1,
    4,
    7,
    511,
    512,
    4096,
    1 << 20,
    1 << 32,
    (1 << 50) - 1,
    u64::MAX - 4095,
    u64::MAX,
];

/// Notes the largest allocation.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls go to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit.max(1)
    }
}

fn corpus() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../spec/layers");
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".hex") && !name.starts_with("upper") {
            files.push((name, support::vector(&path)));
        } else if [".lsmt", ".zfile", ".tar"].iter().any(|suffix| name.ends_with(suffix)) {
            files.push((name, std::fs::read(path).unwrap()));
        }
    }
    // The order of a directory is nobody's promise, and a seed should name one case.
    files.sort();
    assert!(files.len() >= 15);
    files
}

/// Where numbers are: both ends, and what lies before the trailer.
fn place(random: &mut Random, length: usize) -> usize {
    let at = match random.below(5) {
        0 => random.below(160),
        1 => length.saturating_sub(4096) + random.below(160),
        2 => length.saturating_sub(512) + random.below(96),
        3 => length.saturating_sub(random.below(9000)),
        _ => random.below(length),
    };
    at.min(length.saturating_sub(8))
}

fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..1 + random.below(4) {
        if bytes.len() < 16 {
            return;
        }
        let at = place(random, bytes.len());
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => {
                let value = INTERESTING[random.below(INTERESTING.len())].wrapping_add(random.below(3) as u64);
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            3 => {
                let value = (random.next() as u32 >> random.below(32)).to_le_bytes();
                bytes[at..at + 4].copy_from_slice(&value);
            }
            4 => {
                let from = random.below(bytes.len() - 8);
                let count = 1 + random.below(64.min(bytes.len() - at.max(from)));
                bytes.copy_within(from..from + count, at);
            }
            _ => bytes.truncate(bytes.len() - random.below(bytes.len() / 2)),
        }
    }
}

/// Makes the checksums of a ZFile right, and takes ours off an LSMT file.
fn forge(bytes: &mut [u8]) {
    let length = bytes.len();
    if length >= 1024 && bytes.starts_with(b"ZFile") {
        let number = |at: usize| usize::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let (offset, entries) = (number(length - 472), number(length - 464));
        let table = entries
            .checked_mul(4)
            .and_then(|size| offset.checked_add(size))
            .and_then(|end| bytes.get(offset..end));
        if let Some(crc) = table.map(|table| !crc32c::crc32c_append(!0, table)) {
            bytes[length - 448..length - 444].copy_from_slice(&crc.to_le_bytes());
        }
        for at in [0, length - 512] {
            bytes[at + 28..at + 32].fill(0);
            let crc = !crc32c::crc32c_append(!0, &bytes[at..at + 512]);
            bytes[at + 28..at + 32].copy_from_slice(&crc.to_le_bytes());
        }
    } else if length >= 8192 && bytes.starts_with(b"LSMT") {
        bytes[length - 4096 + 134] = 0;
    }
}

/// Everything that a node would do with the file.
fn use_it(bytes: Vec<u8>) -> bool {
    let Ok(layer) = Layer::open_blob(Path::new("fuzz"), Arc::new(Memory::new("fuzz", bytes))) else {
        return false;
    };
    let mut buf = vec![0; 1 << 20];
    for segment in layer.segments().iter().filter(|segment| !segment.is_zero()) {
        let part = &mut buf[..((segment.sectors() * 512) as usize).min(1 << 20)];
        let _ = layer.blob().read_exact_at(part, segment.file_sector() * 512);
    }
    let canonical = Canonical::new(&layer);
    let mut offset = 0;
    while offset < canonical.len_bytes().min(64 << 20) {
        let count = (canonical.len_bytes() - offset).min(1 << 20);
        if canonical.read_exact_at(&mut buf[..count as usize], offset).is_err() {
            break;
        }
        offset += count;
    }
    true
}

#[test]
fn mutated_files_never_panic_nor_take_much_memory() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let time = Duration::from_secs(number("AENV_FUZZ_SECONDS", DEFAULT_SECONDS));
    let first = number("AENV_FUZZ_SEED", DEFAULT_SEED);
    let corpus = corpus();
    let started = Instant::now();
    let (mut cases, mut opened) = (0u64, 0u64);
    while started.elapsed() < time {
        let seed = first + cases;
        // Spread, or neighbouring seeds would begin alike.
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let (name, bytes) = &corpus[random.below(corpus.len())];
        let mut bytes = bytes.clone();
        mutate(&mut random, &mut bytes);
        if random.below(2) == 0 {
            forge(&mut bytes);
        }
        LARGEST.store(0, Ordering::Relaxed);
        let outcome = std::panic::catch_unwind(|| use_it(bytes));
        let largest = LARGEST.load(Ordering::Relaxed);
        assert!(
            outcome.is_ok() && largest <= ALLOCATION_BYTES_MAX,
            "{name}, AENV_FUZZ_SEED={seed}: {largest} bytes"
        );
        opened += u64::from(outcome.is_ok_and(|opened| opened));
        cases += 1;
    }
    println!("{cases} cases, {opened} opened, from seed {first}");
    assert!(opened > 0 && opened < cases, "{opened} of {cases} opened");
}
