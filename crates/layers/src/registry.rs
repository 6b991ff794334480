//! Shares open layers between stacks: fifty stacks over one base hold one descriptor and one index of it.
//!
//! A layer is known by device and inode number, not by name. The registry keeps no layer alive; a number cannot be used
//! again while a layer is open, so a living entry is never the wrong file.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::blob::{FileBlob, FileIdentity, Opener};
use crate::envelope;
use crate::error::Result;
use crate::layer::Layer;
use crate::lowers::Lowers;
use crate::parallel;

/// Entries of dead layers are dropped when a table has grown to twice what lived at the last look, and to this at least.
const SWEEP_MIN_ENTRIES: usize = 64;

/// Layers of one stack that are opened at the same time. Each costs a few round trips if it is remote, so this is what
/// divides the time to open a deep stack; more would only crowd the store.
const PARALLEL_OPENS_MAX: usize = 32;

/// Open layers and merged indexes, by file identity.
#[derive(Debug, Default)]
pub struct Registry {
    /// None: paths are local files.
    opener: Option<Arc<dyn Opener>>,
    layers: Mutex<Table<FileIdentity, Layer>>,
    lowers: Mutex<Table<Vec<FileIdentity>, Lowers>>,
}

/// A layer that is open already, or a file to be looked into.
enum Candidate<'a> {
    Open(Arc<Layer>),
    File(&'a Path, File, Metadata),
}

impl Candidate<'_> {
    /// Whether opening it may wait for others: its file is no layer, so it only names one. What is local is opened faster
    /// than a thread is made.
    fn is_distant(&self) -> bool {
        match self {
            Candidate::Open(_) => false,
            Candidate::File(_, file, _) => !envelope::is_local(file),
        }
    }
}

impl Registry {
    /// A registry of local files.
    pub fn new() -> Arc<Registry> {
        Arc::default()
    }

    /// A registry whose paths are given meaning by `opener`. A layer is still known by the file at its path.
    pub fn with_opener(opener: Arc<dyn Opener>) -> Arc<Registry> {
        Arc::new(Registry {
            opener: Some(opener),
            ..Registry::default()
        })
    }

    /// The layer at `path`, opened and checked only if no stack has it open. Errors: as [`Layer::open`], those of the
    /// opener.
    pub fn open(&self, path: &Path) -> Result<Arc<Layer>> {
        self.load(self.candidate(path)?)
    }

    fn candidate<'a>(&self, path: &'a Path) -> Result<Candidate<'a>> {
        let (file, metadata) = Layer::open_file(path)?;
        Ok(match locked(&self.layers).get(&FileIdentity::of(&metadata)) {
            Some(layer) => Candidate::Open(layer),
            None => Candidate::File(path, file, metadata),
        })
    }

    fn load(&self, candidate: Candidate) -> Result<Arc<Layer>> {
        let (path, file, metadata) = match candidate {
            Candidate::Open(layer) => return Ok(layer),
            Candidate::File(path, file, metadata) => (path, file, metadata),
        };
        let layer = match &self.opener {
            Some(opener) => Layer::open_anchored(path, opener.open(path)?, file, &metadata)?,
            None => Layer::open_blob(path, Arc::new(FileBlob::of(path, file, &metadata)))?,
        };
        // Not under the lock: a large index takes milliseconds. Two that race both read it, and one is kept.
        Ok(self.keep(Arc::new(layer)))
    }

    /// Makes a layer known that was opened elsewhere; returns the one to use.
    pub(crate) fn keep(&self, layer: Arc<Layer>) -> Arc<Layer> {
        locked(&self.layers).insert(layer.identity(), layer)
    }

    /// The layers, bottom first, with their merged index, shared with every stack over the same ones.
    pub(crate) fn lowers(&self, paths: &[PathBuf]) -> Result<Arc<Lowers>> {
        crate::lowers::check_depth(paths.len())?;
        let candidates = paths.iter().map(|path| self.candidate(path));
        let candidates = candidates.collect::<Result<Vec<_>>>()?;
        let distant = match self.opener {
            Some(_) => candidates.iter().filter(|candidate| candidate.is_distant()).count(),
            None => 0,
        };
        let layers = parallel::map(candidates, distant.min(PARALLEL_OPENS_MAX), |candidate| {
            self.load(candidate)
        });
        let layers = layers.into_iter().collect::<Result<Vec<_>>>()?;
        let key = identities(&layers);
        if let Some(lowers) = locked(&self.lowers).get(&key) {
            return Ok(lowers);
        }
        Ok(locked(&self.lowers).insert(key, Arc::new(Lowers::new(layers)?)))
    }

    /// Makes a merged index known that a seal has extended.
    pub(crate) fn keep_lowers(&self, lowers: Arc<Lowers>) -> Arc<Lowers> {
        locked(&self.lowers).insert(identities(lowers.layers()), lowers)
    }
}

fn identities(layers: &[Arc<Layer>]) -> Vec<FileIdentity> {
    layers.iter().map(|layer| layer.identity()).collect()
}

/// A poisoned table is still a table: every change of it is one call of the map.
fn locked<T>(table: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Table<K, V> {
    entries: HashMap<K, Weak<V>>,
    sweep_at: usize,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Table {
            entries: HashMap::new(),
            sweep_at: SWEEP_MIN_ENTRIES,
        }
    }
}

impl<K: Eq + Hash, V> Table<K, V> {
    fn get(&self, key: &K) -> Option<Arc<V>> {
        self.entries.get(key)?.upgrade()
    }

    /// Keeps what is there if it lives, else `value`.
    fn insert(&mut self, key: K, value: Arc<V>) -> Arc<V> {
        if let Some(living) = self.get(&key) {
            return living;
        }
        if self.entries.len() >= self.sweep_at {
            self.entries.retain(|_, entry| entry.strong_count() > 0);
            self.sweep_at = (self.entries.len() * 2).max(SWEEP_MIN_ENTRIES);
        }
        self.entries.insert(key, Arc::downgrade(&value));
        value
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_first_living_value_of_a_key_is_kept() {
        let mut table = Table::default();
        let first = table.insert(1, Arc::new("first"));
        let second = table.insert(1, Arc::new("second"));
        assert!(Arc::ptr_eq(&first, &second));
        drop((first, second));
        assert_eq!(*table.insert(1, Arc::new("third")), "third");
    }

    #[test]
    fn dead_entries_do_not_pile_up() {
        let mut table = Table::default();
        let living: Vec<_> = (0..10).map(|key| table.insert(key, Arc::new(key))).collect();
        for key in 10..10_000 {
            table.insert(key, Arc::new(key));
        }
        assert!(table.entries.len() <= SWEEP_MIN_ENTRIES, "{}", table.entries.len());
        assert!(living.iter().all(|value| table.get(value).is_some()));
    }
}
