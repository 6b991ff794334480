//! The canonical bytes of a layer: what its digest is taken of and what leaves the node.
//!
//! A layer that was sealed in place is a sparse file as long as its image. Its canonical form is the dense file that
//! `LayerWriter` would have made of it: the same identity and the same runs, data packed in their order. Any other layer
//! is its own canonical form, byte for byte. Envelopes (tar, ZFile) are outside of it: equal layers have equal canonical
//! bytes however they are stored.
//!
//! Nothing is copied to make it: header, index and trailer are known from the index in memory, and the data is read where
//! it is. So the form can be read front to back, or by ranges and by several threads.

use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;

use crate::SECTOR_BYTES;
use crate::blob::Blob;
use crate::error::{Damage, Error, Result};
use crate::extent::Sectors;
use crate::header::{Fields, HEADER_BYTES, HEADER_LEN};
use crate::index::{Index, Piece};
use crate::layer::Layer;
use crate::segment::{SEGMENT_BYTES, Segment};
use crate::writer::{INDEX_ALIGN, push_run};

/// The canonical bytes of one layer, by position. Keeps the layer's file open.
#[derive(Debug, Clone)]
pub struct Canonical {
    stored: Arc<dyn Blob>,
    /// None: the stored bytes are it.
    dense: Option<Arc<Dense>>,
}

/// The dense form of a sparse layer.
#[derive(Debug)]
struct Dense {
    layer: std::path::PathBuf,
    source: Arc<Index>,
    segments: Vec<Segment>,
    /// Positions in `segments` of those with data; their file sectors ascend.
    data: Vec<u32>,
    header: Box<[u8; HEADER_LEN]>,
    trailer: Box<[u8; HEADER_LEN]>,
    index_offset: u64,
    trailer_offset: u64,
}

impl Canonical {
    /// Costs one pass over the index of a sparse layer, and as much memory as that; nothing for others.
    pub fn new(layer: &Layer) -> Canonical {
        Canonical {
            stored: layer.blob().clone(),
            dense: layer.is_sparse().then(|| Arc::new(Dense::new(layer))),
        }
    }

    /// The bytes from the front, as a stream.
    pub fn reader(&self) -> CanonicalReader {
        CanonicalReader {
            canonical: self.clone(),
            position: 0,
        }
    }
}

impl Blob for Canonical {
    fn len_bytes(&self) -> u64 {
        match &self.dense {
            Some(dense) => dense.trailer_offset + HEADER_BYTES,
            None => self.stored.len_bytes(),
        }
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let Some(dense) = &self.dense else {
            return self.stored.read_exact_at(buf, offset);
        };
        let rest = self.len_bytes().saturating_sub(offset);
        if (buf.len() as u64) > rest {
            let (offset, missing) = (offset.saturating_add(rest), buf.len() as u64 - rest);
            return Err(Error::corrupt(&dense.layer, Damage::ShortRead { offset, missing }));
        }
        dense.read(self.stored.as_ref(), buf, offset)
    }
}

impl Dense {
    fn new(layer: &Layer) -> Dense {
        let mut segments = Vec::with_capacity(layer.segments().len());
        let mut sector = HEADER_BYTES / SECTOR_BYTES;
        for segment in layer.segments() {
            let range = Sectors {
                start: segment.start(),
                end: segment.end(),
            };
            push_run(&mut segments, range, (!segment.is_zero()).then_some(sector));
            sector += if segment.is_zero() { 0 } else { segment.sectors() };
        }
        let crc = segments
            .iter()
            .fold(0, |crc, segment| crc32c::crc32c_append(crc, &segment.encode()));
        let fields = Fields {
            sealed: true,
            sparse: false,
            index_offset: sector * SECTOR_BYTES,
            index_entries: segments.len() as u64,
            virtual_size: layer.writer_size(),
            uuid: layer.uuid(),
            parent: layer.parent(),
        };
        let (header, trailer) = fields.encode_sealed(crc);
        let index_bytes = (segments.len() as u64 * SEGMENT_BYTES as u64).next_multiple_of(INDEX_ALIGN);
        // An index has at most 2^26 entries.
        let positions = segments.iter().zip(0u32..).filter(|(segment, _)| !segment.is_zero());
        Dense {
            layer: layer.path().to_owned(),
            source: layer.shared_index(),
            data: positions.map(|(_, position)| position).collect(),
            segments,
            header: Box::new(header),
            trailer: Box::new(trailer),
            index_offset: fields.index_offset,
            trailer_offset: fields.index_offset + index_bytes,
        }
    }

    /// Caller: the range lies inside of the form.
    fn read(&self, stored: &dyn Blob, buf: &mut [u8], offset: u64) -> Result<()> {
        let mut rest = buf;
        let mut at = offset;
        while !rest.is_empty() {
            let end = match at {
                0..HEADER_BYTES => HEADER_BYTES,
                _ if at < self.index_offset => self.index_offset,
                _ if at < self.trailer_offset => self.trailer_offset,
                _ => self.trailer_offset + HEADER_BYTES,
            };
            let (part, after) = rest.split_at_mut(rest.len().min((end - at) as usize));
            if end == HEADER_BYTES {
                part.copy_from_slice(&self.header[at as usize..][..part.len()]);
            } else if end == self.index_offset {
                self.read_data(stored, part, at)?;
            } else if end == self.trailer_offset {
                self.read_index(part, at - self.index_offset);
            } else {
                let start = (at - self.trailer_offset) as usize;
                part.copy_from_slice(&self.trailer[start..][..part.len()]);
            }
            at += part.len() as u64;
            rest = after;
        }
        Ok(())
    }

    /// The entries from byte `at` of the index on, zeros behind the last one.
    fn read_index(&self, part: &mut [u8], at: u64) {
        part.fill(0);
        let first = at as usize / SEGMENT_BYTES;
        let mut skipped = at as usize % SEGMENT_BYTES;
        let mut rest = part;
        for segment in self.segments.get(first..).unwrap_or(&[]) {
            let count = (SEGMENT_BYTES - skipped).min(rest.len());
            rest[..count].copy_from_slice(&segment.encode()[skipped..][..count]);
            rest = &mut rest[count..];
            skipped = 0;
            if rest.is_empty() {
                break;
            }
        }
    }

    fn read_data(&self, stored: &dyn Blob, part: &mut [u8], offset: u64) -> Result<()> {
        let sector = offset / SECTOR_BYTES;
        let first = self
            .data
            .partition_point(|&position| self.segments[position as usize].file_sector() <= sector);
        let mut rest = part;
        let mut at = offset;
        // At least one starts at or before the sector: the first with data starts the data.
        for &position in &self.data[first.saturating_sub(1)..] {
            let segment = self.segments[position as usize];
            let within = at - segment.file_sector() * SECTOR_BYTES;
            let count = (segment.sectors() * SECTOR_BYTES - within).min(rest.len() as u64);
            let (run, after) = rest.split_at_mut(count as usize);
            self.read_run(stored, run, segment.start() * SECTOR_BYTES + within)?;
            rest = after;
            at += count;
            if rest.is_empty() {
                break;
            }
        }
        Ok(())
    }

    /// Reads image bytes that are all mapped to data, from wherever the layer has them.
    fn read_run(&self, stored: &dyn Blob, run: &mut [u8], image_offset: u64) -> Result<()> {
        let end = image_offset + run.len() as u64;
        self.source
            .for_each(image_offset / SECTOR_BYTES, end.div_ceil(SECTOR_BYTES), |piece| {
                let Piece::Mapped(segment) = piece else { return Ok(()) };
                let (start, stop) = (segment.start() * SECTOR_BYTES, segment.end() * SECTOR_BYTES);
                let (from, to) = (start.max(image_offset), stop.min(end));
                let part = &mut run[(from - image_offset) as usize..(to - image_offset) as usize];
                stored.read_exact_at(part, segment.file_sector() * SECTOR_BYTES + (from - start))
            })
    }
}

/// The canonical bytes as a stream. Errors of the layer come as `io::Error` with this crate's error inside.
#[derive(Debug)]
pub struct CanonicalReader {
    canonical: Canonical,
    position: u64,
}

impl CanonicalReader {
    pub fn new(layer: &Layer) -> CanonicalReader {
        Canonical::new(layer).reader()
    }

    /// Bytes of the whole form.
    pub fn len(&self) -> u64 {
        self.canonical.len_bytes()
    }

    /// Never true: a layer has two ends.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills as much of `buf` as there are bytes left; returns how many.
    pub fn read_chunk(&mut self, buf: &mut [u8]) -> Result<usize> {
        let left = self.len().saturating_sub(self.position);
        let count = (buf.len() as u64).min(left) as usize;
        self.canonical.read_exact_at(&mut buf[..count], self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl Read for CanonicalReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.read_chunk(buf).map_err(io::Error::other)
    }
}

impl Seek for CanonicalReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let target = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::End(offset) => self.len().checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        self.position = target.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}
