//! The figures of `spec/layers.md` as one JSON object on standard output, for the benchmark harness:
//! `cargo run --release -p aenv-layers --example bench [folder]`. Values are medians of a few runs; the folder needs 25 GB
//! of sparse file size and some hundred MB of space. Rates are per second of one core's time, so that other work on the
//! machine counts little; what somebody waits for (opening, seals) is by the clock. `measure.rs` prints spreads and more.

use std::error::Error;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_layers::zfile::compress;
use aenv_layers::{
    Algorithm, Blob, FileBlob, LayerWriter, Stack, Upper, Uuid, ZFile, ZFileOptions, digest, remove_upper,
};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const REPEATS: usize = 5;

/// A small generator (xorshift), so that runs are alike.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn main() -> Outcome {
    let parent = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = tempfile::tempdir_in(parent)?;
    let folder = folder.path();
    let figures = [
        ("zfile_mb_per_s", zfile_rate(Algorithm::Lz4)?),
        ("zfile_zstd_mb_per_s", zfile_rate(Algorithm::Zstd)?),
        ("unzfile_mb_per_s", unzfile_rate(Algorithm::Lz4, MIB)?),
        ("unzfile_zstd_mb_per_s", unzfile_rate(Algorithm::Zstd, MIB)?),
        (
            "unzfile_4k_reads_k_per_s",
            unzfile_rate(Algorithm::Lz4, 4 * KIB)? * 1e3 / 4096.0,
        ),
        ("zfile_ratio", zfile_ratio(Algorithm::Lz4)?),
        ("digest_mb_per_s", digest_rate(folder)?),
        ("digest_scattered_mb_per_s", digest_scattered_rate(folder)?),
        ("open_100_layers_ms", open_100_layers(folder)?),
        ("index_lookups_m_per_s", look_ups(folder, 1)?),
        ("index_lookups_depth_100_m_per_s", look_ups(folder, 100)?),
        ("seal_10g_sequential_ms", seal_sequential(folder)?),
        ("seal_random_runs_ms", seal_random(folder)?),
    ];
    let fields: Vec<String> = figures
        .iter()
        .map(|(name, value)| format!("\"{name}\": {value:.2}"))
        .collect();
    println!("{{{}}}", fields.join(", "));
    Ok(())
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// What the calling thread has used of its core.
fn core_seconds() -> f64 {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    used.tv_sec as f64 + used.tv_nsec as f64 / 1e9
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// 64 MiB that compress to about the half: records with words in common, zeros, and noise.
fn sample() -> Vec<u8> {
    let mut random = Random(11);
    let mut bytes = Vec::with_capacity(66 << 20);
    while bytes.len() < 64 << 20 {
        let length = 1 + random.next() as usize % 3000;
        match random.next() % 5 {
            0 => bytes.resize(bytes.len() + length, 0),
            1 => bytes.extend((0..length).map(|_| random.next() as u8)),
            _ => (0..length / 12).for_each(|_| {
                bytes.extend_from_slice(b"a word of ");
                bytes.extend_from_slice(&(random.next() as u16).to_le_bytes());
            }),
        }
    }
    bytes
}

fn options(algorithm: Algorithm) -> ZFileOptions {
    ZFileOptions {
        algorithm,
        ..ZFileOptions::default()
    }
}

/// Of original bytes, in memory, on one core.
fn zfile_rate(algorithm: Algorithm) -> Outcome<f64> {
    let original = sample();
    let mut stored = Vec::with_capacity(original.len());
    let sample = |_| -> Outcome<f64> {
        stored.clear();
        let started = core_seconds();
        compress(original.as_slice(), &mut stored, options(algorithm))?;
        Ok(original.len() as f64 / (core_seconds() - started) / 1e6)
    };
    Ok(median((0..REPEATS).map(sample).collect::<Outcome<_>>()?))
}

/// Of original bytes, read in sequence in parts of `part_bytes`, out of the page cache.
fn unzfile_rate(algorithm: Algorithm, part_bytes: u64) -> Outcome<f64> {
    let original = sample();
    let file = tempfile::NamedTempFile::new()?;
    compress(original.as_slice(), file.as_file(), options(algorithm))?;
    let zfile = ZFile::open(file.path(), Arc::new(FileBlob::open(file.path())?))?;
    let mut part = vec![0; part_bytes as usize];
    let mut sample = || -> Outcome<f64> {
        let started = core_seconds();
        let mut offset = 0;
        while offset + part_bytes <= zfile.len_bytes() {
            zfile.read_exact_at(&mut part, offset)?;
            offset += part_bytes;
        }
        Ok(offset as f64 / (core_seconds() - started) / 1e6)
    };
    Ok(median((0..REPEATS).map(|_| sample()).collect::<Outcome<_>>()?))
}

/// Stored bytes per original byte.
fn zfile_ratio(algorithm: Algorithm) -> Outcome<f64> {
    let original = sample();
    let report = compress(original.as_slice(), std::io::sink(), options(algorithm))?;
    Ok(report.stored_bytes as f64 / report.original_bytes as f64)
}

/// 512 MiB in a few long runs, in the page cache.
fn digest_rate(folder: &Path) -> Outcome<f64> {
    let path = folder.join("long");
    let upper = Upper::create(&path, GIB, Uuid::NIL)?;
    for offset in (0..512 * MIB).step_by(MIB as usize) {
        upper.write_at(&vec![offset as u8; MIB as usize], offset)?;
    }
    upper.seal()?;
    timed_digest(&path)
}

/// 256 MiB in runs of 4 KiB, 8 KiB apart.
fn digest_scattered_rate(folder: &Path) -> Outcome<f64> {
    let path = folder.join("scattered");
    let upper = Upper::create(&path, GIB, Uuid::NIL)?;
    for offset in (0..512 * MIB).step_by(8 * KIB as usize) {
        upper.write_at(&[offset as u8; 4 * KIB as usize], offset)?;
    }
    upper.seal()?;
    timed_digest(&path)
}

fn timed_digest(path: &Path) -> Outcome<f64> {
    let sample = |_| -> Outcome<f64> {
        let started = core_seconds();
        let report = digest(path)?;
        Ok(report.size_bytes as f64 / (core_seconds() - started) / 1e6)
    };
    let samples = (0..REPEATS).map(sample).collect::<Outcome<_>>()?;
    std::fs::remove_file(path)?;
    Ok(median(samples))
}

/// 100 layers of 1,000 runs each, all files in the page cache.
fn open_100_layers(folder: &Path) -> Outcome<f64> {
    let paths = layers(folder, 100, 1000)?;
    let sample = |_| -> Outcome<f64> {
        let started = Instant::now();
        let stack = Stack::open(&paths, None, 4 * GIB)?;
        let elapsed = milliseconds(started.elapsed());
        drop(stack);
        Ok(elapsed)
    };
    let samples = (0..2 * REPEATS).map(sample).collect::<Outcome<_>>()?;
    paths.iter().try_for_each(std::fs::remove_file)?;
    Ok(median(samples))
}

/// `depth` layers with `runs` runs of 512 bytes each, interleaved and evenly spread.
fn layers(folder: &Path, depth: u64, runs: u64) -> Outcome<Vec<PathBuf>> {
    let stride = 4 * GIB / (depth * runs) / 512 * 512;
    let mut paths = Vec::new();
    for number in 0..depth {
        let path = folder.join(format!("layer{number}"));
        let mut writer = LayerWriter::create(&path, 4 * GIB, Uuid::NIL)?;
        for run in 0..runs {
            writer.append((run * depth + number) * stride, &[number as u8; 512])?;
        }
        writer.finish()?;
        paths.push(path);
    }
    Ok(paths)
}

/// Random look-ups among 100,000 runs, on one core; at any depth in the merged index of the stack.
fn look_ups(folder: &Path, depth: u64) -> Outcome<f64> {
    let paths = layers(folder, depth, 100_000 / depth)?;
    let stack = Stack::open(&paths, None, 4 * GIB)?;
    let index = stack.lower_index();
    let mut random = Random(7);
    let sectors: Vec<u64> = (0..1 << 20).map(|_| random.next() % (4 * GIB / 512)).collect();
    let sample = |_| {
        let started = core_seconds();
        let mut sum = 0;
        for _ in 0..4 {
            sum += sectors.iter().map(|&sector| index.locate(sector)).sum::<usize>();
        }
        std::hint::black_box(sum);
        4.0 * sectors.len() as f64 / (core_seconds() - started) / 1e6
    };
    let samples = (0..REPEATS).map(sample).collect();
    paths.iter().try_for_each(std::fs::remove_file)?;
    Ok(median(samples))
}

/// 10 GiB written in sequence. A seal does not look at the data, so each piece is punched out again behind the upper's
/// back: the map says 10 GiB, the disk holds none.
fn seal_sequential(folder: &Path) -> Outcome<f64> {
    let path = folder.join("sequential");
    let upper = Upper::create(&path, 10 * GIB, Uuid::NIL)?;
    let buf = vec![1u8; 4 << 20];
    for offset in (0..10 * GIB).step_by(buf.len()) {
        upper.write_at(&buf, offset)?;
        punch(&path, 4096 + offset, buf.len() as u64)?;
    }
    drop(upper);
    timed_seals(&path, folder)
}

/// 2.6 million separate runs (10 GiB of random 4 KiB writes), one sector each since their length does not matter.
fn seal_random(folder: &Path) -> Outcome<f64> {
    let path = folder.join("random");
    let count = 2_600_000;
    let upper = Upper::create(&path, count * 8 * KIB, Uuid::NIL)?;
    for number in 0..count {
        upper.write_at(&[7u8; 512], number * 8 * KIB)?;
        if number % 8192 == 8191 {
            punch(&path, 4096 + (number - 8191) * 8 * KIB, 8192 * 8 * KIB)?;
        }
    }
    drop(upper);
    timed_seals(&path, folder)
}

fn timed_seals(path: &Path, folder: &Path) -> Outcome<f64> {
    let mut samples = Vec::new();
    for _ in 0..REPEATS {
        let copy = folder.join("copy");
        let upper = clone_upper(path, &copy)?;
        let started = Instant::now();
        upper.seal()?;
        samples.push(milliseconds(started.elapsed()));
        std::fs::remove_file(copy)?;
    }
    remove_upper(path)?;
    Ok(median(samples))
}

fn punch(path: &Path, offset: u64, length: u64) -> Outcome {
    let file = std::fs::OpenOptions::new().write(true).open(path)?;
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, offset, length)?)
}

/// Another upper with the same header and map: the data file is all holes.
fn clone_upper(path: &Path, copy: &Path) -> Outcome<Upper> {
    let mut source = std::fs::File::open(path)?;
    let mut header = vec![0; 4096];
    source.read_exact(&mut header)?;
    std::fs::write(copy, header)?;
    let length = source.seek(std::io::SeekFrom::End(0))?;
    std::fs::OpenOptions::new().write(true).open(copy)?.set_len(length)?;
    std::fs::copy(aenv_layers::map_path(path), aenv_layers::map_path(copy))?;
    Ok(Upper::open(copy)?)
}
