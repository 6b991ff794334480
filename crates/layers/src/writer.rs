//! Writes a new layer as a stream: data in ascending order, then index and trailer.
//!
//! The file is no layer until [`LayerWriter::finish`] has returned: it has no trailer before. A writer that is dropped
//! before that removes its file.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use crate::SECTOR_BYTES;
use crate::error::{At, Error, Result};
use crate::extent::Sectors;
use crate::file_ops::{SystemOps, write_all};
use crate::header::{Fields, HEADER_BYTES, Part};
use crate::index::MAX_SEGMENTS;
use crate::layer::Layer;
use crate::segment::{MAX_SEGMENT_SECTORS, SECTOR_LIMIT, SEGMENT_BYTES, Segment};
use crate::uuid::Uuid;

/// Data gathered before it is written; larger pieces go to the file directly.
const BUFFER_BYTES: usize = 1 << 20;
/// The index is padded with zeros to this, so that the trailer stays aligned for direct I/O.
pub(crate) const INDEX_ALIGN: u64 = 4096;

/// Builds one sealed layer.
#[derive(Debug)]
pub struct LayerWriter {
    path: PathBuf,
    file: File,
    fields: Fields,
    segments: Vec<Segment>,
    buffer: Vec<u8>,
    /// File offset of the first buffered byte.
    written: u64,
    finished: bool,
}

impl LayerWriter {
    /// Starts a layer of `virtual_size` bytes over `parent` (nil for none).
    ///
    /// Errors: `Exists` if the path is taken, `BadSize`, `Io`.
    pub fn create(path: &Path, virtual_size: u64, parent: Uuid) -> Result<LayerWriter> {
        let limit = SECTOR_LIMIT * SECTOR_BYTES;
        if virtual_size == 0 || virtual_size > limit || !virtual_size.is_multiple_of(SECTOR_BYTES) {
            return Err(Error::BadSize {
                size: virtual_size,
                limit,
            });
        }
        let fields = Fields {
            sealed: false,
            sparse: false,
            index_offset: 0,
            index_entries: 0,
            virtual_size,
            uuid: Uuid::random().at(path, "make an identifier")?,
            parent,
        };
        let file = create_new(path)?;
        let (segments, buffer) = (Vec::new(), Vec::new());
        let writer = LayerWriter {
            path: path.to_owned(),
            file,
            fields,
            segments,
            buffer,
            written: HEADER_BYTES,
            finished: false,
        };
        write_all(
            &SystemOps,
            &writer.file,
            path,
            "write the header",
            &fields.encode(Part::Header),
            0,
        )?;
        Ok(writer)
    }

    /// Sets the identity, for a layer that must have a known one.
    pub fn set_uuid(&mut self, uuid: Uuid) {
        self.fields.uuid = uuid;
    }

    pub fn uuid(&self) -> Uuid {
        self.fields.uuid
    }

    /// Reserves disk space for `data_bytes` of data and `runs` runs, so that later appends cannot run out of it. What is
    /// not used is given back at the end.
    ///
    /// Errors: `Io` (kind `NoSpace` where the disk is too small), `BadSize`.
    pub fn reserve(&mut self, data_bytes: u64, runs: u64) -> Result<()> {
        // Both ends, and the padding of the index.
        let frame = 2 * HEADER_BYTES + INDEX_ALIGN;
        let index = runs.checked_mul(SEGMENT_BYTES as u64);
        let total = index.and_then(|index| index.checked_add(frame)?.checked_add(data_bytes));
        let limit = SECTOR_LIMIT * SECTOR_BYTES;
        let total = total.filter(|&total| total <= limit);
        let total = total.ok_or(Error::BadSize {
            size: data_bytes,
            limit,
        })?;
        let reserve = || rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, total);
        rustix::io::retry_on_intr(reserve).at(&self.path, "reserve space")
    }

    /// Appends data at the image offset `offset`, which must not lie before the end of the last segment.
    pub fn append(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let range = self.check(offset, data.len() as u64)?;
        let file_sector = (self.written + self.buffer.len() as u64) / SECTOR_BYTES;
        if self.buffer.len() + data.len() > BUFFER_BYTES {
            self.flush()?;
        }
        if data.len() > BUFFER_BYTES {
            write_all(&SystemOps, &self.file, &self.path, "write data", data, self.written)?;
            self.written += data.len() as u64;
        } else {
            self.buffer.extend_from_slice(data);
        }
        self.push(range, Some(file_sector))
    }

    /// Appends a run that reads zero, also where a layer below has data.
    pub fn append_zero(&mut self, offset: u64, length: u64) -> Result<()> {
        let range = self.check(offset, length)?;
        self.push(range, None)
    }

    /// Writes index and trailer and opens the layer. Nothing is synced: the caller syncs file and directory before a
    /// record names the layer.
    pub fn finish(mut self) -> Result<Layer> {
        self.flush()?;
        self.fields.index_offset = self.written;
        self.fields.sealed = true;
        let segments = std::mem::take(&mut self.segments);
        let fields = write_tail(&SystemOps, &self.file, &self.path, self.fields, &segments)?;
        // Gives back what `reserve` took too much.
        let length = self.file.metadata().at(&self.path, "stat")?.len();
        self.file.set_len(length).at(&self.path, "release reserved space")?;
        let layer = Layer::sealed(&self.path, fields, segments)?;
        self.finished = true;
        Ok(layer)
    }

    fn check(&self, offset: u64, length: u64) -> Result<Sectors> {
        let range = Sectors::new(offset, length, self.fields.virtual_size)?;
        let end = self.segments.last().map_or(0, Segment::end);
        if range.start < end {
            return Err(Error::OutOfOrder {
                path: self.path.clone(),
                offset,
                end: end * SECTOR_BYTES,
            });
        }
        Ok(range)
    }

    fn push(&mut self, range: Sectors, file_sector: Option<u64>) -> Result<()> {
        push_run(&mut self.segments, range, file_sector);
        match self.segments.len() as u64 {
            count if count > MAX_SEGMENTS => Err(Error::TooManySegments {
                count,
                limit: MAX_SEGMENTS,
            }),
            _ => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<()> {
        write_all(
            &SystemOps,
            &self.file,
            &self.path,
            "write data",
            &self.buffer,
            self.written,
        )?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

impl Drop for LayerWriter {
    fn drop(&mut self) {
        if !self.finished {
            // Nobody is left to hear of a failure; a leftover is no layer, since it has no trailer.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Creates a file that must not exist yet.
pub(crate) fn create_new(path: &Path) -> Result<File> {
    match OpenOptions::new().read(true).write(true).create_new(true).open(path) {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Err(Error::Exists { path: path.to_owned() }),
        other => other.at(path, "create"),
    }
}

/// Adds a run to a sorted list: grows the last segment where image and file go on without a gap, splits at the limit of
/// the length field. `file_sector` is none for a zero run.
pub(crate) fn push_run(segments: &mut Vec<Segment>, range: Sectors, file_sector: Option<u64>) {
    let mut at = range.start;
    while at < range.end {
        let place = file_sector.map(|first| first + (at - range.start));
        let room = segments
            .last()
            .filter(|last| continues(last, at, place))
            .map(Segment::sectors);
        let taken = room.unwrap_or(0);
        let length = (range.end - at).min(MAX_SEGMENT_SECTORS - taken);
        if taken > 0 {
            segments.pop();
        }
        let grown = taken + length;
        segments.push(match place {
            Some(place) => Segment::data(at - taken, grown, place - taken),
            // Upstream wants the unused offset of a zero run inside the data area: its lowest sector always is.
            None => Segment::zero(at - taken, grown, HEADER_BYTES / SECTOR_BYTES),
        });
        at += length;
    }
}

fn continues(last: &Segment, at: u64, place: Option<u64>) -> bool {
    let adjacent = last.end() == at && last.sectors() < MAX_SEGMENT_SECTORS;
    adjacent
        && match place {
            Some(place) => !last.is_zero() && last.file_sector() + last.sectors() == place,
            None => last.is_zero(),
        }
}

/// Writes index, trailer and sealed header, in this order, and returns the final fields. `fields.index_offset` is where
/// the index goes. The header comes last: until then the file's first page says that it is not sealed.
pub(crate) fn write_tail(
    ops: &dyn crate::file_ops::FileOps,
    file: &File,
    path: &Path,
    mut fields: Fields,
    segments: &[Segment],
) -> Result<Fields> {
    fields.index_entries = segments.len() as u64;
    fields.sealed = true;
    let mut offset = fields.index_offset;
    let mut crc = 0;
    let mut bytes = Vec::with_capacity(BUFFER_BYTES);
    for chunk in segments.chunks(BUFFER_BYTES / SEGMENT_BYTES) {
        bytes.clear();
        chunk
            .iter()
            .for_each(|segment| bytes.extend_from_slice(&segment.encode()));
        crc = crc32c::crc32c_append(crc, &bytes);
        bytes.resize(bytes.len().next_multiple_of(INDEX_ALIGN as usize), 0);
        write_all(ops, file, path, "write the index", &bytes, offset)?;
        offset += bytes.len() as u64;
    }
    let (header, trailer) = fields.encode_sealed(crc);
    write_all(ops, file, path, "write the trailer", &trailer, offset)?;
    write_all(ops, file, path, "write the sealed header", &header, 0)?;
    Ok(fields)
}
