//! A sealed layer: opened once, checked wholly, then read by many.
//!
//! Everything that a later read relies on is checked at open (`layer_file.rs`), so that a read of a mapped sector either
//! returns that sector's bytes or an error that names the file.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::SECTOR_BYTES;
use crate::error::{At, Error, Result};
use crate::file_ops::read_exact;
use crate::header::Fields;
use crate::index::Index;
use crate::layer_file;
use crate::segment::Segment;
use crate::upper::map_path;
use crate::uuid::Uuid;

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
        if map_path(path).try_exists().at(path, "look for a map file")? {
            return Err(Error::NotSealed { path: path.to_owned() });
        }
        let metadata = file.metadata().at(path, "stat")?;
        Ok((file, metadata))
    }

    /// The second half of `open`: reads and checks everything.
    pub(crate) fn load(path: &Path, file: File, metadata: &Metadata) -> Result<Layer> {
        let (fields, segments) = layer_file::read(&file, path, metadata.len())?;
        Ok(Layer {
            path: path.to_owned(),
            file,
            identity: Identity::of(metadata),
            fields,
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
