//! The table of exports: by inode for requests, by name for operations.
//!
//! Order of one change: check, open the content, write the record, put it into the table, answer. A crash in between
//! leaves at most a record or an empty upper that repeating the request finds again.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use aenv_cache::{Patience, with_patience};
use aenv_wire::block::{ExportDisk, ExportInfo, ExportKind, ExportMemory};

use super::record::{Record, Records};
use super::{Content, Export, ExportError, Layers};
use crate::limits::{
    EXPORTS_MAX, LAYERS_MAX, NAME_BYTES_MAX, OPERATION_OUTAGE, PAGE_BYTES, SECTOR_BYTES, SIZE_BYTES_MAX,
};
use crate::remote::{BlobOpener, Remote};
use crate::write_back::WriteBack;

#[derive(Debug)]
pub struct Exports {
    pub layers: Layers,
    pub write_back: WriteBack,
    pub(super) records: Records,
    tables: RwLock<Tables>,
    making: Mutex<Making>,
}

/// What is locked while exports come and go: for a moment at a time, never while layers are opened.
#[derive(Debug, Default)]
struct Making {
    /// Numbers to hand out. None are reserved at start: a full disk must not keep blockd from serving what there is.
    inodes: std::ops::Range<u64>,
    /// Exports whose layers are being opened: name and upper.
    opening: Vec<(String, Option<String>)>,
}

#[derive(Debug, Default)]
struct Tables {
    by_inode: HashMap<u64, Arc<Export>>,
    by_name: HashMap<String, Arc<Export>>,
}

impl Exports {
    /// Reads what the blockd before left. Nothing is opened yet, but a seal that it did not finish is.
    pub fn load(state_dir: &Path, remote: Arc<Remote>) -> Result<Exports, ExportError> {
        let failed = |source| ExportError::State {
            path: state_dir.to_owned(),
            source,
        };
        let records = Records::open(state_dir).map_err(failed)?;
        let mut tables = Tables::default();
        for record in records.load().map_err(failed)? {
            tables.insert(Arc::new(Export::new(record, None)));
        }
        let layers = Layers {
            registry: aenv_layers::Registry::with_opener(Arc::new(BlobOpener(remote.clone()))),
            remote,
        };
        let exports = Exports {
            layers,
            write_back: WriteBack::default(),
            records,
            tables: RwLock::new(tables),
            making: Mutex::default(),
        };
        for export in exports.all() {
            if let Err(error) = exports.repair_seal(&export) {
                say!(
                    "aenv-blockd: seal of export {} is still undone: {}",
                    export.name,
                    crate::control::chain(&error)
                );
            }
        }
        Ok(exports)
    }

    pub fn by_inode(&self, inode: u64) -> Option<Arc<Export>> {
        self.tables().by_inode.get(&inode).cloned()
    }

    pub fn by_name(&self, name: &str) -> Result<Arc<Export>, ExportError> {
        self.tables()
            .by_name
            .get(name)
            .cloned()
            .ok_or_else(|| ExportError::NotFound(name.to_owned()))
    }

    /// All exports, in the order of their inodes.
    pub fn all(&self) -> Vec<Arc<Export>> {
        let mut all: Vec<_> = self.tables().by_inode.values().cloned().collect();
        all.sort_unstable_by_key(|export| export.inode);
        all
    }

    pub fn count(&self) -> usize {
        self.tables().by_inode.len()
    }

    pub fn list(&self) -> Vec<ExportInfo> {
        self.all().iter().map(|export| export.info()).collect()
    }

    pub fn export_memory(&self, asked: ExportMemory) -> Result<Arc<Export>, ExportError> {
        check_size(asked.size_bytes, PAGE_BYTES)?;
        self.export(record_of(
            ExportKind::Memory,
            asked.name,
            asked.size_bytes,
            asked.layers,
            None,
        ))
    }

    pub fn export_disk(&self, asked: ExportDisk) -> Result<Arc<Export>, ExportError> {
        check_size(asked.size_bytes, SECTOR_BYTES)?;
        self.export(record_of(
            ExportKind::Disk,
            asked.name,
            asked.size_bytes,
            asked.layers,
            Some(asked.upper),
        ))
    }

    /// Takes the export out of service for good. The caller answers what still waits.
    pub fn unexport(&self, name: &str) -> Result<(Arc<Export>, Vec<u64>), ExportError> {
        let _making = self.making();
        let export = self.by_name(name)?;
        let record = export.record_to_change()?;
        let failed = |source| ExportError::Record {
            name: name.to_owned(),
            source,
        };
        self.records.remove(name).map_err(failed)?;
        export.removed.store(true, Ordering::Relaxed);
        drop(record);
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        tables.by_inode.remove(&export.inode);
        tables.by_name.remove(name);
        drop(tables);
        let waiting = export.flight.abandon();
        export.cancel.cancel();
        Ok((export, waiting))
    }

    /// Refuses everything from now on. The caller answers what waits, then has it recorded.
    pub fn abandon(&self, name: &str) -> Result<(Arc<Export>, Vec<u64>), ExportError> {
        let export = self.by_name(name)?;
        let waiting = export.flight.abandon();
        export.cancel.cancel();
        Ok((export, waiting))
    }

    /// Makes `abandon` hold for the next blockd too. Apart from it, since a seal may hold the record for long and the
    /// death of a VMM must not wait for that.
    pub fn record_abandoned(&self, export: &Export) -> Result<(), ExportError> {
        let mut record = export.record_to_change()?;
        record.abandoned = true;
        self.write_record(&record)
    }

    pub(super) fn write_record(&self, record: &Record) -> Result<(), ExportError> {
        self.records.write(record).map_err(|source| ExportError::Record {
            name: record.name.clone(),
            source,
        })
    }

    fn export(&self, mut record: Record) -> Result<Arc<Export>, ExportError> {
        check(&record)?;
        {
            let mut making = self.making();
            if let Ok(there) = self.by_name(&record.name) {
                return same(&there.snapshot(), &record).map(|()| there);
            }
            self.check_admitted(&record, &making)?;
            record.inode = self.next_inode(&mut making, &record.name)?;
            making.opening.push((record.name.clone(), record.upper.clone()));
        }
        let name = record.name.clone();
        let open = || Content::open(&self.layers, &record.layers, record.upper.as_deref(), record.size_bytes);
        let opened = with_patience(Patience::lasting(OPERATION_OUTAGE, None), open);
        let mut making = self.making();
        making.opening.retain(|(opening, _)| *opening != name);
        let content = opened?;
        self.write_record(&record)?;
        let export = Arc::new(Export::new(record, Some(Arc::new(content))));
        self.tables
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(export.clone());
        Ok(export)
    }

    fn check_admitted(&self, record: &Record, making: &Making) -> Result<(), ExportError> {
        if self.count() + making.opening.len() >= EXPORTS_MAX {
            return Err(ExportError::TooManyExports);
        }
        if making.opening.iter().any(|(name, _)| *name == record.name) {
            return Err(ExportError::BeingMade(record.name.clone()));
        }
        match record.upper.as_deref() {
            Some(upper) => self.check_upper_is_free(upper, &record.name, making),
            None => Ok(()),
        }
    }

    /// Two exports that write one file would destroy it.
    fn check_upper_is_free(&self, upper: &str, asker: &str, making: &Making) -> Result<(), ExportError> {
        let exported = self
            .all()
            .into_iter()
            .map(|other| (other.name.clone(), other.snapshot().upper));
        let opening = making.opening.iter().cloned();
        match exported
            .chain(opening)
            .find(|(name, other)| name != asker && other.as_deref() == Some(upper))
        {
            Some((owner, _)) => Err(ExportError::UpperInUse {
                upper: upper.to_owned(),
                owner,
            }),
            None => Ok(()),
        }
    }

    /// Whether a seal may make this file the upper of `asker`.
    pub(super) fn check_new_upper(&self, upper: &str, asker: &str) -> Result<(), ExportError> {
        check_path(upper)?;
        self.check_upper_is_free(upper, asker, &self.making())
    }

    fn next_inode(&self, making: &mut Making, name: &str) -> Result<u64, ExportError> {
        if making.inodes.is_empty() {
            let failed = |source| ExportError::Record {
                name: name.to_owned(),
                source,
            };
            making.inodes = self.records.reserve_inodes().map_err(failed)?;
        }
        let inode = making.inodes.start;
        making.inodes.start += 1;
        Ok(inode)
    }

    fn making(&self) -> MutexGuard<'_, Making> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tables(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    fn insert(&mut self, export: Arc<Export>) {
        self.by_name.insert(export.name.clone(), export.clone());
        self.by_inode.insert(export.inode, export);
    }
}

fn record_of(kind: ExportKind, name: String, size_bytes: u64, layers: Vec<String>, upper: Option<String>) -> Record {
    Record {
        name,
        kind,
        inode: 0,
        size_bytes,
        layers,
        upper,
        abandoned: false,
        sealing: None,
        last_seal: None,
    }
}

fn check(record: &Record) -> Result<(), ExportError> {
    check_name(&record.name)?;
    if record.layers.len() > LAYERS_MAX {
        return Err(ExportError::TooManyLayers(record.layers.len()));
    }
    record
        .layers
        .iter()
        .chain(&record.upper)
        .try_for_each(|path| check_path(path))
}

/// A name is a file name on the mount and in the state folder.
pub fn check_name(name: &str) -> Result<(), ExportError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let starts_well = name.bytes().next().is_some_and(|byte| byte != b'.' && byte != b'-');
    if name.len() <= NAME_BYTES_MAX && starts_well && name.bytes().all(allowed) {
        return Ok(());
    }
    Err(ExportError::BadName(name.to_owned()))
}

/// blockd's working folder means nothing to its clients.
pub fn check_path(path: &str) -> Result<(), ExportError> {
    if Path::new(path).is_absolute() {
        Ok(())
    } else {
        Err(ExportError::RelativePath(path.to_owned()))
    }
}

fn check_size(size_bytes: u64, unit: u64) -> Result<(), ExportError> {
    if size_bytes == 0 || size_bytes > SIZE_BYTES_MAX || !size_bytes.is_multiple_of(unit) {
        return Err(ExportError::BadSize { size_bytes, unit });
    }
    Ok(())
}

fn same(there: &Record, asked: &Record) -> Result<(), ExportError> {
    let differs = |field| {
        Err(ExportError::Differs {
            name: asked.name.clone(),
            field,
        })
    };
    match () {
        () if there.kind != asked.kind => differs("kind"),
        () if there.size_bytes != asked.size_bytes => differs("size"),
        () if there.layers != asked.layers => differs("list of layers"),
        () if there.upper != asked.upper => differs("upper"),
        () if there.abandoned => Err(ExportError::Abandoned(asked.name.clone())),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_folder() {
        for bad in [
            "",
            ".",
            "..",
            "a/b",
            ".hidden",
            "-x",
            "a b",
            "ä",
            &"x".repeat(NAME_BYTES_MAX + 1),
        ] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        for good in ["m1", "sbx-12.mem_0", &"x".repeat(NAME_BYTES_MAX)] {
            assert!(check_name(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn sizes_are_whole_units_within_the_limit() {
        assert!(check_size(0, 512).is_err());
        assert!(check_size(513, 512).is_err());
        assert!(check_size(512, PAGE_BYTES).is_err());
        assert!(check_size(SIZE_BYTES_MAX + PAGE_BYTES, PAGE_BYTES).is_err());
        assert!(check_size(SIZE_BYTES_MAX, PAGE_BYTES).is_ok());
    }
}
