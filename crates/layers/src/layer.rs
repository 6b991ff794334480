//! A sealed layer: opened once, checked wholly, then read by many.
//!
//! Everything that a later read relies on is checked at open, so that a read of a mapped sector either returns that
//! sector's bytes or an error that names the file. Nothing is assumed about who wrote the file.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::SECTOR_BYTES;
use crate::error::{At, Damage, Error, Result};
use crate::file_ops::read_exact;
use crate::header::{self, Fields, HEADER_BYTES, HEADER_LEN, Part};
use crate::index::{Index, MAX_SEGMENTS};
use crate::segment::{SECTOR_LIMIT, SEGMENT_BYTES, Segment};
use crate::upper::map_path;
use crate::uuid::Uuid;

/// Index bytes read at a time; bounds the memory beside the decoded entries.
const INDEX_CHUNK_BYTES: usize = 1 << 20;

/// One sealed, immutable LSMT file with its index in memory.
#[derive(Debug)]
pub struct Layer {
    path: PathBuf,
    file: File,
    identity: Identity,
    fields: Fields,
    index: Arc<Index>,
}

/// Which file it is, whatever its name: device and inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    pub fn of(metadata: &Metadata) -> Self {
        Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }
}

impl Layer {
    /// Opens and checks a sealed layer.
    ///
    /// Errors: `NotSealed` if a map file says that this is a writable upper; `Corrupt` with the damage; `Io`.
    pub fn open(path: &Path) -> Result<Layer> {
        let (file, metadata) = Self::open_file(path)?;
        Self::load(path, file, &metadata)
    }

    /// The first half of `open`: the file, not yet looked into.
    pub(crate) fn open_file(path: &Path) -> Result<(File, Metadata)> {
        let file = File::open(path).at(path, "open")?;
        // After the open: a seal that ends in between has removed the map, and what we hold is the layer.
        if map_path(path)
            .try_exists()
            .at(path, "look for a map file")?
        {
            return Err(Error::NotSealed {
                path: path.to_owned(),
            });
        }
        let metadata = file.metadata().at(path, "stat")?;
        Ok((file, metadata))
    }

    /// The second half of `open`: reads and checks everything.
    pub(crate) fn load(path: &Path, file: File, metadata: &Metadata) -> Result<Layer> {
        let damaged = |damage| Error::corrupt(path, damage);
        let frame = Frame::read(&file, path, metadata.len())?;
        let (segments, index_crc) = read_index(&file, path, &frame.fields)?;
        header::verify_own(&frame.header, &frame.trailer, index_crc).map_err(damaged)?;
        check_segments(&segments, &frame.fields).map_err(damaged)?;
        Ok(Layer {
            path: path.to_owned(),
            file,
            identity: Identity::of(metadata),
            fields: frame.fields,
            index: Arc::new(Index::new(segments)?),
        })
    }

    /// The layer that a seal has just made, without reading it back. Caller: `segments` are what the file says.
    pub(crate) fn sealed(path: &Path, fields: Fields, segments: Vec<Segment>) -> Result<Layer> {
        // A new descriptor: the upper's own is writable.
        let file = File::open(path).at(path, "open")?;
        let identity = Identity::of(&file.metadata().at(path, "stat")?);
        let index = Arc::new(Index::new(segments)?);
        Ok(Layer {
            path: path.to_owned(),
            file,
            identity,
            fields,
            index,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the image. A file that leaves it open (0, as upstream allows) ends with its last segment.
    pub fn virtual_size(&self) -> u64 {
        match self.fields.virtual_size {
            0 => self.segments().last().map_or(0, Segment::end) * SECTOR_BYTES,
            size => size,
        }
    }

    pub fn uuid(&self) -> Uuid {
        self.fields.uuid
    }

    /// The layer below, as the writer named it; nil if it did not.
    pub fn parent(&self) -> Uuid {
        self.fields.parent
    }

    pub fn index(&self) -> &Index {
        &self.index
    }

    pub(crate) fn shared_index(&self) -> Arc<Index> {
        self.index.clone()
    }

    pub fn segments(&self) -> &[Segment] {
        self.index.segments()
    }

    /// Bytes that the index maps to data (zero runs not counted).
    pub fn data_bytes(&self) -> u64 {
        self.segments()
            .iter()
            .filter(|s| !s.is_zero())
            .map(|s| s.sectors() * SECTOR_BYTES)
            .sum()
    }

    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    /// Reads bytes of the file from `file_sector` on; the file's end inside the range is an error.
    pub(crate) fn read_data(&self, buf: &mut [u8], file_sector: u64) -> Result<()> {
        read_exact(&self.file, &self.path, buf, file_sector * SECTOR_BYTES)
    }
}

/// Both ends of a file, decoded, with the index's place checked against the file's length.
struct Frame {
    header: Box<[u8; HEADER_LEN]>,
    trailer: Box<[u8; HEADER_LEN]>,
    fields: Fields,
}

impl Frame {
    fn read(file: &File, path: &Path, length: u64) -> Result<Frame> {
        let damaged = |damage| Error::corrupt(path, damage);
        if length < 2 * HEADER_BYTES {
            return Err(damaged(Damage::TooShort { length }));
        }
        let mut header = Box::new([0u8; HEADER_LEN]);
        let mut trailer = Box::new([0u8; HEADER_LEN]);
        read_exact(file, path, header.as_mut(), 0)?;
        read_exact(file, path, trailer.as_mut(), length - HEADER_BYTES)?;
        let head = Fields::decode(&header, Part::Header).map_err(damaged)?;
        let fields = Fields::decode(&trailer, Part::Trailer).map_err(damaged)?;
        // A header that knows where the index is must agree; most writers leave it 0.
        if head.sealed && head.index_offset != 0 && head.index_offset != fields.index_offset {
            return Err(damaged(Damage::HeaderMismatch));
        }
        check_frame(&fields, length).map_err(damaged)?;
        Ok(Frame {
            header,
            trailer,
            fields,
        })
    }
}

fn check_frame(fields: &Fields, length: u64) -> Result<(), Damage> {
    if fields.virtual_size > SECTOR_LIMIT * SECTOR_BYTES {
        return Err(Damage::VirtualSize {
            size: fields.virtual_size,
        });
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

/// The entries without padding, and the checksum of all entries' bytes.
fn read_index(file: &File, path: &Path, fields: &Fields) -> Result<(Vec<Segment>, u32)> {
    let total = fields.index_entries as usize * SEGMENT_BYTES;
    let mut segments = Vec::with_capacity(fields.index_entries as usize);
    let mut chunk = vec![0u8; total.min(INDEX_CHUNK_BYTES)];
    let (mut done, mut crc) = (0, 0);
    while done < total {
        let bytes = &mut chunk[..(total - done).min(INDEX_CHUNK_BYTES)];
        read_exact(file, path, bytes, fields.index_offset + done as u64)?;
        crc = crc32c::crc32c_append(crc, bytes);
        segments.extend(
            bytes
                .chunks_exact(SEGMENT_BYTES)
                .filter_map(Segment::decode),
        );
        done += bytes.len();
    }
    Ok((segments, crc))
}

/// What reads rely on: order, no overlap, every byte inside the data, nothing beyond the image.
fn check_segments(segments: &[Segment], fields: &Fields) -> Result<(), Damage> {
    let data = HEADER_BYTES / SECTOR_BYTES..=fields.index_offset / SECTOR_BYTES;
    let image_end = match fields.virtual_size {
        0 => SECTOR_LIMIT,
        size => size.div_ceil(SECTOR_BYTES),
    };
    let mut previous_end = 0;
    for (entry, segment) in (0..).zip(segments) {
        if segment.sectors() == 0 {
            return Err(Damage::EmptySegment { entry });
        }
        if segment.start() < previous_end {
            return Err(Damage::Unsorted { entry });
        }
        if segment.end() > image_end {
            return Err(Damage::BeyondSize { entry });
        }
        let first = segment.file_sector();
        if !segment.is_zero()
            && !(data.contains(&first) && data.contains(&(first + segment.sectors())))
        {
            return Err(Damage::DataOutside { entry });
        }
        previous_end = segment.end();
    }
    Ok(())
}
