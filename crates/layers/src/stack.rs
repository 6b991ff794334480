//! A stack of layers as one device: sealed lowers, bottom first, and at most one upper on top.
//!
//! A read or write takes the stack's current state (an `Arc`, under a read lock held for nanoseconds) and works on that.
//! A seal closes the old upper to writes (it waits for those under way, and new ones wait for it), writes index and
//! trailer, commits, puts the next state in place and only then lets the waiting writes see that the upper is sealed: they
//! take the state again and go to the new upper. So every write lands either in the layer that is being sealed, before its
//! index is made, or in the new upper. Reads never wait: one that began earlier goes on with the old state, whose content
//! is frozen and complete.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use crate::SECTOR_BYTES;
use crate::cold::Reader;
use crate::error::{Error, Result};
use crate::extent::{Extent, ExtentKind, Sectors};
use crate::index::Index;
use crate::lowers::{Lowers, check_depth};
use crate::map::SectorState;
use crate::registry::Registry;
use crate::seal::{self, SealReport};
use crate::upper::{FileState, MAX_UPPER_BYTES, Upper, is_upper_size, probe, remove_upper};
use crate::uuid::Uuid;

/// Most sealed layers of one stack, the limit of the format's upstream tools.
pub const MAX_LAYERS: usize = 255;

/// A device of `size` bytes made of layers.
#[derive(Debug)]
pub struct Stack {
    size: u64,
    /// As what it is known to its layers.
    reader: Reader,
    registry: Arc<Registry>,
    state: RwLock<Arc<State>>,
    /// One seal at a time.
    seal: Mutex<()>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub lowers: Arc<Lowers>,
    pub upper: Option<Arc<Upper>>,
}

impl Stack {
    /// Opens a stack that shares its layers with no other. See [`Stack::open_with`].
    pub fn open(lowers: &[PathBuf], upper: Option<&Path>, size: u64) -> Result<Stack> {
        Self::open_with(&Registry::new(), lowers, upper, size)
    }

    /// Opens `lowers`, bottom first, and `upper`, which is made if neither it nor anything else is there. No lowers and
    /// no upper is a device of zeros.
    ///
    /// Errors: those of [`Registry::open`] and [`Upper::open`]; `SizeMismatch` for a lower that is larger or an upper that
    /// is not `size` bytes; `Sealed` if `upper` is already a layer (then it belongs to the lowers); `TooManyLayers`;
    /// `BadSize`.
    pub fn open_with(registry: &Arc<Registry>, lowers: &[PathBuf], upper: Option<&Path>, size: u64) -> Result<Stack> {
        if !is_upper_size(size) {
            return Err(Error::BadSize {
                size,
                limit: MAX_UPPER_BYTES,
            });
        }
        let lowers = registry.lowers(lowers)?;
        for layer in lowers.layers() {
            check_size(layer.path(), layer.virtual_size(), size, layer.virtual_size() <= size)?;
        }
        let parent = lowers.layers().last().map_or(Uuid::NIL, |layer| layer.uuid());
        let upper = upper
            .map(|path| open_upper(path, size, parent))
            .transpose()?
            .map(Arc::new);
        let state = RwLock::new(Arc::new(State { lowers, upper }));
        Ok(Stack {
            size,
            reader: Reader::next(),
            registry: registry.clone(),
            state,
            seal: Mutex::new(()),
        })
    }

    /// Bytes of the device.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The sealed layers' paths as they were opened, bottom first.
    pub fn layers(&self) -> Vec<PathBuf> {
        self.current()
            .lowers
            .layers()
            .iter()
            .map(|layer| layer.path().to_owned())
            .collect()
    }

    /// The upper's path; none if the stack is read-only.
    pub fn upper_path(&self) -> Option<PathBuf> {
        self.current().upper.as_ref().map(|upper| upper.path().to_owned())
    }

    /// Fills `buf` from `offset` on.
    ///
    /// Errors: `Unaligned`, `OutOfRange`, `Io`, `Corrupt` (a mapped sector that its file does not have).
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let range = Sectors::new(offset, buf.len() as u64, self.size)?;
        let state = self.current();
        match &state.upper {
            Some(upper) => upper.read_over(buf, range, |part, start| state.lowers.read(self.reader, part, start)),
            None => state.lowers.read(self.reader, buf, range.start),
        }
    }

    /// Writes whole sectors; on return they survive the death of the process.
    ///
    /// Errors: `ReadOnly`, `Unaligned`, `OutOfRange`, `Io` (then each sector of the range is old or new).
    pub fn write_at(&self, buf: &[u8], offset: u64) -> Result<()> {
        self.change(|upper| upper.write_at(buf, offset))
    }

    /// Asks the disk to take what was written in the range since the last seal, and waits until it has. Only paces: makes
    /// nothing durable, tells no error. Caller: has a thread for it.
    pub fn write_back(&self, offset: u64, length: u64) {
        if let Some(upper) = &self.current().upper {
            upper.write_back(offset, length);
        }
    }

    /// Makes the range read zero and gives its disk space back. Errors: as `write_at`.
    pub fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.change(|upper| upper.discard(offset, length))
    }

    /// Seals the upper in place and puts a new one at `new_upper` on top, or none: then the stack becomes read-only.
    ///
    /// Atomic against concurrent reads and writes, and against a kill: the new upper is there before the old one is a
    /// layer. After an error the stack is as before and the new upper's files are gone.
    ///
    /// A kill in between may leave the new upper, unused, beside the unsealed old one: [`remove_upper`] it before the next
    /// try.
    ///
    /// Errors: `ReadOnly`, `TooManyLayers`, `Exists` for the new upper, `Io`.
    pub fn seal_upper(&self, new_upper: Option<&Path>) -> Result<(SealReport, Retired)> {
        let started = Instant::now();
        let _one = self.seal.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.current();
        let old = before.upper.as_ref().ok_or(Error::ReadOnly)?;
        check_depth(before.lowers.layers().len() + 1)?;
        let new = new_upper
            .map(|path| Upper::create(path, self.size, old.uuid()))
            .transpose()?
            .map(Arc::new);
        let sealed = seal::seal(old, |layer| {
            let layer = self.registry.keep(layer.clone());
            let lowers = self.registry.keep_lowers(Arc::new(before.lowers.extended(layer)?));
            let next = Arc::new(State {
                lowers,
                upper: new.clone(),
            });
            Ok(move || *self.state.write().unwrap_or_else(PoisonError::into_inner) = next)
        });
        match sealed {
            Ok((_, report)) => {
                let duration = started.elapsed();
                Ok((SealReport { duration, ..report }, Retired { _state: before }))
            }
            Err(error) => {
                // Its files are useless but harmless; the error to tell is the seal's.
                let _ = new.map(|upper| remove_upper(upper.path()));
                Err(error)
            }
        }
    }

    /// Whether the range surely reads zero, by index alone. False for a range outside of the device.
    pub fn is_zero(&self, offset: u64, length: u64) -> bool {
        let Ok(range) = Sectors::new(offset, length, self.size) else {
            return false;
        };
        let mut zero = true;
        self.current().for_each_part(range, |_, data| zero &= !data);
        zero
    }

    /// What the range consists of, by index alone, in order and without gaps; neighbours of one kind are one extent. Takes
    /// memory for each change of kind: ask by parts of the device where it may be fragmented.
    ///
    /// Errors: `Unaligned`, `OutOfRange`.
    pub fn extents(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        let range = Sectors::new(offset, length, self.size)?;
        let mut extents: Vec<Extent> = Vec::new();
        self.current().for_each_part(range, |part, data| {
            let kind = if data { ExtentKind::Data } else { ExtentKind::Zero };
            match extents.last_mut() {
                Some(last) if last.kind == kind => last.length += part.bytes(),
                _ => extents.push(Extent {
                    offset: part.start * SECTOR_BYTES,
                    length: part.bytes(),
                    kind,
                }),
            }
        });
        Ok(extents)
    }

    /// The merged index of the sealed layers, as it is now.
    pub fn lower_index(&self) -> Arc<Index> {
        self.current().lowers.shared_index()
    }

    pub(crate) fn reader(&self) -> Reader {
        self.reader
    }

    pub(crate) fn current(&self) -> Arc<State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Runs a change on the current upper, again on the next one if a seal came between.
    fn change(&self, change: impl Fn(&Upper) -> Result<()>) -> Result<()> {
        let mut state = self.current();
        loop {
            let outcome = change(state.upper.as_ref().ok_or(Error::ReadOnly)?);
            if !matches!(outcome, Err(Error::Sealed { .. })) {
                return outcome;
            }
            // A seal of this stack puts the next state in place before a waiting write can see that the upper is sealed.
            let next = self.current();
            if Arc::ptr_eq(&state, &next) {
                return outcome;
            }
            state = next;
        }
    }
}

/// What a seal leaves: the upper as it was, with its map, a file without a name. To drop it gives the map's space back,
/// which waits for the file system's journal. So not before the guest goes on.
#[derive(Debug)]
pub struct Retired {
    _state: Arc<State>,
}

impl State {
    /// Calls `visit(sectors, is data)` for the parts of the range, in order.
    fn for_each_part(&self, range: Sectors, mut visit: impl FnMut(Sectors, bool)) {
        let Some(upper) = &self.upper else {
            return self.lowers.for_each_part(range, visit);
        };
        let mut at = range.start;
        while at < range.end {
            let (state, end) = upper.map.run(at, range.end);
            let part = Sectors { start: at, end };
            match state {
                SectorState::Written => visit(part, true),
                SectorState::Trimmed => visit(part, false),
                SectorState::Below => self.lowers.for_each_part(part, &mut visit),
            }
            at = end;
        }
    }
}

fn open_upper(path: &Path, size: u64, parent: Uuid) -> Result<Upper> {
    let upper = match probe(path)? {
        FileState::Missing => Upper::create(path, size, parent)?,
        FileState::Upper | FileState::Sealed => Upper::open(path)?,
    };
    check_size(path, upper.size(), size, upper.size() == size)?;
    Ok(upper)
}

fn check_size(path: &Path, found: u64, stack: u64, fits: bool) -> Result<()> {
    match fits {
        true => Ok(()),
        false => Err(Error::SizeMismatch {
            path: path.to_owned(),
            found,
            stack,
        }),
    }
}
