//! The layer's blob as a stream of tar bytes: read, hashed and decompressed on a thread of its own.
//!
//! Owns: both digests (of the blob as it is stored, and of the archive in it) and the limit on what decompression may
//! yield. Does not own: the archive's format. Memory is bounded by the chunks in the channel.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use sha2::{Digest as _, Sha256};

/// Decompressed bytes that are handed over at a time, and how many such chunks may wait.
const CHUNK_BYTES: usize = 256 << 10;
const CHUNKS_WAITING: usize = 8;
const READ_BYTES: usize = 256 << 10;
/// Memory that a zstd frame may ask for, as a power of two of bytes: what the usual tools allow.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// How a blob is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
    /// By its first bytes.
    Auto,
}

impl FromStr for Compression {
    type Err = ();

    fn from_str(text: &str) -> Result<Compression, ()> {
        match text {
            "none" => Ok(Compression::None),
            "gzip" => Ok(Compression::Gzip),
            "zstd" => Ok(Compression::Zstd),
            "auto" => Ok(Compression::Auto),
            _ => Err(()),
        }
    }
}

/// A SHA-256 digest as registries write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest(pub [u8; 32]);

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Digest {
    type Err = ();

    fn from_str(text: &str) -> Result<Digest, ()> {
        let hex = text.strip_prefix("sha256:").ok_or(())?.as_bytes();
        if hex.len() != 64 || !hex.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(());
        }
        let digit = |at: usize| char::from(hex[at]).to_digit(16).unwrap_or(0) as u8;
        Ok(Digest(std::array::from_fn(|at| digit(2 * at) << 4 | digit(2 * at + 1))))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error("{}: cannot be opened", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the blob cannot be read or decompressed")]
    Read(#[source] io::Error),
    #[error("the archive is larger than the limit of {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("the thread that reads the blob has ended early")]
    Ended,
}

/// Carries an [`InputError`] through `io::Read`; [`input_error`] takes it out again.
fn carried(error: InputError) -> io::Error {
    io::Error::other(error)
}

/// The error of this module in one that came through a reader.
pub fn input_error(error: &io::Error) -> Option<&InputError> {
    error.get_ref()?.downcast_ref()
}

/// What was read, known at its end.
#[derive(Debug, Clone, Copy)]
pub struct Digests {
    pub diff_id: Digest,
    pub blob: Digest,
}

/// The archive's bytes.
#[derive(Debug)]
pub struct Input {
    chunks: Receiver<Result<Vec<u8>, io::Error>>,
    thread: Option<JoinHandle<Digest>>,
    current: Vec<u8>,
    at: usize,
    total: u64,
    limit: u64,
    /// An error was told: what follows is no archive, and its end no success.
    failed: bool,
    diff: Sha256,
    read_bytes: Arc<AtomicU64>,
}

impl Input {
    /// Starts to read `path`, or standard input. `limit` bounds the bytes of the archive. Errors: `Open`.
    pub fn open(path: Option<&Path>, compression: Compression, limit: u64) -> Result<Input, InputError> {
        let source: Box<dyn Read + Send> = match path {
            None => Box::new(io::stdin()),
            Some(path) => Box::new(File::open(path).map_err(|source| InputError::Open {
                path: path.to_owned(),
                source,
            })?),
        };
        Ok(Input::start(source, compression, limit))
    }

    /// As [`Input::open`], of any source.
    pub fn start(source: Box<dyn Read + Send>, compression: Compression, limit: u64) -> Input {
        let (sender, chunks) = sync_channel(CHUNKS_WAITING);
        let read_bytes = Arc::new(AtomicU64::new(0));
        let counter = read_bytes.clone();
        let thread = std::thread::spawn(move || read_all(source, compression, &counter, &sender));
        Input {
            chunks,
            thread: Some(thread),
            current: Vec::new(),
            at: 0,
            total: 0,
            limit,
            failed: false,
            diff: Sha256::new(),
            read_bytes,
        }
    }

    /// Bytes of the blob that were read so far.
    pub fn blob_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Reads on to the end of the blob, what follows the archive in it included. Errors: `Read`, `TooLarge`, `Ended`.
    pub fn finish(mut self) -> Result<Digests, InputError> {
        while self.next_chunk()? {}
        let thread = self.thread.take().ok_or(InputError::Ended)?;
        let blob = thread.join().map_err(|_| InputError::Ended)?;
        let diff_id = Digest(self.diff.finalize().into());
        Ok(Digests { diff_id, blob })
    }

    /// Makes the next chunk the current one; false at the end.
    fn next_chunk(&mut self) -> Result<bool, InputError> {
        let next = self.receive();
        self.failed |= next.is_err();
        next
    }

    fn receive(&mut self) -> Result<bool, InputError> {
        if self.failed {
            return Err(InputError::Ended);
        }
        match self.chunks.recv() {
            // The thread has dropped its end: all was sent.
            Err(_) => Ok(false),
            Ok(Err(error)) => Err(InputError::Read(error)),
            Ok(Ok(chunk)) => {
                self.total += chunk.len() as u64;
                if self.total > self.limit {
                    return Err(InputError::TooLarge { limit: self.limit });
                }
                self.diff.update(&chunk);
                (self.current, self.at) = (chunk, 0);
                Ok(true)
            }
        }
    }
}

impl Read for Input {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.at == self.current.len() {
            if !self.next_chunk().map_err(carried)? {
                return Ok(0);
            }
        }
        let count = buf.len().min(self.current.len() - self.at);
        buf[..count].copy_from_slice(&self.current[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

/// The thread: sends all chunks or an error, and answers with the digest of the blob.
fn read_all(
    source: Box<dyn Read + Send>,
    compression: Compression,
    counter: &AtomicU64,
    sender: &SyncSender<Result<Vec<u8>, io::Error>>,
) -> Digest {
    let mut hash = Sha256::new();
    let mut counted = Counted {
        source,
        hash: &mut hash,
        counter,
    };
    if let Err(error) = send_chunks(&mut counted, compression, sender) {
        // Where the receiver is gone, nobody waits for it.
        let _ = sender.send(Err(error));
    }
    Digest(hash.finalize().into())
}

fn send_chunks(
    source: &mut impl Read,
    compression: Compression,
    sender: &SyncSender<Result<Vec<u8>, io::Error>>,
) -> io::Result<()> {
    let mut blob = BufReader::with_capacity(READ_BYTES, source);
    let mut decoder = decoder(&mut blob, compression)?;
    loop {
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut filled = 0;
        while filled < chunk.len() {
            match decoder.read(&mut chunk[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        chunk.truncate(filled);
        if chunk.is_empty() {
            break;
        }
        if sender.send(Ok(chunk)).is_err() {
            return Ok(());
        }
    }
    drop(decoder);
    // A decoder may stop before the blob's end; its digest covers all of it.
    io::copy(&mut blob, &mut io::sink()).map(drop)
}

fn decoder<'a, R: Read>(blob: &'a mut BufReader<R>, compression: Compression) -> io::Result<Box<dyn Read + 'a>> {
    use std::io::BufRead;
    let compression = match compression {
        Compression::Auto => match blob.fill_buf()? {
            [0x1f, 0x8b, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Compression::Zstd,
            // A skippable frame, which some writers begin with.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
            _ => Compression::None,
        },
        given => given,
    };
    Ok(match compression {
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(blob)),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(blob)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            Box::new(decoder)
        }
        Compression::None | Compression::Auto => Box::new(blob),
    })
}

/// Hashes and counts what passes.
struct Counted<'a> {
    source: Box<dyn Read + Send>,
    hash: &'a mut Sha256,
    counter: &'a AtomicU64,
}

impl Read for Counted<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buf)?;
        // Infallible: a hash takes everything.
        self.hash.write_all(&buf[..count])?;
        self.counter.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn read(blob: &[u8], compression: Compression, limit: u64) -> Result<(Vec<u8>, Digests), InputError> {
        let mut input = Input::start(Box::new(io::Cursor::new(blob.to_vec())), compression, limit);
        let mut content = Vec::new();
        if let Err(error) = input.read_to_end(&mut content) {
            return Err(*error.into_inner().unwrap().downcast().unwrap());
        }
        Ok((content, input.finish()?))
    }

    fn sha256(bytes: &[u8]) -> Digest {
        Digest(Sha256::digest(bytes).into())
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn both_digests_cover_everything() {
        let zstd = zstd::encode_all(&b"content"[..], 1).unwrap();
        for blob in [b"content".to_vec(), gzip(b"content"), zstd] {
            let (content, digests) = read(&blob, Compression::Auto, 100).unwrap();
            assert_eq!(content, b"content");
            assert_eq!(digests.diff_id, sha256(b"content"));
            assert_eq!(digests.blob, sha256(&blob));
        }
    }

    #[test]
    fn a_blob_of_several_members_is_one_archive() {
        let blob = [gzip(b"one"), gzip(b"two")].concat();
        let (_, digests) = read(&blob, Compression::Gzip, 100).unwrap();
        assert_eq!(digests.diff_id, sha256(b"onetwo"));
    }

    #[test]
    fn a_bomb_is_stopped_at_the_limit() {
        let blob = gzip(&vec![0; 10 << 20]);
        assert!(matches!(
            read(&blob, Compression::Auto, 1 << 20),
            Err(InputError::TooLarge { .. })
        ));
    }

    #[test]
    fn a_damaged_blob_is_an_error_for_good() {
        let mut blob = gzip(&vec![7; 100_000]);
        blob.truncate(blob.len() / 2);
        assert!(matches!(
            read(&blob, Compression::Auto, 1 << 20),
            Err(InputError::Read(_))
        ));
        let mut input = Input::start(Box::new(io::Cursor::new(blob)), Compression::Auto, 1 << 20);
        assert!(input.read_to_end(&mut Vec::new()).is_err());
        assert!(input.finish().is_err());
    }
}
