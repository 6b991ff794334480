//! Why a capture failed.

use std::io;

use crate::export::ExportError;
use crate::limits::CAPTURES_MAX;

#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    #[error("no capture is named {0:?}")]
    NotFound(String),
    #[error("a capture is named {0:?} already")]
    Exists(String),
    #[error("{0} is there already")]
    LayerExists(String),
    #[error("capture {0:?} is being started, finished or cancelled by another request")]
    Busy(String),
    #[error("there are {CAPTURES_MAX} captures already")]
    TooMany,
    #[error("{asked} dirty bytes do not fit the capture buffer: {used} of {limit} bytes are in use")]
    BufferFull { asked: u64, used: u64, limit: u64 },
    #[error("address {address:#x} or length {length_bytes} is not a multiple of 4096 or does not fit the image")]
    BadRange { address: u64, length_bytes: u64 },
    #[error("{parent:?} is not a memory image")]
    NotAnImage { parent: String },
    #[error("process {pid} does not map image {parent:?} privately at {address:#x} over the whole length")]
    NotMapped { pid: u32, parent: String, address: u64 },
    #[error("process {pid} is gone")]
    Gone { pid: u32 },
    #[error("{step} of process {pid} failed")]
    Process {
        pid: u32,
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("process {pid} lost the page at {address:#x} while it was read")]
    PageLost { pid: u32, address: u64 },
    #[error("capture {0:?} was cancelled")]
    Cancelled(String),
    #[error("cannot write layer {layer}")]
    Layer {
        layer: String,
        #[source]
        source: aenv_layers::Error,
    },
    #[error("cannot make layer {layer} durable")]
    Durable {
        layer: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot read the parent image")]
    Parent {
        #[source]
        source: aenv_layers::Error,
    },
    #[error("cannot get {bytes} bytes of memory for dirty pages")]
    Memory {
        bytes: usize,
        #[source]
        source: io::Error,
    },
    #[error("cannot record the capture")]
    Record {
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Export(#[from] ExportError),
}
