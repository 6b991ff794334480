//! Encryption at rest: AES-256-GCM over chunks, each layer with a key of its own.
//!
//! ```text
//! offset  bytes
//!      0      8   magic "AENVCRYP"
//!      8      4   version, 1
//!     12      4   plain bytes of a chunk, 65536
//!     16     32   salt
//!     48     16   check of the key
//!     64   4032   0
//!   4096          chunks, each followed by its tag of 16 bytes; all but the last one are full
//! ```
//!
//! Little endian. The salt is HMAC-SHA256(master key, "aenv layer salt 1" and the SHA-256 of the plain bytes): equal for
//! equal content, and without the key nobody can tell whether a file holds some content that he knows. The key of a file
//! is HKDF-SHA256(master key, salt, "aenv layer key 1"), the check is the same with "aenv key check 1". The nonce of a chunk is three zero bytes, the chunk's number (big endian, 8 bytes) and 1 for the
//! last chunk, else 0; its additional data are bytes 0-63 of the file. So chunks cannot change places, move to another
//! file, or be missing at the end, and equal layers stay equal: they can be shared without being read.
//!
//! The plain bytes are exactly those that are encrypted, compressed ones included: two texts under one key would share
//! nonces, which breaks GCM. [`EncryptWriter::finish`] therefore checks the digest.

use std::io::{self, Write};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use ring::hmac;

use crate::{Digest, Hasher};

/// Bytes before the first chunk: a page, so that chunks of a sparse or mapped file start aligned.
pub(crate) const HEADER_BYTES: u64 = 4096;
/// Plain bytes of a chunk, the unit of reads.
pub(crate) const CHUNK_BYTES: usize = 64 << 10;
pub(crate) const TAG_BYTES: usize = 16;

pub(crate) const MAGIC: &[u8; 8] = b"AENVCRYP";
const VERSION: u32 = 1;
/// The part of the header that is not zero.
pub(crate) const FIELDS_BYTES: usize = 64;
const SALT_BYTES: usize = 32;
const CHECK_BYTES: usize = 16;
const SALT_INFO: &[u8] = b"aenv layer salt 1";
const KEY_INFO: &[u8] = b"aenv layer key 1";
const CHECK_INFO: &[u8] = b"aenv key check 1";

/// The master key of the configuration.
#[derive(Clone)]
pub struct Cipher {
    master: [u8; 32],
}

/// Encrypted bytes that are not what was written, or the wrong key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CipherError {
    #[error("these bytes are not encrypted by this program, or their header is damaged")]
    Header,
    #[error("encryption of version {version} is not known")]
    Version { version: u32 },
    #[error("the encryption key is not the one that this was encrypted with")]
    WrongKey,
    #[error("{length} bytes cannot be an encrypted layer: it was cut off")]
    Length { length: u64 },
    #[error("chunk {chunk} was changed, moved or cut off after it was encrypted")]
    Chunk { chunk: u64 },
}

/// The key of one file.
pub(crate) struct FileKey {
    key: LessSafeKey,
    pub header: [u8; FIELDS_BYTES],
}

impl Cipher {
    pub fn new(master: [u8; 32]) -> Cipher {
        Cipher { master }
    }

    /// The key of the file whose plain bytes have the digest `plain`.
    pub(crate) fn key_of(&self, plain: Digest) -> FileKey {
        let mut mac = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, &self.master));
        mac.update(SALT_INFO);
        mac.update(&plain.0);
        let mut salt = [0; SALT_BYTES];
        salt.copy_from_slice(mac.sign().as_ref());
        self.derive(salt)
    }

    fn derive(&self, salt: [u8; SALT_BYTES]) -> FileKey {
        let prk: Prk = Salt::new(HKDF_SHA256, &salt).extract(&self.master);
        let mut header = [0; FIELDS_BYTES];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(CHUNK_BYTES as u32).to_le_bytes());
        header[16..48].copy_from_slice(&salt);
        // HKDF refuses only outputs of more than 8160 bytes.
        let check = prk.expand(&[CHECK_INFO], CheckLength);
        check
            .and_then(|check| check.fill(&mut header[48..]))
            .expect("HKDF gives 16 bytes");
        let key = prk.expand(&[KEY_INFO], &AES_256_GCM).expect("HKDF gives a key");
        let key = LessSafeKey::new(UnboundKey::from(key));
        FileKey { key, header }
    }

    /// The key that fits a file's header. Errors: `Header`, `Version`, `WrongKey`.
    pub(crate) fn open_header(&self, header: &[u8; HEADER_BYTES as usize]) -> Result<FileKey, CipherError> {
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if !header.starts_with(MAGIC) {
            return Err(CipherError::Header);
        }
        let version = word(8);
        if version != VERSION {
            return Err(CipherError::Version { version });
        }
        let mut salt = [0; SALT_BYTES];
        salt.copy_from_slice(&header[16..48]);
        let found = self.derive(salt);
        let (fields, rest) = header.split_at(FIELDS_BYTES);
        if fields[..48] != found.header[..48] || rest.iter().any(|&byte| byte != 0) {
            return Err(CipherError::Header);
        }
        // Not a secret and no proof of anything: it tells a wrong key from damage.
        match fields[48..] == found.header[48..] {
            true => Ok(found),
            false => Err(CipherError::WrongKey),
        }
    }
}

struct CheckLength;

impl KeyType for CheckLength {
    fn len(&self) -> usize {
        CHECK_BYTES
    }
}

impl FileKey {
    /// Encrypts a chunk where it is and appends its tag.
    fn seal(&self, chunk: u64, last: bool, bytes: &mut Vec<u8>) {
        let sealed = self
            .key
            .seal_in_place_append_tag(nonce(chunk, last), Aad::from(&self.header), bytes);
        // AES-GCM refuses only texts of more than 64 GiB.
        sealed.expect("a chunk can be encrypted");
    }

    /// Decrypts a chunk with its tag, where it is; returns the plain part.
    pub fn open<'a>(&self, chunk: u64, last: bool, bytes: &'a mut [u8]) -> Result<&'a mut [u8], CipherError> {
        self.key
            .open_in_place(nonce(chunk, last), Aad::from(&self.header), bytes)
            .map_err(|_| CipherError::Chunk { chunk })
    }
}

impl std::fmt::Debug for FileKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FileKey")
    }
}

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cipher")
    }
}

fn nonce(chunk: u64, last: bool) -> Nonce {
    let mut bytes = [0; 12];
    bytes[3..11].copy_from_slice(&chunk.to_be_bytes());
    bytes[11] = last.into();
    Nonce::assume_unique_for_key(bytes)
}

/// Encrypts what is written to it, in one pass.
#[derive(Debug)]
pub struct EncryptWriter<W> {
    inner: W,
    key: FileKey,
    plain: Digest,
    hasher: Hasher,
    buffer: Vec<u8>,
    chunk: u64,
}

impl<W: Write> EncryptWriter<W> {
    /// Starts an encrypted file whose plain bytes have the digest `plain`; writes its header. Errors: those of `inner`.
    pub fn new(cipher: &Cipher, plain: Digest, mut inner: W) -> io::Result<EncryptWriter<W>> {
        let key = cipher.key_of(plain);
        inner.write_all(&key.header)?;
        inner.write_all(&[0; HEADER_BYTES as usize - FIELDS_BYTES])?;
        Ok(EncryptWriter {
            inner,
            key,
            plain,
            hasher: Hasher::new(),
            buffer: Vec::with_capacity(CHUNK_BYTES + TAG_BYTES),
            chunk: 0,
        })
    }

    /// Writes the last chunk and gives the inner writer back. Without it the file is one that was cut off.
    ///
    /// Errors: `InvalidData` if what was written does not have the digest that was announced (then the file must not be
    /// kept); those of the inner writer.
    pub fn finish(mut self) -> io::Result<W> {
        let found = std::mem::take(&mut self.hasher).finish();
        if found != self.plain {
            let text = format!("the bytes to encrypt have the digest {found} and not {}", self.plain);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        self.write_chunk(true)?;
        Ok(self.inner)
    }

    fn write_chunk(&mut self, last: bool) -> io::Result<()> {
        self.key.seal(self.chunk, last, &mut self.buffer);
        self.inner.write_all(&self.buffer)?;
        self.buffer.clear();
        self.chunk += 1;
        Ok(())
    }
}

impl<W: Write> Write for EncryptWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A full chunk waits until it is known whether it is the last one.
        if self.buffer.len() == CHUNK_BYTES && !bytes.is_empty() {
            self.write_chunk(false)?;
        }
        let taken = bytes.len().min(CHUNK_BYTES - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        self.hasher.update(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
