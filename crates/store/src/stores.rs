//! The stores of the configuration file, and the small runtime that all requests to them run on.

use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::{Builder, Handle, Runtime};

use crate::bucket::Bucket;
use crate::cipher::Cipher;
use crate::config::{Config, RegistryConfig, StoreConfig};
use crate::error::{Failure, Place, StoreError};
use crate::http::Http;
use crate::object::RangedObject;
use crate::ranged::{Ranged, RangedFile};
use crate::registry::RangedBlob;
use crate::source::Source;

/// Threads that drive all connections; they wait far more than they work.
const RUNTIME_THREADS: usize = 2;
/// Threads for name look-ups, which block.
const LOOKUP_THREADS_MAX: usize = 8;

/// Access to everything that the configuration file names. Cheap to clone; the file is read again when it has changed.
#[derive(Debug, Clone)]
pub struct Stores(Arc<Shared>);

/// What the blobs of one [`Stores`] share.
#[derive(Debug)]
pub(crate) struct Shared {
    path: PathBuf,
    runtime: Option<Runtime>,
    current: Mutex<Current>,
}

#[derive(Debug)]
struct Current {
    stamp: Stamp,
    config: Config,
    /// Made at the first use: reading the system's certificates takes longer than anything else here.
    http: Option<Http>,
    buckets: HashMap<String, Bucket>,
}

/// By which a replaced file is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    length: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Stamp {
        Stamp {
            inode: metadata.ino(),
            length: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl Stores {
    /// Reads the configuration file. Errors: kind `Invalid`, naming the file.
    pub fn open(path: &Path) -> Result<Stores, StoreError> {
        let stamp = std::fs::metadata(path).map(|metadata| Stamp::of(&metadata));
        let stamp = stamp.map_err(|e| config_error(path, e.to_string()))?;
        let config = Config::read(path).map_err(|what| config_error(path, what))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(RUNTIME_THREADS)
            .max_blocking_threads(LOOKUP_THREADS_MAX)
            .thread_name("aenv-store")
            .enable_all()
            .build();
        let runtime = runtime.map_err(|e| config_error(path, e.to_string()))?;
        let current = Current {
            stamp,
            config,
            http: None,
            buckets: HashMap::new(),
        };
        Ok(Stores(Arc::new(Shared {
            path: path.to_owned(),
            runtime: Some(runtime),
            current: Mutex::new(current),
        })))
    }

    /// Read access to a blob. Nothing is asked of the store yet.
    ///
    /// Errors: kind `Invalid` for a store that is not configured. A registry that is not configured is reached by https
    /// without a name.
    pub fn ranged(&self, source: &Source) -> Result<Arc<dyn Ranged>, StoreError> {
        let shared = || self.0.clone();
        Ok(match source {
            Source::Object { store, key } => {
                self.0.bucket(store)?.path(key)?;
                Arc::new(RangedObject::new(shared(), store, key))
            }
            Source::Registry {
                registry,
                repository,
                digest,
            } => Arc::new(RangedBlob::new(shared(), registry, repository, *digest)),
            Source::File { path } => Arc::new(RangedFile::new(path)),
        })
    }

    /// A store to write to. Errors: kind `Invalid` for one that is not configured.
    pub fn bucket(&self, name: &str) -> Result<Bucket, StoreError> {
        self.0.bucket(name)
    }

    /// The key of encryption at rest; none if it is off.
    pub fn cipher(&self) -> Option<Cipher> {
        // What was read is checked, so there is no fault to lose here.
        self.0.current().config.cipher().ok().flatten()
    }
}

impl Shared {
    pub fn runtime(&self) -> &Handle {
        // Taken only by `drop`.
        self.runtime
            .as_ref()
            .expect("the runtime lives as long as its owner")
            .handle()
    }

    /// The configuration as the file has it now. A changed file that cannot be used leaves what was there: a running
    /// guest's disk must not fail because somebody is editing.
    fn current(&self) -> MutexGuard<'_, Current> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = std::fs::metadata(&self.path).map(|metadata| Stamp::of(&metadata));
        let Ok(stamp) = stamp else {
            return current;
        };
        if stamp != current.stamp {
            current.stamp = stamp;
            match Config::read(&self.path) {
                Ok(config) => {
                    current.buckets.clear();
                    current.config = config;
                }
                Err(what) => {
                    // Not `eprintln!`, which ends the process when the log's disk is full.
                    let line = format!("{}: {what}; the stores stay as they were\n", self.path.display());
                    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
                }
            }
        }
        current
    }

    pub fn bucket(&self, name: &str) -> Result<Bucket, StoreError> {
        let mut current = self.current();
        if let Some(bucket) = current.buckets.get(name) {
            return Ok(bucket.clone());
        }
        let Some(StoreConfig::S3(config)) = current.config.stores.get(name).cloned() else {
            let place = Place {
                store: name.to_owned(),
                key: self.path.display().to_string(),
                range: None,
            };
            return Err(StoreError::new(place, Failure::UnknownStore));
        };
        let http = self.client(&mut current)?;
        let bucket = Bucket::new(name, &config, http, self.runtime().clone())?;
        current.buckets.insert(name.to_owned(), bucket.clone());
        Ok(bucket)
    }

    pub fn registry(&self, name: &str) -> RegistryConfig {
        let configured = self.current().config.registries.get(name).cloned();
        configured.unwrap_or_else(|| RegistryConfig {
            // The one registry whose name is not its host.
            url: format!(
                "https://{}",
                if name == "docker.io" {
                    "registry-1.docker.io"
                } else {
                    name
                }
            ),
            username: None,
            password: None,
        })
    }

    pub fn http(&self) -> Result<Http, StoreError> {
        self.client(&mut self.current())
    }

    fn client(&self, current: &mut Current) -> Result<Http, StoreError> {
        if let Some(http) = &current.http {
            return Ok(http.clone());
        }
        // Inside of the runtime: the pool's timer belongs to it.
        let _inside = self.runtime().enter();
        let what = |e: std::io::Error| config_error(&self.path, format!("no root certificates: {e}"));
        let http = Http::new().map_err(what)?;
        current.http = Some(http.clone());
        Ok(http)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The last owner may be on a thread that must not wait.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn config_error(path: &Path, what: String) -> StoreError {
    let place = Place {
        store: "stores".into(),
        key: path.display().to_string(),
        range: None,
    };
    StoreError::new(place, Failure::Config { what })
}
