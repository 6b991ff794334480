//! What a guest reads and writes through the mounts.

#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking

mod bench;

use std::io::ErrorKind as Io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aenv_wire::block::{AbandonOk, ImportRaw, ImportRawOk, Name, Operation, StatsOk};
use bench::{Daemons, MIB, discard, host_can, open, wait_until};

#[test]
fn a_disk_reads_back_writes_and_discards_in_sectors() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let disk = open(&daemons.client().disk("d", 8 * MIB, &[], &daemons.text("u")).path);
    disk.write_all_at(&[7; 4096], 8192).unwrap();
    disk.write_all_at(&[8; 512], 8192 + 512).unwrap();
    disk.sync_all().unwrap();
    let mut back = [1; 6144];
    disk.read_exact_at(&mut back, 7168).unwrap();
    assert_eq!(back[..1024], [0; 1024]);
    assert_eq!(back[1024..1536], [7; 512]);
    assert_eq!(back[1536..2048], [8; 512]);
    discard(&disk, 8192, 512).unwrap();
    let mut three = [9; 3];
    disk.read_exact_at(&mut three, 8192 + 511).unwrap();
    assert_eq!(three, [0, 8, 8], "reads need no alignment");
    disk.write_all_at(&[1; 700], 8192 + 500).unwrap();
    disk.read_exact_at(&mut back[..1536], 8192).unwrap();
    assert_eq!(back[..500], [0; 500]);
    assert_eq!(back[500..1200], [1; 700]);
    assert_eq!(back[1200..1536], [7; 336], "and writes need none either");
    discard(&disk, 8192 + 600, 500).unwrap();
    disk.read_exact_at(&mut back[..1536], 8192).unwrap();
    assert!(back[500..600].iter().chain(&back[1100..1200]).all(|byte| *byte == 1));
    assert_eq!(back[600..1100], [0; 500]);
    assert_eq!(
        disk.write_all_at(&[1; 512], 8 * MIB).unwrap_err().raw_os_error(),
        Some(libc::EFBIG)
    );
    assert!(disk.set_len(MIB).is_err(), "a disk has its size");
    assert_eq!(disk.metadata().unwrap().len(), 8 * MIB);
}

#[test]
fn small_reads_over_several_layers_are_the_same_with_and_without_io_uring() {
    if !host_can() {
        return;
    }
    for ring_reads in ["0", "1", "64"] {
        let daemons = Daemons::start_with(&["--ring-reads", ring_reads], &[]);
        let mut client = daemons.client();
        let path = client.disk("d", MIB, &[], &daemons.text("u0")).path;
        let disk = open(&path);
        let expected: Vec<u8> = (0..MIB as usize).map(|at| (at / 512 * 7) as u8 | 1).collect();
        for layer in 0..3 {
            let sectors = (layer..MIB as usize / 512 - 1).step_by(3);
            sectors.for_each(|sector| {
                let at = sector * 512;
                disk.write_all_at(&expected[at..at + 512], at as u64).unwrap();
            });
            client.seal("d", Some(&daemons.text(&format!("u{}", layer + 1))));
        }
        let readers: Vec<_> = (0..8usize)
            .map(|reader| {
                let (file, expected) = (open(&path), expected.clone());
                std::thread::spawn(move || {
                    for round in 0..200 {
                        let at = (reader * 7919 + round * 104_729) % (MIB as usize - 70_000);
                        let mut back = vec![0; 1 + (round * 331) % 66_000];
                        file.read_exact_at(&mut back, at as u64).unwrap();
                        assert_eq!(back, expected[at..at + back.len()], "{at}");
                    }
                })
            })
            .collect();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        let mut last = [1; 512];
        disk.read_exact_at(&mut last, MIB - 512).unwrap();
        assert_eq!(last, [0; 512], "never written");
        assert_eq!(disk.read_at(&mut last, MIB).unwrap(), 0);
    }
}

#[test]
fn a_layer_that_was_cut_short_is_an_error_of_its_readers_and_named_in_the_log() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let disk = open(&client.disk("d", MIB, &[], &daemons.text("u0")).path);
    disk.write_all_at(&vec![5; MIB as usize], 0).unwrap();
    client.seal("d", Some(&daemons.text("u1")));
    let layer = std::fs::OpenOptions::new()
        .write(true)
        .open(daemons.path("u0"))
        .unwrap();
    layer.set_len(4096 + 8192).unwrap();
    let mut back = [0; 4096];
    disk.read_exact_at(&mut back, 4096).unwrap();
    assert_eq!(back, [5; 4096]);
    let error = disk.read_at(&mut back, 8192).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert!(daemons.log().contains("u0"), "{}", daemons.log());
}

#[test]
fn direct_readers_learn_the_sector_size_from_the_error() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let path = daemons.client().disk("d", MIB, &[], &daemons.text("u")).path;
    let direct = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .unwrap();
    assert_eq!(direct.read_at(&mut [0; 512], 1).unwrap_err().kind(), Io::InvalidInput);
    assert_eq!(direct.read_at(&mut [0; 512], 512).unwrap(), 512);
    assert_eq!(direct.write_at(&[0; 512], 1).unwrap_err().kind(), Io::InvalidInput);
}

#[test]
fn a_memory_image_opens_for_writing_and_cannot_be_changed() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    std::fs::write(daemons.path("raw"), vec![5u8; MIB as usize]).unwrap();
    let (source, into) = (daemons.text("raw"), daemons.text("layer"));
    client.ask::<ImportRawOk>(Operation::ImportRaw(ImportRaw {
        source,
        into: into.clone(),
    }));
    let image = open(&client.memory("m", 2 * MIB, &[into]).path);
    assert_eq!(image.write_at(&[1], 0).unwrap_err().raw_os_error(), Some(libc::EROFS));
    assert!(image.set_len(0).is_err());
    discard(&image, 0, MIB).expect("the punch of a balloon is answered with success");
    let mut bytes = vec![0; 2 * MIB as usize];
    image.read_exact_at(&mut bytes, 0).unwrap();
    assert!(
        bytes[..MIB as usize].iter().all(|byte| *byte == 5),
        "and the image is whole"
    );
    assert!(bytes[MIB as usize..].iter().all(|byte| *byte == 0));
    assert_eq!(
        client.ask::<StatsOk>(Operation::Stats).counters["memory.punch_ignored"],
        1
    );
}

#[test]
fn a_full_disk_is_told_to_the_writer_and_loses_nothing_written_before() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let small = SmallDisk::mount(daemons.path("small"));
    let mut client = daemons.client();
    let upper = small.path.join("u").to_string_lossy().into_owned();
    let disk = open(&client.disk("d", 64 * MIB, &[], &upper).path);
    let mut written = 0;
    let full = loop {
        match disk.write_at(&[6; 65536], written) {
            Ok(count) => written += count as u64,
            Err(error) => break error,
        }
        assert!(written < 16 * MIB);
    };
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let mut back = vec![0; usize::try_from(written).unwrap()];
    disk.read_exact_at(&mut back, 0).unwrap();
    assert!(back.iter().all(|byte| *byte == 6));
    discard(&disk, 0, MIB).unwrap();
    disk.write_all_at(&[7; 65536], 0).unwrap();
}

struct SmallDisk {
    path: std::path::PathBuf,
}

impl SmallDisk {
    fn mount(path: std::path::PathBuf) -> SmallDisk {
        std::fs::create_dir_all(&path).unwrap();
        rustix::mount::mount("small", &path, "tmpfs", rustix::mount::MountFlags::empty(), c"size=8m").unwrap();
        SmallDisk { path }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.path, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn what_is_written_faster_than_the_disk_takes_it_is_all_there() {
    if !host_can() {
        return;
    }
    const WRITTEN: u64 = 640 * MIB;
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let path = client.disk("d", WRITTEN, &[], &daemons.text("u")).path;
    let other = client.disk("other", MIB, &[], &daemons.text("v")).path;
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // While another export is read, the writer gets a third of the disk.
        let reader = scope.spawn(|| {
            let disk = open(&other);
            let mut block = [0; 4096];
            while !is_done.load(Ordering::Relaxed) {
                disk.read_exact_at(&mut block, 0).unwrap();
            }
        });
        let disk = open(&path);
        let mut block = vec![0; MIB as usize];
        for number in 0..WRITTEN / MIB {
            block.fill(number as u8);
            disk.write_all_at(&block, number * MIB).unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    let written_back = || daemons.client().ask::<StatsOk>(Operation::Stats).counters["disk.written_back_bytes"];
    // All but what write-back leaves.
    wait_until("the disk has it", || written_back() >= WRITTEN - 32 * MIB);
    let disk = open(&path);
    let mut block = vec![0; MIB as usize];
    for number in 0..WRITTEN / MIB {
        disk.read_exact_at(&mut block, number * MIB).unwrap();
        assert!(block.iter().all(|byte| *byte == number as u8), "MiB {number}");
    }
}

#[test]
fn a_writer_whose_answers_are_kept_back_can_be_abandoned() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let path = client.disk("d", 256 * MIB + 64 * MIB, &[], &daemons.text("u")).path;
    let other = open(&client.disk("other", MIB, &[], &daemons.text("v")).path);
    let error = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let disk = open(&path);
            let mut block = vec![0; MIB as usize];
            // Again and again, so that there is always more than may be dirty.
            for number in 0.. {
                block.fill(number as u8);
                other.read_at(&mut [0; 512], 0).ok()?;
                if let Err(error) = disk.write_all_at(&block, number % 320 * MIB) {
                    return Some(error);
                }
            }
            None
        });
        let kept_back = || daemons.client().ask::<StatsOk>(Operation::Stats).counters["disk.write_kept_back"];
        // A disk that is as fast as memory keeps nothing back, and then the writer is abandoned while it writes.
        let deadline = Instant::now() + Duration::from_secs(5);
        while kept_back() == 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        client.ask::<AbandonOk>(Operation::Abandon(Name { name: "d".into() }));
        writer.join().unwrap()
    });
    assert_eq!(error.unwrap().raw_os_error(), Some(libc::EIO));
    client.unexport("d");
}
