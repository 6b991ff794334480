//! The tar around a layer, as registries want one: header blocks of 512 bytes, the content of one regular file, and two
//! blocks of zeros. Upstream writes a PAX header first, whose `size` counts; Go's writer does so above 8 GiB only.
//!
//! Owns: finding the first regular file of a tar, and the frame to put around one. Does not own: tars of file trees.

use std::ops::Range;
use std::path::Path;

use crate::blob::Blob;
use crate::error::{Damage, Error, Result};

const BLOCK_BYTES: u64 = 512;
type Block = [u8; BLOCK_BYTES as usize];

/// Header blocks before the file. Upstream writes two, others add a long name and link.
const HEADERS_MAX: usize = 8;
/// Bytes of a PAX header: upstream's holds one record.
const PAX_BYTES_MAX: u64 = 64 << 10;
/// First size that twelve octal digits and a terminator cannot hold.
const OCTAL_SIZE_END: u64 = 1 << 33;
/// The file's name, which upstream's tools look for.
const FILE_NAME: &[u8] = b"overlaybd.commit";
const PAX_NAME: &[u8] = b"overlaybd.pax";

/// How a tar contradicts its format, or holds no layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TarDamage {
    #[error("tar header {header} does not have its checksum")]
    Checksum { header: usize },
    #[error("the size in tar header {header} is no number")]
    Size { header: usize },
    #[error("the PAX header is malformed or has more than 65536 bytes")]
    Pax,
    #[error("the tar does not begin with a regular file")]
    NoFile,
    #[error("a tar member of {size} bytes at byte {offset} ends beyond the tar")]
    Outside { offset: u64, size: u64 },
}

/// Whether these first bytes are a tar's. Its checksum is left to `locate`, so that a damaged tar is told as one.
pub(crate) fn is_tar(start: &Block) -> bool {
    start[257..].starts_with(b"ustar")
}

/// Where the content of the first regular file is.
pub(crate) fn locate(blob: &dyn Blob, path: &Path) -> Result<Range<u64>> {
    let damaged = |damage| Error::corrupt(path, Damage::Tar(damage));
    let mut offset = 0;
    let mut pax_size = None;
    for header in 0..HEADERS_MAX {
        let mut block = [0; BLOCK_BYTES as usize];
        let start = offset + BLOCK_BYTES;
        if start > blob.len_bytes() {
            return Err(damaged(TarDamage::NoFile));
        }
        blob.read_exact_at(&mut block, offset)?;
        if !is_tar(&block) || number(&block[148..156]) != Some(sum(&block)) {
            return Err(damaged(TarDamage::Checksum { header }));
        }
        let size = number(&block[124..136]).ok_or_else(|| damaged(TarDamage::Size { header }))?;
        let is_file = matches!(block[156], b'0' | 0);
        let size = pax_size.filter(|_| is_file).unwrap_or(size);
        let end = start.checked_add(size).filter(|&end| end <= blob.len_bytes());
        let end = end.ok_or_else(|| damaged(TarDamage::Outside { offset: start, size }))?;
        match block[156] {
            b'0' | 0 => return Ok(start..end),
            b'x' => {
                pax_size =
                    read_pax(blob, start..end).map_err(|error| error.unwrap_or_else(|| damaged(TarDamage::Pax)))?
            }
            // A global header, a long name, a long link: nothing that we need.
            b'g' | b'L' | b'K' => {}
            _ => return Err(damaged(TarDamage::NoFile)),
        }
        // No overflow: the end lies in the blob.
        offset = end.next_multiple_of(BLOCK_BYTES);
    }
    Err(damaged(TarDamage::NoFile))
}

/// The `size` record of a PAX header; an error is the blob's, or none for a malformed header.
fn read_pax(blob: &dyn Blob, place: Range<u64>) -> Result<Option<u64>, Option<Error>> {
    if place.end - place.start > PAX_BYTES_MAX {
        return Err(None);
    }
    let mut bytes = vec![0; (place.end - place.start) as usize];
    blob.read_exact_at(&mut bytes, place.start)?;
    let mut rest = bytes.as_slice();
    let mut size = None;
    while !rest.is_empty() {
        // "25 key=value\n": the number is the length of the whole record.
        let blank = rest.iter().position(|&byte| byte == b' ').ok_or(None)?;
        let length = decimal(&rest[..blank]).ok_or(None)? as usize;
        let record = rest
            .get(blank + 1..length)
            .and_then(|record| record.strip_suffix(b"\n"))
            .ok_or(None)?;
        if let Some(value) = record.strip_prefix(b"size=") {
            size = Some(decimal(value).ok_or(None)?);
        }
        rest = &rest[length..];
    }
    Ok(size)
}

fn decimal(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// A number of a header: octal with blanks or NULs around, or (Go and GNU, for large sizes) binary with the top bit set.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let bytes = std::iter::once(field[0] & 0x7f).chain(field[1..].iter().copied());
        return bytes.into_iter().try_fold(0u64, |value, byte| {
            let shifted = value.checked_mul(256)?;
            Some(shifted | u64::from(byte))
        });
    }
    let text = std::str::from_utf8(field).ok()?;
    let digits = text.trim_matches([' ', '\0']);
    match digits.is_empty() {
        true => Some(0),
        false => u64::from_str_radix(digits, 8).ok(),
    }
}

/// The checksum of a header: the sum of its bytes, with blanks in the place of the checksum itself.
fn sum(block: &Block) -> u64 {
    let total: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    let own: u64 = block[148..156].iter().map(|&byte| u64::from(byte)).sum();
    total - own + 8 * u64::from(b' ')
}

/// What stands before and behind the content of a layer's tar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TarFrame {
    pub head: Vec<u8>,
    /// Fills the content's last block up, and two blocks of zeros.
    pub tail: Vec<u8>,
}

impl TarFrame {
    /// The frame of a file `overlaybd.commit` with `content_bytes` bytes: one header block, two more from 8 GiB on. The same
    /// length gives the same bytes: owner 0, mode 0444, time 0.
    pub fn new(content_bytes: u64) -> TarFrame {
        let mut head = Vec::new();
        let mut size = content_bytes;
        if content_bytes >= OCTAL_SIZE_END {
            let record = size_record(content_bytes);
            head.extend(header(PAX_NAME, b'x', record.len() as u64));
            head.extend(record);
            head.resize(2 * BLOCK_BYTES as usize, 0);
            size = 0;
        }
        head.extend(header(FILE_NAME, b'0', size));
        let padding = content_bytes.wrapping_neg() % BLOCK_BYTES;
        TarFrame {
            head,
            tail: vec![0; (padding + 2 * BLOCK_BYTES) as usize],
        }
    }
}

/// The record counts its own length, digits included: two, as it has about 20 bytes.
fn size_record(size: u64) -> Vec<u8> {
    let value = size.to_string();
    let length = "NN size=\n".len() + value.len();
    format!("{length} size={value}\n").into_bytes()
}

fn header(name: &[u8], kind: u8, size: u64) -> Block {
    let mut block = [0; BLOCK_BYTES as usize];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name);
    put(100, b"0000444\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{size:011o}\0").as_bytes());
    put(136, b"00000000000\0");
    put(156, &[kind]);
    put(257, b"ustar\x0000");
    let checksum = format!("{:06o}\0 ", sum(&block));
    block[148..156].copy_from_slice(checksum.as_bytes());
    block
}
