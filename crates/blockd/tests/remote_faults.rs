//! Guests read layers that are in a store: whatever the store, the bytes and blockd do.

#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking

mod bench;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aenv_wire::block::{AbandonOk, Name, Operation, StatsOk};
use bench::remote::{CACHE, cache, check, errno, forget_pages};
use bench::store::{Form, Mode, TestStore, random_image};
use bench::{MIB, Random, host_can, kill, open, wait_until};

#[test]
fn an_outage_stalls_readers_of_its_blobs_and_nobody_else_and_ends_without_an_error() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &[]);
    let image = random_image(3, 32 * MIB);
    let (blob, layer) = store.publish(&daemons, "base", &image);
    let mut client = daemons.client();
    let disks: Vec<File> = (0..6)
        .map(|index| {
            let upper = daemons.text(&format!("u{index}"));
            open(
                &client
                    .disk(&format!("d{index}"), 32 * MIB, std::slice::from_ref(&blob), &upper)
                    .path,
            )
        })
        .collect();
    let local = open(&client.disk("local", 32 * MIB, &[layer], &daemons.text("u")).path);
    store.turn(Mode::Silent);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for (index, disk) in disks.iter().enumerate() {
            for reader in 0..16 {
                let (image, place) = (&image, (index * 16 + reader) as u64 * 300 * 1024 + MIB);
                scope.spawn(move || check(disk, image, place, 4096));
            }
        }
        wait_until("far more readers wait than the mount has threads for them", || {
            daemons.client().ask::<StatsOk>(Operation::Stats).counters["disk.read"] >= 48
        });
        let mut longest = Duration::ZERO;
        for place in 0..200 {
            let read = Instant::now();
            check(&local, &image, place * 65536, 4096);
            longest = longest.max(read.elapsed());
        }
        eprintln!("longest read of a local disk during the outage: {longest:?}");
        assert!(longest < Duration::from_millis(500), "{longest:?}");
        std::thread::sleep(Duration::from_millis(1200));
        store.turn(Mode::Unavailable);
        std::thread::sleep(Duration::from_millis(300));
        store.turn(Mode::Good);
    });
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    let state = cache(&mut client);
    assert!(state.stalls > 0 && state.stall_us > 1_000_000, "{state:?}");
    assert_eq!(client.ask::<StatsOk>(Operation::Stats).counters["request.failed"], 0);
}

#[test]
fn an_outage_past_the_deadline_is_an_io_error_and_what_is_read_after_it_is_right() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &["--memory-outage-s", "1"]);
    let image = random_image(4, 4 * MIB);
    let (blob, _) = store.publish(&daemons, "base", &image);
    let memory = open(&daemons.client().memory("m", 4 * MIB, &[blob]).path);
    for mode in [Mode::Silent, Mode::Unavailable] {
        store.turn(mode);
        let begun = Instant::now();
        assert_eq!(errno(memory.read_at(&mut [0; 4096], 2 * MIB)), Some(libc::EIO));
        let time = begun.elapsed();
        assert!(
            time >= Duration::from_millis(500) && time < Duration::from_secs(8),
            "{mode:?}: {time:?}"
        );
    }
    assert!(
        daemons.log().contains("repository"),
        "the log names the store: {}",
        daemons.log()
    );
    store.turn(Mode::Good);
    check(&memory, &image, 0, image.len());
}

#[test]
fn wrong_bytes_never_reach_a_reader() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &["--memory-outage-s", "2"]);
    let image = random_image(5, 4 * MIB);
    let (blob, _) = store.publish(&daemons, "base", &image);
    let mut client = daemons.client();
    let memory = open(&client.memory("m", 4 * MIB, &[blob]).path);
    store.turn(Mode::Wrong);
    assert_eq!(errno(memory.read_at(&mut [0; 4096], MIB)), Some(libc::EIO));
    assert!(cache(&mut client).verify_failures >= 3);
    store.turn(Mode::Truncated);
    assert_eq!(errno(memory.read_at(&mut [0; 4096], MIB)), Some(libc::EIO));
    store.turn(Mode::Good);
    check(&memory, &image, 0, image.len());
}

#[test]
fn damage_that_only_the_format_finds_is_fetched_again_and_not_kept() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &[]);
    let image = random_image(12, 4 * MIB);
    let (blob, _) = store.publish_as(&daemons, "base", &image, Form::UnlistedZFile);
    let mut client = daemons.client();
    let memory = open(&client.memory("m", 4 * MIB, &[blob]).path);
    store.turn(Mode::Wrong);
    let failed = memory.read_exact_at(&mut vec![0; MIB as usize], 2 * MIB).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::EIO));
    store.turn(Mode::Good);
    check(&memory, &image, 0, image.len());
}

#[test]
fn kills_of_blockd_in_the_middle_of_fetches_cost_time_and_no_byte() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::from_millis(15));
    let daemons = store.daemons(16 * MIB, &[]);
    let image = random_image(7, 48 * MIB);
    let (blob, _) = store.publish(&daemons, "base", &image);
    let disk = open(
        &daemons
            .client()
            .disk("d", 48 * MIB, std::slice::from_ref(&blob), &daemons.text("u"))
            .path,
    );
    let memory = open(&daemons.client().memory("m", 48 * MIB, &[blob]).path);
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..5 {
            let (disk, memory, image, stop, reads) = (&disk, &memory, &image, &stop, &reads);
            scope.spawn(move || {
                let mut random = Random::new(thread);
                while !stop.load(Ordering::Relaxed) {
                    let file = if thread == 0 { memory } else { disk };
                    let length = 4096 * (1 + random.below(60));
                    check(
                        file,
                        image,
                        4096 * random.below((image.len() as u64 - length) / 4096),
                        length as usize,
                    );
                    if thread == 0 {
                        forget_pages(memory);
                    }
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..6 {
            let before = reads.load(Ordering::Relaxed);
            wait_until("reads go on", || reads.load(Ordering::Relaxed) > before + 15);
            kill(daemons.hello().pid, libc::SIGKILL);
        }
        let before = reads.load(Ordering::Relaxed);
        wait_until("reads go on", || reads.load(Ordering::Relaxed) > before + 15);
        stop.store(true, Ordering::Relaxed);
    });
    let state = cache(&mut daemons.client());
    assert!(state.size_bytes <= 16 * MIB && state.verify_failures == 0, "{state:?}");
}

#[test]
fn abandoned_readers_of_a_silent_store_end_at_once_and_so_do_their_threads() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &[]);
    let image = random_image(8, 16 * MIB);
    let (blob, _) = store.publish(&daemons, "base", &image);
    let mut client = daemons.client();
    let disk = open(&client.disk("d", 16 * MIB, &[blob], &daemons.text("u")).path);
    store.turn(Mode::Silent);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..40)
            .map(|reader| {
                let disk = &disk;
                scope.spawn(move || errno(disk.read_at(&mut [0; 512], MIB + reader % 4 * MIB)))
            })
            .collect();
        wait_until("readers are parked", || {
            daemons.client().ask::<StatsOk>(Operation::Stats).counters["request.parked"] >= 20
        });
        let begun = Instant::now();
        client.ask::<AbandonOk>(Operation::Abandon(Name { name: "d".to_owned() }));
        readers
            .into_iter()
            .for_each(|reader| assert_eq!(reader.join().unwrap(), Some(libc::EIO)));
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    });
    store.turn(Mode::Good);
}

#[test]
fn a_cache_that_another_node_uses_is_refused_at_the_start() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &[]);
    let folder = tempfile::tempdir().unwrap();
    let mut second = std::process::Command::new(env!("CARGO_BIN_EXE_aenv-blockd"));
    second.arg("keeper");
    for (option, name) in [
        ("run", "run"),
        ("state", "state"),
        ("memory-mount", "mnt/memory"),
        ("disk-mount", "mnt/disks"),
    ] {
        let option = match name {
            "run" | "state" => format!("--{option}-dir"),
            _ => format!("--{option}"),
        };
        second.arg(option).arg(folder.path().join(name));
    }
    second.args([
        "--stores",
        &daemons.text("stores.json"),
        "--cache-dir",
        &daemons.text("cache"),
    ]);
    second.args(["--cache-size-bytes-max", "67108864"]);
    let output = second.output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(3),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(String::from_utf8_lossy(&output.stderr).contains(&daemons.text("cache")));
}
