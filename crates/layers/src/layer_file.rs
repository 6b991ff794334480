//! Reads and checks the two ends and the index of a file that claims to be a sealed layer. Nothing is assumed about who
//! wrote it: every number is compared with what the file can hold before it is used.

use std::ops::RangeInclusive;
use std::path::Path;

use crate::SECTOR_BYTES;
use crate::blob::Blob;
use crate::error::{Damage, Error, Result};
use crate::header::{self, Fields, HEADER_BYTES, HEADER_LEN, Part};
use crate::index::MAX_SEGMENTS;
use crate::segment::{SECTOR_LIMIT, SEGMENT_BYTES, Segment};

/// Index bytes read at a time. A sparse file can claim a large index at no cost, so memory grows only with entries that
/// passed the checks.
const INDEX_CHUNK_BYTES: usize = 1 << 20;

/// Bytes before the end that an open asks for ahead: a trailer with the index of a layer of some thousand runs. A store
/// that is a round trip away brings them while the header is on its way.
const TAIL_BYTES: u64 = 64 << 10;

/// The fields and the checked index of the layer in `blob`, known as `path`.
pub(crate) fn read(blob: &dyn Blob, path: &Path) -> Result<(Fields, Vec<Segment>)> {
    let damaged = |damage| Error::corrupt(path, damage);
    let length = blob.len_bytes();
    if length < 2 * HEADER_BYTES {
        return Err(damaged(Damage::TooShort { length }));
    }
    blob.will_read(length - TAIL_BYTES.min(length), TAIL_BYTES.min(length));
    let mut header = Box::new([0u8; HEADER_LEN]);
    let mut trailer = Box::new([0u8; HEADER_LEN]);
    blob.read_exact_at(header.as_mut(), 0)?;
    blob.read_exact_at(trailer.as_mut(), length - HEADER_BYTES)?;
    let head = Fields::decode(&header, Part::Header).map_err(damaged)?;
    let fields = Fields::decode(&trailer, Part::Trailer).map_err(damaged)?;
    // A header that knows where the index is must agree; most writers leave it 0.
    if head.sealed && head.index_offset != 0 && head.index_offset != fields.index_offset {
        return Err(damaged(Damage::HeaderMismatch));
    }
    check_place(&fields, length).map_err(damaged)?;
    let (segments, index_crc) = read_index(blob, path, &fields)?;
    header::verify_own(&header, &trailer, index_crc).map_err(damaged)?;
    Ok((fields, segments))
}

/// The index must lie between the header and the trailer.
fn check_place(fields: &Fields, length: u64) -> Result<(), Damage> {
    let size = fields.virtual_size;
    if size > SECTOR_LIMIT * SECTOR_BYTES {
        return Err(Damage::VirtualSize { size });
    }
    let (offset, entries) = (fields.index_offset, fields.index_entries);
    let end = entries
        .checked_mul(SEGMENT_BYTES as u64)
        .and_then(|bytes| bytes.checked_add(offset));
    let fits = end.is_some_and(|end| end <= length - HEADER_BYTES);
    if !fits || offset < HEADER_BYTES || offset % SECTOR_BYTES != 0 || entries > MAX_SEGMENTS {
        return Err(Damage::IndexOutside { offset, entries });
    }
    Ok(())
}

/// The entries without padding, and the checksum of all entries' bytes. Caller: the index's place is checked.
fn read_index(blob: &dyn Blob, path: &Path, fields: &Fields) -> Result<(Vec<Segment>, u32)> {
    let total = fields.index_entries as usize * SEGMENT_BYTES;
    blob.will_read(fields.index_offset, total as u64);
    let mut check = Check::new(fields);
    let mut segments = Vec::new();
    let mut chunk = vec![0u8; total.min(INDEX_CHUNK_BYTES)];
    let (mut done, mut crc) = (0, 0);
    while done < total {
        let bytes = &mut chunk[..(total - done).min(INDEX_CHUNK_BYTES)];
        blob.read_exact_at(bytes, fields.index_offset + done as u64)?;
        crc = crc32c::crc32c_append(crc, bytes);
        for segment in bytes.chunks_exact(SEGMENT_BYTES).filter_map(Segment::decode) {
            check.next(&segment).map_err(|damage| Error::corrupt(path, damage))?;
            segments.push(segment);
        }
        done += bytes.len();
    }
    segments.shrink_to_fit();
    Ok((segments, crc))
}

/// What reads rely on: order, no overlap, every byte inside the data, nothing beyond the image.
struct Check {
    /// Sectors of the file that a run may begin or end at.
    data: RangeInclusive<u64>,
    image_end: u64,
    previous_end: u64,
    entry: u64,
}

impl Check {
    fn new(fields: &Fields) -> Self {
        let image_end = match fields.virtual_size {
            0 => SECTOR_LIMIT,
            size => size.div_ceil(SECTOR_BYTES),
        };
        let data = HEADER_BYTES / SECTOR_BYTES..=fields.index_offset / SECTOR_BYTES;
        Check {
            data,
            image_end,
            previous_end: 0,
            entry: 0,
        }
    }

    fn next(&mut self, segment: &Segment) -> Result<(), Damage> {
        let entry = self.entry;
        if segment.sectors() == 0 {
            return Err(Damage::EmptySegment { entry });
        }
        if segment.start() < self.previous_end {
            return Err(Damage::Unsorted { entry });
        }
        if segment.end() > self.image_end {
            return Err(Damage::BeyondSize { entry });
        }
        let (first, end) = (segment.file_sector(), segment.file_sector() + segment.sectors());
        let inside = self.data.contains(&first) && self.data.contains(&end);
        if !segment.is_zero() && !inside {
            return Err(Damage::DataOutside { entry });
        }
        self.previous_end = segment.end();
        self.entry += 1;
        Ok(())
    }
}
