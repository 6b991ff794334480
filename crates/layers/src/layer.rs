//! A sealed layer: opened once, checked wholly, then read by many.
//!
//! Everything that a later read relies on is checked at open (`layer_file.rs`), so that a read of a mapped sector either
//! returns that sector's bytes or an error that names the file.

use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::SECTOR_BYTES;
use crate::blob::{Blob, FileBlob, FileIdentity};
use crate::cold::{ColdReads, Reader};
use crate::envelope;
use crate::error::{At, Error, Result};
use crate::file_ops::begins_at_once;
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
    blob: Arc<dyn Blob>,
    identity: FileIdentity,
    /// Keeps the file of `identity` open where the blob does not, so that its number names no other file meanwhile.
    _anchor: Option<File>,
    fields: Fields,
    index: Arc<Index>,
    /// None if the bytes are not just those of a file. Made at the open and not at a read, which must not wait for another
    /// file system's open.
    cold: Option<ColdReads>,
    /// Whether its bytes are just those of a file whose reads can be begun without waiting.
    begins_at_once: bool,
}

impl Layer {
    /// Opens and checks a sealed layer in a local file.
    ///
    /// Errors: `NotSealed` if a map file says that this is a writable upper; `Corrupt` with the damage; `Io`.
    pub fn open(path: &Path) -> Result<Layer> {
        let (file, metadata) = Self::open_file(path)?;
        Self::open_blob(path, Arc::new(FileBlob::of(path, file, &metadata)))
    }

    /// Opens and checks the sealed layer in `blob`; errors name it `path`. Errors: `Corrupt`, those of the blob.
    pub fn open_blob(path: &Path, blob: Arc<dyn Blob>) -> Result<Layer> {
        let identity = blob.file_identity().unwrap_or_else(FileIdentity::unique);
        Self::load(path, blob, identity, None)
    }

    /// As `open_blob`, for a blob that is known by the file `anchor`, which says where its bytes are.
    pub(crate) fn open_anchored(path: &Path, blob: Arc<dyn Blob>, anchor: File, metadata: &Metadata) -> Result<Layer> {
        match blob.file_identity() {
            Some(_) => Self::open_blob(path, blob),
            None => Self::load(path, blob, FileIdentity::of(metadata), Some(anchor)),
        }
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

    fn load(path: &Path, blob: Arc<dyn Blob>, identity: FileIdentity, anchor: Option<File>) -> Result<Layer> {
        let blob = envelope::open(path, blob)?;
        let (fields, segments) = layer_file::read(blob.as_ref(), path)?;
        let (cold, begins_at_once) = (cold_reads(blob.as_ref()), blob.file().is_some_and(begins_at_once));
        Ok(Layer {
            path: path.to_owned(),
            blob,
            identity,
            _anchor: anchor,
            fields,
            index: Arc::new(Index::new(segments)?),
            cold,
            begins_at_once,
        })
    }

    /// The layer that a seal has just made, without reading it back. Caller: `segments` are what the file says.
    pub(crate) fn sealed(path: &Path, fields: Fields, segments: Vec<Segment>) -> Result<Layer> {
        // A new descriptor: the upper's own is writable.
        let blob = FileBlob::open(path)?;
        let identity = blob.file_identity().unwrap_or_else(FileIdentity::unique);
        let (cold, begins_at_once) = (cold_reads(&blob), blob.file().is_some_and(begins_at_once));
        Ok(Layer {
            path: path.to_owned(),
            blob: Arc::new(blob),
            identity,
            _anchor: None,
            fields,
            index: Arc::new(Index::new(segments)?),
            cold,
            begins_at_once,
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

    /// The size that a writer of this layer must give: whole sectors, one at least. Others leave it open or odd; its last
    /// sector is whole all the same.
    pub(crate) fn writer_size(&self) -> u64 {
        self.virtual_size().next_multiple_of(SECTOR_BYTES).max(SECTOR_BYTES)
    }

    /// Whether the file is as long as its image, with holes: a layer that was sealed in place. See [`crate::Canonical`].
    pub fn is_sparse(&self) -> bool {
        self.fields.sparse
    }

    /// The layer's bytes, out of their envelope if they have one.
    pub fn blob(&self) -> &Arc<dyn Blob> {
        &self.blob
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

    pub(crate) fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// Reads the layer's bytes from `file_sector` on; their end inside the range is an error.
    pub(crate) fn read_stored(&self, buf: &mut [u8], file_sector: u64) -> Result<()> {
        self.blob.read_exact_at(buf, file_sector * SECTOR_BYTES)
    }

    /// As `read_stored`, for somebody who caches what it reads: perhaps past the host's page cache.
    pub(crate) fn read_for_cacher(&self, reader: Reader, buf: &mut [u8], file_sector: u64) -> Result<()> {
        let offset = file_sector * SECTOR_BYTES;
        if let (Some(file), Some(cold)) = (self.blob.file(), &self.cold)
            && cold.read(reader, file, buf, offset)
        {
            return Ok(());
        }
        self.read_stored(buf, file_sector)
    }

    /// The file that such a reader reads `buf` from, at `file_sector`, if the layer's bytes are just those of a file whose
    /// reads can be begun without waiting.
    pub(crate) fn file_for_cacher(&self, reader: Reader, buf: &[u8], file_sector: u64) -> Option<&File> {
        let file = self.blob.file().filter(|_| self.begins_at_once)?;
        let offset = file_sector * SECTOR_BYTES;
        let direct = self
            .cold
            .as_ref()
            .and_then(|cold| cold.file_for(reader, file, buf, offset));
        Some(direct.unwrap_or(file))
    }
}

fn cold_reads(blob: &dyn Blob) -> Option<ColdReads> {
    ColdReads::of(blob.file()?, blob.len_bytes())
}
