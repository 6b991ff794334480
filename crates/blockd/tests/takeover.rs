//! Guests go on while keeper and blockd are killed: not one wrong byte, and stalls of milliseconds.

#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking

mod bench;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aenv_wire::block::{ExportsOk, ImportRaw, ImportRawOk, Operation};
use bench::{Daemons, MIB, Random, discard, host_can, kill, open, seal, wait_until};

/// Kills of each daemon. The pause between two kills of the same one is over the limit below which it would be held
/// back as failing at start.
const KILLS: usize = 10;
const PAUSE: Duration = Duration::from_millis(530);
/// What guests are promised is 100 ms; the rest is for a machine that runs other tests at the same time.
const STALL_MAX: Duration = Duration::from_millis(1000);

const REGION: u64 = 8 * MIB;
const WRITERS: u64 = 4;
const WORKERS: usize = 5;
const IMAGE: u64 = 32 * MIB;

struct Load {
    stop: AtomicBool,
    /// By worker; the last one reads the memory image.
    operations: [AtomicU64; WORKERS],
    longest_us: AtomicU64,
}

impl Load {
    /// Fails a load of which any part hangs: the daemons are killed for good, so that what waits ends with an error.
    fn must_go_on(&self, daemons: &Daemons) {
        let count = |worker: &AtomicU64| worker.load(Ordering::Relaxed);
        let before: Vec<u64> = self.operations.iter().map(count).collect();
        let end = Instant::now() + Duration::from_secs(10);
        let all_moved = || {
            self.operations
                .iter()
                .zip(&before)
                .all(|(worker, before)| count(worker) > *before)
        };
        while !all_moved() {
            if Instant::now() > end {
                self.stop.store(true, Ordering::Relaxed);
                daemons.destroy();
                panic!("part of the load hangs after a kill");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn timed<T>(&self, worker: u64, operation: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let outcome = operation();
        let time = u64::try_from(begun.elapsed().as_micros()).unwrap();
        self.longest_us.fetch_max(time, Ordering::Relaxed);
        self.operations[usize::try_from(worker).unwrap()].fetch_add(1, Ordering::Relaxed);
        outcome
    }

    /// Random writes, discards, flushes and reads of a region that nobody else touches, against a model in memory.
    fn disk(&self, file: &File, worker: u64) {
        let (start, seed) = (worker * REGION, 100 + worker);
        let mut random = Random::new(seed);
        let mut model = vec![0u8; usize::try_from(REGION).unwrap()];
        let mut bytes = vec![0u8; 256 << 10];
        while !self.stop.load(Ordering::Relaxed) {
            let longest = if random.below(4) == 0 { 500 } else { 16 };
            let length = 512 * (1 + random.below(longest));
            let offset = 512 * random.below((REGION - length) / 512);
            let range = usize::try_from(offset).unwrap()..usize::try_from(offset + length).unwrap();
            let piece = &mut bytes[..range.len()];
            match random.below(8) {
                0..=2 => {
                    random.fill(piece);
                    self.timed(worker, || file.write_all_at(piece, start + offset)).unwrap();
                    model[range].copy_from_slice(piece);
                }
                3 => {
                    self.timed(worker, || discard(file, start + offset, length)).unwrap();
                    model[range].fill(0);
                }
                4 => self.timed(worker, || file.sync_data()).unwrap(),
                _ => {
                    self.timed(worker, || file.read_exact_at(piece, start + offset))
                        .unwrap();
                    assert!(*piece == model[range.clone()], "seed {seed}: wrong bytes in {range:?}");
                }
            }
        }
        let mut all = vec![0; model.len()];
        file.read_exact_at(&mut all, start).unwrap();
        assert!(all == model, "seed {seed}: wrong bytes at the end");
    }

    /// Reads of the memory image that really reach blockd: the cache is dropped before each.
    fn memory(&self, file: &File, content: &[u8]) {
        let (worker, seed) = (WRITERS, 200);
        let mut random = Random::new(seed);
        let mut bytes = vec![0u8; 64 << 10];
        while !self.stop.load(Ordering::Relaxed) {
            let offset = 4096 * random.below((IMAGE - bytes.len() as u64) / 4096);
            let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
            self.timed(worker, || file.read_exact_at(&mut bytes, offset)).unwrap();
            let start = usize::try_from(offset).unwrap();
            assert!(
                bytes == content[start..start + bytes.len()],
                "seed {seed}: wrong bytes at {offset}"
            );
        }
    }
}

#[test]
fn ten_kills_of_each_daemon_under_load_cost_milliseconds_and_no_byte() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let mut content = vec![0u8; usize::try_from(IMAGE).unwrap()];
    Random::new(1).fill(&mut content);
    std::fs::write(daemons.path("raw"), &content).unwrap();
    let (source, into) = (daemons.text("raw"), daemons.text("image"));
    client.ask::<ImportRawOk>(Operation::ImportRaw(ImportRaw {
        source,
        into: into.clone(),
    }));
    let image = open(&client.memory("m", IMAGE, &[into]).path);
    let disk = open(&client.disk("d", WRITERS * REGION, &[], &daemons.text("u")).path);
    let load = Load {
        stop: AtomicBool::new(false),
        operations: Default::default(),
        longest_us: AtomicU64::new(0),
    };
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (load, disk) = (&load, &disk);
            scope.spawn(move || load.disk(disk, writer));
        }
        scope.spawn(|| load.memory(&image, &content));
        for _ in 0..KILLS {
            std::thread::sleep(PAUSE);
            let before = daemons.hello();
            kill(before.pid, libc::SIGKILL);
            load.must_go_on(&daemons);
            std::thread::sleep(PAUSE);
            let between = daemons.hello();
            assert_ne!(between.pid, before.pid);
            kill(between.keeper_pid, libc::SIGKILL);
            wait_until("a new keeper is there", || {
                daemons.hello().keeper_pid != between.keeper_pid
            });
        }
        load.stop.store(true, Ordering::Relaxed);
    });
    let longest = Duration::from_micros(load.longest_us.load(Ordering::Relaxed));
    let operations: u64 = load
        .operations
        .iter()
        .map(|worker| worker.load(Ordering::Relaxed))
        .sum();
    eprintln!("{operations} verified operations, longest {longest:?}");
    assert!(operations > 1000);
    assert!(longest < STALL_MAX, "{longest:?}");
}

/// Each step of a seal, cut off by a death of blockd at exactly that point; debug builds only, which know the points.
#[test]
fn a_seal_that_is_cut_off_at_any_step_is_finished_by_the_next_blockd() {
    if !host_can() || !cfg!(debug_assertions) {
        return;
    }
    for point in ["intent", "sealed", "recorded"] {
        for new_upper in [true, false] {
            let daemons = Daemons::start_with(&[], &[("AENV_BLOCKD_TEST_CRASH", point)]);
            let (u0, u1) = (daemons.text("u0"), daemons.text("u1"));
            let disk = open(&daemons.client().disk("d", MIB, &[], &u0).path);
            disk.write_all_at(&[7; 4096], 4096).unwrap();
            let asked = new_upper.then_some(u1.as_str());
            let first = daemons.hello();
            assert!(
                daemons
                    .client()
                    .try_ask::<serde_json::Value>(seal("d", asked))
                    .is_none(),
                "{point}: it did not die"
            );
            wait_until("the next blockd serves", || daemons.hello().pid != first.pid);
            let exports: ExportsOk = daemons.client().ask(Operation::Exports);
            assert_eq!(exports.exports[0].layers, std::slice::from_ref(&u0), "{point}");
            assert_eq!(exports.exports[0].upper.as_deref(), asked, "{point}");
            let again = daemons.client().seal("d", asked);
            assert_eq!((again.layer.as_str(), again.data_bytes), (u0.as_str(), 4096), "{point}");
            let mut back = [0; 8192];
            disk.read_exact_at(&mut back, 0).unwrap();
            assert!(back[..4096] == [0; 4096] && back[4096..] == [7; 4096], "{point}");
            assert_eq!(disk.write_all_at(&[8; 512], 0).is_ok(), new_upper, "{point}");
            let clone = open(&daemons.client().memory("clone", MIB, &[u0]).path);
            clone.read_exact_at(&mut back, 0).unwrap();
            assert!(back[..4096] == [0; 4096] && back[4096..] == [7; 4096], "{point}");
        }
    }
}

#[test]
fn a_keeper_and_a_blockd_that_die_at_once_after_each_other_are_both_replaced() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let disk = open(&daemons.client().disk("d", MIB, &[], &daemons.text("u")).path);
    for round in 0..3u8 {
        let before = daemons.hello();
        kill(before.keeper_pid, libc::SIGKILL);
        wait_until("a new keeper is there", || {
            daemons.hello().keeper_pid != before.keeper_pid
        });
        kill(before.pid, libc::SIGKILL);
        disk.write_all_at(&[round; 512], 0).unwrap();
        let mut back = [9; 512];
        disk.read_exact_at(&mut back, 0).unwrap();
        assert_eq!(back, [round; 512]);
    }
}

/// Writes that are done and not answered are carried out again by the next blockd.
#[test]
fn a_writer_whose_answers_are_kept_back_outlives_blockd() {
    if !host_can() {
        return;
    }
    const WRITTEN: u64 = 512 * MIB;
    let daemons = Daemons::start();
    let path = daemons.client().disk("d", WRITTEN, &[], &daemons.text("u")).path;
    let other = open(&daemons.client().disk("other", MIB, &[], &daemons.text("v")).path);
    let (written, is_done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let writers = [0, 1].map(|parity| {
            let (path, written) = (&path, &written);
            scope.spawn(move || {
                let disk = open(path);
                let mut block = vec![0; MIB as usize];
                for number in (parity..WRITTEN / MIB).step_by(2) {
                    block.fill(number as u8);
                    disk.write_all_at(&block, number * MIB).unwrap();
                    written.fetch_add(MIB, Ordering::Relaxed);
                }
            })
        });
        // Another disk is read, so that the writers are faster than what they get of the host's.
        let reader = scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                other.read_exact_at(&mut [0; 4096], 0).unwrap();
            }
        });
        // The first two find answers kept back: the next blockd counts what is dirty from 0 on.
        for part in [280, 300, 400] {
            wait_until("a part is written", || written.load(Ordering::Relaxed) >= part * MIB);
            kill(daemons.hello().pid, libc::SIGKILL);
        }
        for writer in writers {
            writer.join().unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    let (disk, mut block) = (open(&path), vec![0; MIB as usize]);
    for number in 0..WRITTEN / MIB {
        disk.read_exact_at(&mut block, number * MIB).unwrap();
        assert!(block.iter().all(|byte| *byte == number as u8), "MiB {number}");
    }
}
