//! What several tests need: bytes in memory as a blob, with damage on demand; ZFiles and changes of them.

// Not every test uses all of it.
#![allow(dead_code)]

pub mod zfile;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use aenv_layers::{Blob, Damage, Error, FileBlob};

/// Bytes in memory. `bad` bytes are inverted in the first `bad_reads` reads that touch them.
#[derive(Debug)]
pub struct Memory {
    pub path: PathBuf,
    pub bytes: Vec<u8>,
    pub bad: std::ops::Range<u64>,
    pub bad_reads: AtomicUsize,
    pub reads: AtomicUsize,
    pub distrusted: AtomicUsize,
    /// Ranges that were announced.
    pub announced: Mutex<Vec<(u64, u64)>>,
}

impl Memory {
    pub fn new(name: &str, bytes: Vec<u8>) -> Memory {
        Memory {
            path: PathBuf::from(name),
            bytes,
            bad: 0..0,
            bad_reads: AtomicUsize::new(0),
            reads: AtomicUsize::new(0),
            distrusted: AtomicUsize::new(0),
            announced: Mutex::default(),
        }
    }
}

impl Blob for Memory {
    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let from = self.bytes.get(offset as usize..).unwrap_or(&[]);
        let part = from.get(..buf.len()).ok_or_else(|| Error::Corrupt {
            path: self.path.clone(),
            damage: Damage::ShortRead {
                offset: self.len_bytes(),
                missing: (buf.len() - from.len()) as u64,
            },
        })?;
        buf.copy_from_slice(part);
        let end = offset + buf.len() as u64;
        let (from, to) = (self.bad.start.max(offset), self.bad.end.min(end));
        if from < to && self.bad_reads.load(Ordering::Relaxed) > 0 {
            self.bad_reads.fetch_sub(1, Ordering::Relaxed);
            buf[(from - offset) as usize..(to - offset) as usize]
                .iter_mut()
                .for_each(|byte| *byte = !*byte);
        }
        Ok(())
    }

    fn will_read(&self, offset: u64, length: u64) {
        self.announced.lock().unwrap().push((offset, length));
    }

    fn distrust(&self, _offset: u64, _length: u64) {
        self.distrusted.fetch_add(1, Ordering::Relaxed);
    }
}

/// All bytes of a blob.
pub fn content(blob: &dyn Blob) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0xcc; blob.len_bytes() as usize];
    blob.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

pub fn file(path: &Path) -> Arc<dyn Blob> {
    Arc::new(FileBlob::open(path).unwrap())
}

/// Bytes that compress about as file systems do: text-like runs, zeros, noise.
pub fn mixed(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::with_capacity(length + 4096);
    while bytes.len() < length {
        let count = 1 + next() as usize % 2000;
        match next() % 4 {
            0 => bytes.extend(std::iter::repeat_n(0, count)),
            1 => (0..count).for_each(|_| bytes.push(next() as u8)),
            _ => {
                let word = next().to_le_bytes();
                (0..count).for_each(|at| bytes.push(word[at % (3 + (word[0] % 5) as usize)] & 0x7f));
            }
        }
    }
    bytes.truncate(length);
    bytes
}

/// The file that a vector describes: `length N`, then `offset [x times]: bytes`; all else is zero.
pub fn vector(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    for line in std::fs::read_to_string(path).unwrap().lines() {
        let line = line.split('#').next().unwrap().trim();
        if let Some(length) = line.strip_prefix("length 0x") {
            bytes.resize(usize::from_str_radix(length, 16).unwrap(), 0);
        } else if let Some((place, data)) = line.split_once(':') {
            let (at, times) = place.split_once(" x ").unwrap_or((place, "1"));
            let at = usize::from_str_radix(at, 16).unwrap();
            let data: Vec<u8> = data
                .split_whitespace()
                .map(|byte| u8::from_str_radix(byte, 16).unwrap())
                .collect();
            let data = data.repeat(times.parse().unwrap());
            bytes[at..at + data.len()].copy_from_slice(&data);
        }
    }
    bytes
}
