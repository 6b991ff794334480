//! What is encrypted comes back, and nothing else does.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use aenv_layers::{Blob, Error};
use proptest::prelude::*;

use super::*;
use crate::cipher::EncryptWriter;
use crate::{Cipher, Digest};

const KEY: [u8; 32] = [7; 32];
const CHUNK: usize = CHUNK_BYTES;

#[derive(Debug)]
struct Memory(Vec<u8>);

impl Blob for Memory {
    fn len_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let offset = offset as usize;
        buf.copy_from_slice(&self.0[offset..offset + buf.len()]);
        Ok(())
    }
}

fn plain(length: usize) -> Vec<u8> {
    (0..length).map(|i| ((i * 131) >> 3) as u8).collect()
}

fn encrypt(bytes: &[u8], piece: usize) -> Vec<u8> {
    let mut writer = EncryptWriter::new(&Cipher::new(KEY), Digest::of(bytes), Vec::new()).unwrap();
    for part in bytes.chunks(piece.max(1)) {
        writer.write_all(part).unwrap();
    }
    writer.finish().unwrap()
}

fn open(stored: &[u8], key: [u8; 32]) -> Result<DecryptedBlob, Error> {
    DecryptedBlob::open(Path::new("/l"), Arc::new(Memory(stored.to_vec())), &Cipher::new(key))
}

fn read_all(stored: &[u8]) -> Result<Vec<u8>, Error> {
    let blob = open(stored, KEY)?;
    let mut bytes = vec![0; blob.len_bytes() as usize];
    blob.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

fn cause(error: &Error) -> CipherError {
    match error {
        Error::Remote { source, .. } => source.downcast_ref::<CipherError>().unwrap().clone(),
        other => panic!("{other}"),
    }
}

#[test]
fn the_file_has_the_bytes_of_the_format() {
    let stored = encrypt(b"abc", 3);
    assert_eq!(&stored[..16], b"AENVCRYP\x01\0\0\0\0\0\x01\0");
    assert_ne!(stored[16..48], Digest::of(b"abc").0);
    assert!(stored[64..4096].iter().all(|&byte| byte == 0));
    assert_eq!(stored.len(), 4096 + 3 + 16);
    // Any change of derivation, nonce or additional data changes this, and makes old layers unreadable.
    let digest = "6870ecf8c99aa23282e008bd460ff7d14f216ad00bdb61fd0bab7ecda6833790";
    assert_eq!(Digest::of(&stored).to_string(), digest);
}

#[test]
fn sizes_around_a_chunk_come_back() {
    for length in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5] {
        let bytes = plain(length);
        assert!(read_all(&encrypt(&bytes, 10_000)).unwrap() == bytes, "{length}");
    }
}

#[test]
fn a_wrong_key_is_named() {
    let stored = encrypt(&plain(10), 10);
    assert_eq!(cause(&open(&stored, [8; 32]).unwrap_err()), CipherError::WrongKey);
}

#[test]
fn content_that_is_not_what_was_announced_is_refused() {
    let mut writer = EncryptWriter::new(&Cipher::new(KEY), Digest::of(b"other"), Vec::new()).unwrap();
    writer.write_all(b"text").unwrap();
    assert_eq!(writer.finish().unwrap_err().kind(), std::io::ErrorKind::InvalidData);
}

#[test]
fn a_read_beyond_the_end_is_an_error() {
    let blob = open(&encrypt(&plain(100), 100), KEY).unwrap();
    for offset in [99, 100, u64::MAX] {
        assert!(
            matches!(blob.read_exact_at(&mut [0; 2], offset), Err(Error::Corrupt { .. })),
            "{offset}"
        );
    }
}

#[test]
fn chunks_that_changed_places_are_found() {
    let mut stored = encrypt(&plain(3 * CHUNK), CHUNK);
    let (one, two) = (4096, 4096 + STORED_CHUNK_BYTES as usize);
    let (front, back) = stored.split_at_mut(two);
    front[one..].swap_with_slice(&mut back[..STORED_CHUNK_BYTES as usize]);
    assert_eq!(cause(&read_all(&stored).unwrap_err()), CipherError::Chunk { chunk: 0 });
}

#[test]
fn every_length_that_is_too_short_is_found_at_the_open() {
    let stored = encrypt(&plain(2 * CHUNK + 40), CHUNK);
    let boundary = 4096 + STORED_CHUNK_BYTES as usize;
    let lengths = [
        0,
        1,
        4095,
        4096,
        4097,
        4112,
        5000,
        boundary,
        boundary + 16,
        boundary + 17,
        stored.len() - 1,
    ];
    for length in lengths {
        let error = cause(&open(&stored[..length], KEY).unwrap_err());
        assert!(
            matches!(error, CipherError::Length { .. } | CipherError::Chunk { .. }),
            "{length}: {error}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_range_is_the_range_of_the_plain_bytes(
        length in 0usize..3 * CHUNK, piece in 1usize..2 * CHUNK, a in 0usize..3 * CHUNK, b in 0usize..3 * CHUNK,
    ) {
        let bytes = plain(length);
        let blob = open(&encrypt(&bytes, piece), KEY).unwrap();
        let (a, b) = (a.min(length), b.min(length));
        let range = a.min(b)..a.max(b);
        let mut found = vec![0; range.len()];
        blob.read_exact_at(&mut found, range.start as u64).unwrap();
        prop_assert!(found == bytes[range]);
    }

    #[test]
    fn a_changed_bit_is_found(length in 0usize..2 * CHUNK + 100, at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut stored = encrypt(&plain(length), CHUNK);
        let at = at.index(stored.len());
        stored[at] ^= 1 << bit;
        prop_assert!(read_all(&stored).is_err(), "byte {} bit {}", at, bit);
    }

    #[test]
    fn what_is_cut_off_is_found(length in 0usize..2 * CHUNK + 100, at in any::<prop::sample::Index>()) {
        let stored = encrypt(&plain(length), CHUNK);
        prop_assert!(open(&stored[..at.index(stored.len())], KEY).is_err());
    }
}
