//! The bytes of one export: a thin face over `aenv_layers::Stack` that names the export in errors.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_layers::{ReadPlan, Registry, Retired, SealReport, Stack};

use super::ExportError;
use crate::remote::Remote;

/// The layers that are open, and what gives the remote ones among them their bytes.
#[derive(Debug)]
pub struct Layers {
    pub registry: Arc<Registry>,
    pub remote: Arc<Remote>,
}

#[derive(Debug)]
pub struct Content {
    stack: Stack,
}

impl Content {
    /// Opens the layers, bottom first; a missing upper is created, an existing one reopened.
    pub fn open(layers: &Layers, lowers: &[String], upper: Option<&str>, size: u64) -> Result<Content, ExportError> {
        let paths: Vec<PathBuf> = lowers.iter().map(PathBuf::from).collect();
        let failed = |source| ExportError::Layers {
            what: upper.unwrap_or("a memory image").to_owned(),
            source,
        };
        let open = || Stack::open_with(&layers.registry, &paths, upper.map(Path::new), size);
        let stack = layers.remote.while_opening(&paths, open).map_err(failed)?;
        Ok(Content { stack })
    }

    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), aenv_layers::Error> {
        self.stack.read_at(buffer, offset)
    }

    /// See [`Stack::plan_read`].
    pub fn plan_read(&self, buffer: &mut [u8], offset: u64) -> Result<Option<ReadPlan>, aenv_layers::Error> {
        self.stack.plan_read(buffer, offset)
    }

    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<(), aenv_layers::Error> {
        self.stack.write_at(data, offset)
    }

    /// See [`Stack::write_back`].
    pub fn write_back(&self, range: Range<u64>) {
        self.stack.write_back(range.start, range.end - range.start);
    }

    pub fn discard(&self, offset: u64, length: u64) -> Result<(), aenv_layers::Error> {
        self.stack.discard(offset, length)
    }

    /// True when the index alone says that the range reads zero.
    pub fn is_zero(&self, offset: u64, length: u64) -> bool {
        self.stack.is_zero(offset, length)
    }

    /// The upper becomes a layer, atomically against reads and writes that run meanwhile.
    pub fn seal(&self, new_upper: Option<&str>) -> Result<(SealReport, Retired), aenv_layers::Error> {
        self.stack.seal_upper(new_upper.map(Path::new))
    }
}
