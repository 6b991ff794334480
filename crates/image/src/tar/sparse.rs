//! Maps of sparse files: which parts of the file the archive holds.

use super::header::{Malformed, Record, unsigned};
use super::{RECORD_BYTES, SPARSE_PIECES_MAX};

/// Where in a header GNU's old format has its first pieces, and where in the records that follow.
const OLD_HEADER_PIECES: std::ops::Range<usize> = 386..482;
const OLD_HEADER_MORE: usize = 482;
const OLD_RECORD_PIECES: std::ops::Range<usize> = 0..504;
const OLD_RECORD_MORE: usize = 504;
const OLD_REAL_SIZE: std::ops::Range<usize> = 483..495;

pub type Pieces = Vec<(u64, u64)>;

/// A map that is being read, and whether more records of it follow.
pub fn old_header(record: &Record) -> Result<(u64, Pieces, bool), Malformed> {
    let mut pieces = Pieces::new();
    old_pieces(&record[OLD_HEADER_PIECES], &mut pieces)?;
    Ok((unsigned(&record[OLD_REAL_SIZE])?, pieces, record[OLD_HEADER_MORE] != 0))
}

/// Takes over one more record; whether yet another follows.
pub fn old_record(record: &Record, pieces: &mut Pieces) -> Result<bool, Malformed> {
    old_pieces(&record[OLD_RECORD_PIECES], pieces)?;
    Ok(record[OLD_RECORD_MORE] != 0)
}

fn old_pieces(entries: &[u8], pieces: &mut Pieces) -> Result<(), Malformed> {
    for entry in entries.chunks_exact(24) {
        // The first unused one ends the list.
        if entry[0] == 0 || entry[12] == 0 {
            break;
        }
        pieces.push((unsigned(&entry[..12])?, unsigned(&entry[12..])?));
        limit(pieces.len())?;
    }
    Ok(())
}

/// Offsets and lengths in turn.
pub fn pairs(numbers: &[u64]) -> Result<Pieces, Malformed> {
    if !numbers.len().is_multiple_of(2) {
        return Err("the map of a sparse file has an odd length");
    }
    limit(numbers.len() / 2)?;
    Ok(numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
}

pub fn limit(pieces: usize) -> Result<(), Malformed> {
    match pieces <= SPARSE_PIECES_MAX {
        true => Ok(()),
        false => Err("a sparse file has more than 1048576 pieces"),
    }
}

/// Checks that the pieces are in order, inside of the file, and exactly what the archive holds.
pub fn check(pieces: &Pieces, real_size: u64, stored: u64) -> Result<(), Malformed> {
    let (mut end, mut sum) = (0u64, 0u64);
    for &(offset, length) in pieces {
        let next = offset.checked_add(length).ok_or("the map of a sparse file overflows")?;
        if offset < end || next > real_size {
            return Err("the map of a sparse file is not in order or ends beyond the file");
        }
        end = next;
        sum += length;
    }
    match sum == stored {
        true => Ok(()),
        false => Err("the map of a sparse file does not match the size of its data"),
    }
}

/// The list in front of the data of version 1.0: numbers in lines, the count of pieces first, filled up to whole records.
#[derive(Debug, Default)]
pub struct LeadingMap {
    numbers: Vec<u64>,
    current: Option<u64>,
}

impl LeadingMap {
    /// Takes over one record; the map once it is complete.
    pub fn push(&mut self, record: &[u8; RECORD_BYTES]) -> Result<Option<Pieces>, Malformed> {
        const MALFORMED: Malformed = "the map of a sparse file is malformed";
        for &byte in record {
            match byte {
                b'0'..=b'9' => {
                    let digit = u64::from(byte - b'0');
                    let value = self
                        .current
                        .unwrap_or(0)
                        .checked_mul(10)
                        .and_then(|value| value.checked_add(digit));
                    self.current = Some(value.ok_or(MALFORMED)?);
                }
                b'\n' => {
                    self.numbers.push(self.current.take().ok_or(MALFORMED)?);
                    if self.is_complete()? {
                        return pairs(&self.numbers[1..]).map(Some);
                    }
                }
                _ => return Err(MALFORMED),
            }
        }
        Ok(None)
    }

    fn is_complete(&self) -> Result<bool, Malformed> {
        let count = usize::try_from(self.numbers[0]).unwrap_or(usize::MAX);
        limit(count)?;
        Ok(self.numbers.len() == 1 + 2 * count)
    }
}
