//! Errors of operations as the protocol says them: the one place where a kind is chosen.

use std::error::Error;
use std::io;

use aenv_cache::CacheError;
use aenv_store::{CipherError, DescriptorError, StoreError, StoreErrorKind};
use aenv_wire::block::ErrorKind;

use crate::capture::CaptureError;
use crate::export::ExportError;
use crate::remote::RemoteError;

/// What a client is told.
#[derive(Debug)]
pub struct Refusal {
    pub kind: ErrorKind,
    pub message: String,
}

impl Refusal {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Refusal {
        Refusal {
            kind,
            message: message.into(),
        }
    }

    pub fn io(what: &str, error: &io::Error) -> Refusal {
        Refusal {
            kind: io_kind(error),
            message: format!("{what}: {error}"),
        }
    }
}

/// An error with all its causes, in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

impl From<ExportError> for Refusal {
    fn from(error: ExportError) -> Refusal {
        Refusal {
            kind: export_kind(&error),
            message: chain(&error),
        }
    }
}

impl From<aenv_layers::Error> for Refusal {
    fn from(error: aenv_layers::Error) -> Refusal {
        Refusal {
            kind: layers_kind(&error),
            message: chain(&error),
        }
    }
}

impl From<CaptureError> for Refusal {
    fn from(error: CaptureError) -> Refusal {
        let kind = match &error {
            CaptureError::NotFound(_) | CaptureError::Gone { .. } => ErrorKind::NotFound,
            CaptureError::Exists(_) | CaptureError::LayerExists(_) => ErrorKind::Exists,
            CaptureError::Busy(_) | CaptureError::TooMany | CaptureError::BufferFull { .. } => ErrorKind::Busy,
            CaptureError::BadRange { .. } | CaptureError::NotAnImage { .. } | CaptureError::NotMapped { .. } => {
                ErrorKind::Invalid
            }
            CaptureError::Cancelled(_) => ErrorKind::Canceled,
            CaptureError::Process { source, .. } | CaptureError::Durable { source, .. } => io_kind(source),
            CaptureError::Record { source } => io_kind(source),
            CaptureError::PageLost { .. } | CaptureError::Memory { .. } => ErrorKind::Io,
            CaptureError::Layer { source, .. } | CaptureError::Parent { source } => layers_kind(source),
            CaptureError::Export(error) => export_kind(error),
        };
        Refusal {
            kind,
            message: chain(&error),
        }
    }
}

fn export_kind(error: &ExportError) -> ErrorKind {
    match error {
        ExportError::NotFound(_) => ErrorKind::NotFound,
        ExportError::Differs { .. } => ErrorKind::Exists,
        ExportError::TooManyExports | ExportError::BeingMade(_) => ErrorKind::Busy,
        ExportError::Layers { source, .. } => layers_kind(source),
        ExportError::Record { source, .. } | ExportError::State { source, .. } => io_kind(source),
        _ => ErrorKind::Invalid,
    }
}

impl From<RemoteError> for Refusal {
    fn from(error: RemoteError) -> Refusal {
        Refusal {
            kind: remote_kind(&error),
            message: chain(&error),
        }
    }
}

fn remote_kind(error: &RemoteError) -> ErrorKind {
    match error {
        RemoteError::NotConfigured => ErrorKind::Unsupported,
        RemoteError::Descriptor(DescriptorError::Read { source, .. }) => io_kind(source),
        RemoteError::Descriptor(_) => ErrorKind::Invalid,
        RemoteError::Store(error) => store_kind(error),
        RemoteError::Cache(error) => cache_kind(error),
        RemoteError::List(error) => origin_kind(error),
        RemoteError::OtherList | RemoteError::BadList(_) | RemoteError::ListOfAnother { .. } => ErrorKind::Corrupt,
        RemoteError::NoKey => ErrorKind::Invalid,
    }
}

fn cache_kind(error: &CacheError) -> ErrorKind {
    match error {
        CacheError::InUse(_) => ErrorKind::Busy,
        CacheError::File { source, .. } => io_kind(source),
        CacheError::BadSpec(_) | CacheError::Differs { .. } => ErrorKind::Invalid,
        CacheError::WrongBytes { .. } => ErrorKind::Corrupt,
        CacheError::Refused { source, .. } => origin_kind(source),
        CacheError::Cancelled { .. } => ErrorKind::Canceled,
        CacheError::TimedOut { .. } | CacheError::WaitedForOthers { .. } => ErrorKind::Io,
    }
}

/// What is not in the store is not found; anything else about a store is an I/O error to a client.
fn origin_kind(error: &aenv_cache::OriginError) -> ErrorKind {
    error.source.downcast_ref().map_or(ErrorKind::Io, store_kind)
}

fn store_kind(error: &StoreError) -> ErrorKind {
    match error.kind() {
        StoreErrorKind::NotFound => ErrorKind::NotFound,
        StoreErrorKind::Transient | StoreErrorKind::Denied | StoreErrorKind::Invalid => ErrorKind::Io,
    }
}

/// What an opener or a blob of ours put into an error of the layers; none if it is somebody else's.
fn kind_behind(error: &aenv_layers::Error) -> Option<ErrorKind> {
    let aenv_layers::Error::Remote { source, .. } = error else {
        return None;
    };
    let remote = source.downcast_ref().map(remote_kind);
    let cache = || source.downcast_ref().map(cache_kind);
    let cipher = || source.is::<CipherError>().then_some(ErrorKind::Corrupt);
    remote.or_else(cache).or_else(cipher)
}

fn layers_kind(error: &aenv_layers::Error) -> ErrorKind {
    if let Some(kind) = kind_behind(error) {
        return kind;
    }
    match error.kind() {
        aenv_layers::ErrorKind::NotFound => ErrorKind::NotFound,
        aenv_layers::ErrorKind::Exists => ErrorKind::Exists,
        aenv_layers::ErrorKind::Invalid => ErrorKind::Invalid,
        aenv_layers::ErrorKind::NoSpace => ErrorKind::NoSpace,
        aenv_layers::ErrorKind::Io => ErrorKind::Io,
        aenv_layers::ErrorKind::Corrupt => ErrorKind::Corrupt,
    }
}

fn io_kind(error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::NotFound => ErrorKind::NotFound,
        io::ErrorKind::AlreadyExists => ErrorKind::Exists,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
        io::ErrorKind::Unsupported => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_no_space_at_every_depth_and_the_causes_are_told() {
        let full = || io::Error::from_raw_os_error(libc::ENOSPC);
        let source = aenv_layers::Error::Io {
            path: "/l".into(),
            step: "write data",
            source: full(),
        };
        let refusal = Refusal::from(CaptureError::Layer {
            layer: "/l".to_owned(),
            source,
        });
        assert_eq!(refusal.kind, ErrorKind::NoSpace);
        assert!(refusal.message.contains("No space left"), "{}", refusal.message);
        assert_eq!(
            Refusal::from(CaptureError::Record { source: full() }).kind,
            ErrorKind::NoSpace
        );
        let record = ExportError::Record {
            name: "m".to_owned(),
            source: full(),
        };
        assert_eq!(Refusal::from(record).kind, ErrorKind::NoSpace);
    }
}
