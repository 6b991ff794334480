//! The writable top of a stack, in place: image offset `v` is at file offset `4096 + v` of a sparse data file, and a map
//! file beside it says which sectors are there. Rewriting a block rewrites it in the file, so the upper never grows
//! beyond the image.
//!
//! Order of writes, and why a kill at any point leaves each sector old or new:
//! - **write**: data first, then the map bits. Cut before the bits, the sectors read as before (a sector that was written
//!   already may hold the new bytes: the write was not acknowledged, so both are right).
//! - **discard**: map first, then the hole. Cut between, the range reads zero and only its space is not free yet. The map
//!   goes first because a flip of a bit cannot be seen half-done and a hole can, and because a hole cannot be taken back.
//! - **create**: map, then the data file under a temporary name, then its real name. A map without data file is a cut
//!   creation and is made anew.
//! - **seal**: see `seal.rs`.
//!
//! Many threads may call with `&self`. Disjoint ranges run in parallel; overlapping ones end in some order, as on a disk.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use crate::SECTOR_BYTES;
use crate::error::{At, Damage, Error, Result};
use crate::extent::Sectors;
use crate::file_ops::{FileOps, SystemOps, begins_at_once, read_exact, write_all};
use crate::header::{Fields, HEADER_BYTES, HEADER_LEN, Part};
use crate::layer::Layer;
use crate::map::{Map, SectorState};
use crate::map_header::MapHeader;
use crate::seal::{self, SealReport};
use crate::uuid::Uuid;

/// Largest upper: half of what ext4 allows for a file, so that index and trailer always fit behind the data.
pub const MAX_UPPER_BYTES: u64 = 8 << 40;

/// The data area ends at a multiple of this, so that the index is aligned for direct I/O.
const DATA_ALIGN: u64 = 4096;

/// A writable layer.
#[derive(Debug)]
pub struct Upper {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) map: Map,
    /// What the sealed header will say, without the index.
    pub(crate) fields: Fields,
    pub(crate) ops: Arc<dyn FileOps>,
    /// Whether reads of the file can be begun without waiting.
    pub(crate) begins_at_once: bool,
    /// Held shared by every change, exclusively by a seal; true once sealed.
    pub(crate) sealed: RwLock<bool>,
}

/// What is at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    /// No data file; at most the leftovers of a creation that was cut.
    Missing,
    /// A writable upper, perhaps one whose seal was cut.
    Upper,
    /// A file without a map: a sealed layer, unless it is damaged ([`Layer::open`] tells).
    Sealed,
}

/// Tells an upper from a layer, without opening it: an upper is what has a map file.
pub fn probe(path: &Path) -> Result<FileState> {
    let exists = |path: &Path| path.try_exists().at(path, "look for a file");
    Ok(match (exists(path)?, exists(&map_path(path))?) {
        (false, _) => FileState::Missing,
        (true, true) => FileState::Upper,
        (true, false) => FileState::Sealed,
    })
}

/// The map file of the upper at `path`.
pub fn map_path(path: &Path) -> PathBuf {
    suffixed(path, ".map")
}

/// Whether an upper, and thus a stack, may have this many bytes.
pub(crate) fn is_upper_size(size: u64) -> bool {
    size > 0 && size <= MAX_UPPER_BYTES && size.is_multiple_of(SECTOR_BYTES)
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

impl Upper {
    /// Makes an empty upper of `size` bytes over `parent` (nil for none).
    ///
    /// Errors: `Exists`, `BadSize`, `Io` (the map's blocks are allocated at once, 1/2048 of the size).
    pub fn create(path: &Path, size: u64, parent: Uuid) -> Result<Upper> {
        Self::create_with(Arc::new(SystemOps), path, size, parent)
    }

    /// Opens an upper, also one that a killed process left; a cut seal is undone.
    ///
    /// Errors: `Sealed` if the file has no map and opens as a layer, `Corrupt` if one of the two files is missing or
    /// damaged, `Io`. Caller: no other process seals it at the same time.
    pub fn open(path: &Path) -> Result<Upper> {
        Self::open_with(Arc::new(SystemOps), path)
    }

    pub(crate) fn create_with(ops: Arc<dyn FileOps>, path: &Path, size: u64, parent: Uuid) -> Result<Upper> {
        if !is_upper_size(size) {
            return Err(Error::BadSize {
                size,
                limit: MAX_UPPER_BYTES,
            });
        }
        // Before the map is touched: it would be the living one's.
        if path.try_exists().at(path, "look for a file")? {
            return Err(Error::Exists { path: path.to_owned() });
        }
        refuse_lost_data(path)?;
        let uuid = Uuid::random().at(path, "make an identifier")?;
        let fields = Fields {
            sealed: false,
            sparse: true,
            index_offset: 0,
            index_entries: 0,
            virtual_size: size,
            uuid,
            parent,
        };
        let (map, file) = create_files(ops.as_ref(), path, &fields).inspect_err(|error| {
            if error.kind() != crate::ErrorKind::Exists {
                // A full disk should not stay full of our remains; the error to tell is the first one.
                let _ = remove_with(ops.as_ref(), path);
            }
        })?;
        Ok(Upper {
            path: path.to_owned(),
            begins_at_once: begins_at_once(&file),
            file,
            map,
            fields,
            ops,
            sealed: RwLock::new(false),
        })
    }

    pub(crate) fn open_with(ops: Arc<dyn FileOps>, path: &Path) -> Result<Upper> {
        let file = OpenOptions::new().read(true).write(true).open(path).at(path, "open")?;
        let map = match Map::open(&map_path(path)) {
            Err(error) if error.kind() == crate::ErrorKind::NotFound => {
                return Err(without_map(path));
            }
            other => other?,
        };
        let mut bytes = [0u8; HEADER_LEN];
        read_exact(&file, path, &mut bytes, 0)?;
        let found = Fields::decode(&bytes, Part::Header).map_err(|damage| Error::corrupt(path, damage))?;
        let MapHeader { virtual_size, uuid } = map.header();
        if (found.virtual_size, found.uuid) != (virtual_size, uuid) {
            return Err(Error::corrupt(path, Damage::Map));
        }
        let fields = Fields {
            sealed: false,
            index_offset: 0,
            index_entries: 0,
            ..found
        };
        let upper = Upper {
            path: path.to_owned(),
            begins_at_once: begins_at_once(&file),
            file,
            map,
            fields,
            ops,
            sealed: RwLock::new(false),
        };
        let length = upper.file.metadata().at(path, "stat")?.len();
        if length < upper.data_end() {
            let missing = upper.data_end() - length;
            return Err(Error::corrupt(
                path,
                Damage::ShortRead {
                    offset: length,
                    missing,
                },
            ));
        }
        if found.sealed || length > upper.data_end() {
            seal::undo(&upper)?;
        }
        Ok(upper)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the image.
    pub fn size(&self) -> u64 {
        self.fields.virtual_size
    }

    pub fn uuid(&self) -> Uuid {
        self.fields.uuid
    }

    /// Writes whole sectors. On return they survive the death of the process (not a power loss).
    ///
    /// Errors: `Unaligned`, `OutOfRange`, `Sealed`, `Io`; after an I/O error each sector of the range is old or new.
    pub fn write_at(&self, buf: &[u8], offset: u64) -> Result<()> {
        let range = Sectors::new(offset, buf.len() as u64, self.size())?;
        let _open = self.open_for_changes()?;
        let place = HEADER_BYTES + offset;
        write_all(self.ops.as_ref(), &self.file, &self.path, "write", buf, place)?;
        self.map
            .set_written(self.ops.as_ref(), range)
            .at(&self.path, "mark as written")
    }

    /// Asks the disk to take what was written in the range, and waits until it has. Makes nothing durable: what it takes
    /// to find the data after a power loss is not asked for, and an error is seen by who syncs.
    pub(crate) fn write_back(&self, offset: u64, length: u64) {
        use libc::{SYNC_FILE_RANGE_WAIT_AFTER, SYNC_FILE_RANGE_WAIT_BEFORE, SYNC_FILE_RANGE_WRITE};
        let flags = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
        let (start, length) = ((HEADER_BYTES + offset) as i64, length as i64);
        // SAFETY: takes a descriptor that the borrow keeps open, and numbers. A failure leaves the pages to the kernel's
        // own write-back.
        let _ = unsafe { libc::sync_file_range(self.file.as_raw_fd(), start, length, flags) };
    }

    /// Makes the range read zero, also where a layer below has data, and gives its disk space back. Errors: as `write_at`.
    pub fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let range = Sectors::new(offset, length, self.size())?;
        if range.is_empty() {
            return Ok(());
        }
        let _open = self.open_for_changes()?;
        self.map
            .set_trimmed(self.ops.as_ref(), range)
            .at(&self.path, "mark as trimmed")?;
        self.ops
            .punch(&self.file, HEADER_BYTES + offset, length)
            .at(&self.path, "punch a hole")
    }

    /// Reads the range as if there were no layer below: what was neither written nor trimmed is zero.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let range = Sectors::new(offset, buf.len() as u64, self.size())?;
        self.read_over(buf, range, |part, _| {
            part.fill(0);
            Ok(())
        })
    }

    /// Turns the upper into a sealed layer at the same path, in time that depends on the number of runs and not on the
    /// bytes written. Nothing is synced. After an error it is still this upper and may be sealed again.
    pub fn seal(&self) -> Result<(Arc<Layer>, SealReport)> {
        seal::seal(self, |_| Ok(|| ()))
    }

    /// Reads the range; parts that the upper does not have are filled by `below(part, first sector)`.
    pub(crate) fn read_over(
        &self,
        buf: &mut [u8],
        range: Sectors,
        mut below: impl FnMut(&mut [u8], u64) -> Result<()>,
    ) -> Result<()> {
        let mut rest = buf;
        let mut at = range.start;
        while at < range.end {
            let (state, end) = self.map.run(at, range.end);
            let (part, after) = rest.split_at_mut(((end - at) * SECTOR_BYTES) as usize);
            match state {
                SectorState::Written => read_exact(&self.file, &self.path, part, HEADER_BYTES + at * SECTOR_BYTES)?,
                SectorState::Trimmed => part.fill(0),
                SectorState::Below => below(part, at)?,
            }
            rest = after;
            at = end;
        }
        Ok(())
    }

    /// File offset at which the data area ends and the index of a seal begins.
    pub(crate) fn data_end(&self) -> u64 {
        data_end(self.size())
    }

    fn open_for_changes(&self) -> Result<RwLockReadGuard<'_, bool>> {
        // A panic of another thread leaves no half-changed state behind this lock: it guards one bool.
        let guard = self.sealed.read().unwrap_or_else(PoisonError::into_inner);
        match *guard {
            true => Err(Error::Sealed {
                path: self.path.clone(),
            }),
            false => Ok(guard),
        }
    }
}

/// Removes an upper, whatever is left of it: also the traces of a cut creation or of a cut seal's successor. Nothing there
/// is fine. Caller: nobody has it open. Errors: `Io`.
pub fn remove_upper(path: &Path) -> Result<()> {
    remove_with(&SystemOps, path)
}

fn remove_with(ops: &dyn FileOps, path: &Path) -> Result<()> {
    // The data first: what is left of a cut removal then says that data is missing, and never opens as a layer.
    for path in [path.to_owned(), map_path(path), suffixed(path, ".new")] {
        match ops.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at(&path, "remove")?,
            _ => {}
        }
    }
    Ok(())
}

fn data_end(size: u64) -> u64 {
    HEADER_BYTES + size.next_multiple_of(DATA_ALIGN)
}

/// Map, then the data file, complete before it has its name.
fn create_files(ops: &dyn FileOps, path: &Path, fields: &Fields) -> Result<(Map, File)> {
    let header = MapHeader {
        virtual_size: fields.virtual_size,
        uuid: fields.uuid,
    };
    let map = Map::create(ops, &map_path(path), header)?;
    let draft = suffixed(path, ".new");
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&draft)
        .at(&draft, "create")?;
    ops.set_len(&file, data_end(fields.virtual_size))
        .at(&draft, "set the size")?;
    write_all(ops, &file, &draft, "write the header", &fields.encode(Part::Header), 0)?;
    ops.publish(&draft, path).at(path, "give the upper its name")?;
    Ok((map, file))
}

/// A map without data file is the trace of a cut creation only if nothing was ever written; else the data was lost, and
/// a new upper in its place would hide that.
fn refuse_lost_data(path: &Path) -> Result<()> {
    match Map::open(&map_path(path)) {
        Ok(map) if !map.is_unused() => Err(Error::corrupt(path, Damage::DataMissing)),
        _ => Ok(()),
    }
}

/// Why there is no map: sealed, or damaged.
fn without_map(path: &Path) -> Error {
    match Layer::open(path) {
        Ok(_) => Error::Sealed { path: path.to_owned() },
        Err(_) => Error::corrupt(path, Damage::MapMissing),
    }
}
