//! Why an operation on exports failed.

use std::io;
use std::path::PathBuf;

use crate::limits::{EXPORTS_MAX, LAYERS_MAX, NAME_BYTES_MAX, SIZE_BYTES_MAX};

#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("no export is named {0:?}")]
    NotFound(String),
    #[error("export {name:?} is there with another {field}")]
    Differs { name: String, field: &'static str },
    #[error(
        "a name has 1 to {NAME_BYTES_MAX} letters, digits, '.', '_' or '-' and starts with none of '.' and '-': {0:?}"
    )]
    BadName(String),
    #[error("path {0:?} is not absolute")]
    RelativePath(String),
    #[error("size {size_bytes} is not a multiple of {unit} bytes between that and {SIZE_BYTES_MAX}")]
    BadSize { size_bytes: u64, unit: u64 },
    #[error("{0} layers are over the limit of {LAYERS_MAX}")]
    TooManyLayers(usize),
    #[error("there are {EXPORTS_MAX} exports already")]
    TooManyExports,
    #[error("export {0:?} is being made by another request")]
    BeingMade(String),
    #[error("upper {upper} belongs to export {owner:?}")]
    UpperInUse { upper: String, owner: String },
    #[error("export {0:?} is not a disk")]
    NotADisk(String),
    #[error("export {0:?} has no upper to seal")]
    NothingToSeal(String),
    #[error("export {0:?} is abandoned")]
    Abandoned(String),
    #[error("layers of {what}")]
    Layers {
        what: String,
        #[source]
        source: aenv_layers::Error,
    },
    #[error("cannot write the record of export {name:?}")]
    Record {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot read the state in {}", path.display())]
    State {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl ExportError {
    /// What a guest's request gets: the system's own code where there is one, so that a full disk reads as such.
    pub fn errno(&self) -> i32 {
        match self {
            ExportError::Layers { source, .. } => layers_errno(source),
            _ => libc::EIO,
        }
    }
}

pub fn layers_errno(error: &aenv_layers::Error) -> i32 {
    use aenv_layers::Error;
    match error {
        Error::Io { source, .. } => match source.raw_os_error() {
            Some(code @ (libc::ENOSPC | libc::EDQUOT)) => code,
            _ => libc::EIO,
        },
        Error::ReadOnly | Error::Sealed { .. } => libc::EROFS,
        Error::Unaligned { .. } | Error::OutOfRange { .. } => libc::EINVAL,
        _ => libc::EIO,
    }
}
