//! Measures what this crate promises, on the machine it runs on: `cargo run --release -p aenv-layers --example measure
//! [folder]`. Prints medians; needs 25 GB of sparse file size and some hundred MB of space in the folder.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aenv_layers::{LayerWriter, Stack, Upper, Uuid};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const KIB: u64 = 1 << 10;
const GIB: u64 = 1 << 30;
const REPEATS: usize = 5;

/// A small generator (xorshift), so that runs are alike.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

fn main() -> Outcome {
    let parent = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = tempfile::tempdir_in(parent)?;
    look_ups(folder.path())?;
    reads(folder.path())?;
    seal_sequential(folder.path())?;
    seal_random(folder.path())?;
    writes(folder.path())
}

fn report(what: &str, mut samples: Vec<f64>, unit: &str) {
    samples.sort_by(f64::total_cmp);
    let (low, high) = (samples[0], samples[samples.len() - 1]);
    println!(
        "{what:<58} {:>10.2} {unit}   [{low:.2} .. {high:.2}]",
        samples[samples.len() / 2]
    );
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// A layer of `size` bytes with `segments` runs of 4 KiB, `stride` bytes apart, and one at the end of the image.
fn layer(path: &Path, segments: u64, stride: u64, size: u64) -> Outcome {
    let mut writer = LayerWriter::create(path, size, Uuid::NIL)?;
    for number in 0..segments {
        writer.append(number * stride, &[number as u8; 4096])?;
    }
    writer.append(size - 4096, &[1; 4096])?;
    writer.finish()?;
    Ok(())
}

/// 100,000 segments: evenly spread, and all in the first fiftieth of the image but for one at its end.
fn look_ups(folder: &Path) -> Outcome {
    for (name, stride, size) in [("even", 40 * KIB, 4 * GIB), ("clustered", 8 * KIB, 40 * GIB)] {
        let path = folder.join(name);
        layer(&path, 100_000, stride, size)?;
        let opened = aenv_layers::Layer::open(&path)?;
        let index = opened.index();
        let end = 100_000 * stride / 512;
        let mut random = Random(7);
        let sectors: Vec<u64> = (0..1 << 20).map(|_| random.below(end)).collect();
        let rate = |_| {
            let started = Instant::now();
            let mut sum = 0;
            for _ in 0..4 {
                sum += sectors.iter().map(|&sector| index.locate(sector)).sum::<usize>();
            }
            std::hint::black_box(sum);
            4.0 * sectors.len() as f64 / started.elapsed().as_secs_f64() / 1e6
        };
        report(
            &format!("random look-ups, 100,000 segments, {name}"),
            (0..REPEATS).map(rate).collect(),
            "M/s",
        );
        std::fs::remove_file(&path)?;
    }
    Ok(())
}

/// 4 KiB reads of cached data at several depths; the segments of all layers together stay 25,600.
fn reads(folder: &Path) -> Outcome {
    for depth in [1u64, 20, 100] {
        let mut paths = Vec::new();
        let each = 25_600 / depth;
        for number in 0..depth {
            let path = folder.join(format!("depth{depth}-{number}"));
            let mut writer = LayerWriter::create(&path, 4 * GIB, Uuid::NIL)?;
            for run in 0..each {
                writer.append((run * depth + number) * 8 * KIB, &[number as u8; 4096])?;
            }
            writer.finish()?;
            paths.push(path);
        }
        let opening = Instant::now();
        let stack = Stack::open(&paths, None, 4 * GIB)?;
        let opening = milliseconds(opening.elapsed());
        let mut random = Random(11);
        let mut buf = [0u8; 4096];
        let mut sample = || -> Outcome<f64> {
            let started = Instant::now();
            for _ in 0..100_000 {
                stack.read_at(&mut buf, random.below(25_600) * 8 * KIB)?;
            }
            Ok(100_000.0 / started.elapsed().as_secs_f64() / 1e3)
        };
        let samples = (0..REPEATS).map(|_| sample()).collect::<Outcome<_>>()?;
        report(
            &format!("4 KiB reads, depth {depth} (opened in {opening:.1} ms)"),
            samples,
            "k/s",
        );
        paths.iter().try_for_each(std::fs::remove_file)?;
    }
    Ok(())
}

/// 10 GiB written in sequence. A seal does not look at the data, so each piece is punched out again behind the upper's
/// back: the map says 10 GiB, the disk holds none.
fn seal_sequential(folder: &Path) -> Outcome {
    let path = folder.join("sequential");
    let mut samples = Vec::new();
    let upper = Upper::create(&path, 10 * GIB, Uuid::NIL)?;
    let buf = vec![1u8; 4 << 20];
    for offset in (0..10 * GIB).step_by(buf.len()) {
        upper.write_at(&buf, offset)?;
        punch(&path, 4096 + offset, buf.len() as u64)?;
    }
    drop(upper);
    for round in 0..REPEATS {
        let (copy, upper) = clone_upper(&path, folder, round)?;
        let started = Instant::now();
        let (_, sealed) = upper.seal()?;
        samples.push(milliseconds(started.elapsed()));
        assert_eq!(sealed.data_bytes, 10 * GIB);
        std::fs::remove_file(copy)?;
    }
    report("seal of 10 GiB sequential data", samples, "ms");
    remove_upper(&path)
}

/// 2.6 million separate runs, one sector each since their length does not matter, 8 KiB apart.
fn seal_random(folder: &Path) -> Outcome {
    let path = folder.join("random");
    let count = 2_600_000;
    let size = count * 8 * KIB;
    let upper = Upper::create(&path, size, Uuid::NIL)?;
    for number in 0..count {
        upper.write_at(&[7u8; 512], number * 8 * KIB)?;
        if number % 8192 == 8191 {
            punch(&path, 4096 + (number - 8191) * 8 * KIB, 8192 * 8 * KIB)?;
        }
    }
    drop(upper);
    let mut samples = Vec::new();
    for round in 0..REPEATS {
        let (copy, upper) = clone_upper(&path, folder, round)?;
        let started = Instant::now();
        let (_, sealed) = upper.seal()?;
        samples.push(milliseconds(started.elapsed()));
        assert_eq!(sealed.index_entries, count);
        drop(upper);
        std::fs::remove_file(copy)?;
    }
    report("seal of 2.6 M separate runs", samples, "ms");
    remove_upper(&path)
}

/// Rewrites of 4 KiB in place.
fn writes(folder: &Path) -> Outcome {
    let path = folder.join("writes");
    let upper = Upper::create(&path, GIB, Uuid::NIL)?;
    let mut random = Random(3);
    let mut sample = || -> Outcome<f64> {
        let started = Instant::now();
        for _ in 0..100_000 {
            upper.write_at(&[9u8; 4096], random.below(16_384) * 4 * KIB)?;
        }
        Ok(100_000.0 / started.elapsed().as_secs_f64() / 1e3)
    };
    let samples = (0..REPEATS).map(|_| sample()).collect::<Outcome<_>>()?;
    report("4 KiB writes into 64 MiB of an upper", samples, "k/s");
    drop(upper);
    remove_upper(&path)
}

fn punch(path: &Path, offset: u64, length: u64) -> Outcome {
    let file = std::fs::OpenOptions::new().write(true).open(path)?;
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, offset, length)?)
}

/// Another upper with the same header and map: the data file is all holes.
fn clone_upper(path: &Path, folder: &Path, round: usize) -> Outcome<(PathBuf, Upper)> {
    let copy = folder.join(format!("copy{round}"));
    let length = std::fs::metadata(path)?.len();
    let mut header = vec![0; 4096];
    std::os::unix::fs::FileExt::read_exact_at(&std::fs::File::open(path)?, &mut header, 0)?;
    std::fs::write(&copy, header)?;
    std::fs::OpenOptions::new().write(true).open(&copy)?.set_len(length)?;
    std::fs::copy(aenv_layers::map_path(path), aenv_layers::map_path(&copy))?;
    let upper = Upper::open(&copy)?;
    Ok((copy, upper))
}

fn remove_upper(path: &Path) -> Outcome {
    std::fs::remove_file(path)?;
    Ok(std::fs::remove_file(aenv_layers::map_path(path))?)
}
