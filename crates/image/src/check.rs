//! Checks the file system of a disk by e2fsck, on a copy that has no name.

use std::path::PathBuf;

use aenv_layers::Layer;

use crate::device::DeviceError;
use crate::dump::{DumpError, materialise, stacked};
use crate::programs::{ProgramError, check_file_system};

#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error(transparent)]
    Open(#[from] DumpError),
    #[error("cannot copy the disk")]
    Copy(#[from] DeviceError),
    #[error(transparent)]
    Program(#[from] ProgramError),
}

/// What e2fsck said of a clean file system. Errors: `Program` with `NotClean` for any other.
///
/// `size_bytes` none: as large as the top layer says.
pub fn check(layers: Vec<PathBuf>, size_bytes: Option<u64>, scratch: PathBuf) -> Result<String, CheckError> {
    let size_bytes = match (size_bytes, layers.last()) {
        (Some(size), _) => size,
        (None, Some(top)) => Layer::open(top).map_err(DumpError::Layers)?.virtual_size(),
        (None, None) => 0,
    };
    let mut device = stacked(&layers, size_bytes, &scratch)?;
    materialise(&mut device)?;
    Ok(check_file_system(device.scratch())?)
}
