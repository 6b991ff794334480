//! Requests. One variant per operation; the field names are the protocol.

use serde::{Deserialize, Serialize};

/// One request: `{"id":N,"op":"name",...fields}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Request {
    pub id: u64,
    #[serde(flatten)]
    pub operation: Operation,
}

/// What blockd can be asked. Paths are absolute; sizes, offsets and lengths are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Operation {
    Hello,
    ExportMemory(ExportMemory),
    ExportDisk(ExportDisk),
    Unexport(Name),
    Abandon(Name),
    Exports,
    SealDisk(SealDisk),
    Sync(Sync),
    CaptureStart(CaptureStart),
    CaptureFinish(Job),
    CaptureCancel(Job),
    Merge(Merge),
    ImportRaw(ImportRaw),
    Digest(Digest),
    Compact(Compact),
    TraceStart(TraceStart),
    TraceFinish(TraceFinish),
    Prefetch(Prefetch),
    Fill(Fill),
    /// The node's cache of remote blobs.
    Cache,
    CacheEvict(CacheEvict),
    Stats,
    /// Orderly end of blockd and its keeper: both mounts are gone afterwards.
    Shutdown,
}

/// A read-only file on the memory mount: the layers, bottom first; none at all reads zero.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportMemory {
    pub name: String,
    pub size_bytes: u64,
    pub layers: Vec<String>,
}

/// A writable file on the disk mount: the layers, bottom first, under one upper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportDisk {
    pub name: String,
    pub size_bytes: u64,
    pub layers: Vec<String>,
    pub upper: String,
}

/// Names an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    pub name: String,
}

/// The upper becomes a layer; `new_upper` goes on top, or nothing does and the export is read-only from then on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealDisk {
    pub name: String,
    pub new_upper: Option<String>,
}

/// Files that must survive a power loss, each with its directory entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sync {
    pub paths: Vec<String>,
}

/// Where the dirty pages wait between `capture_start` and `capture_finish`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    /// In blockd's memory: the VMM may go on after the answer.
    Buffer,
    /// In the process itself: it must stay stopped until the capture is finished or cancelled.
    Process,
}

/// Finds (and, with `Hold::Buffer`, copies) the pages that a stopped process owns in its private mapping of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureStart {
    pub job: String,
    pub pid: u32,
    /// Address in the process where the image is mapped from its offset 0 on.
    pub address: u64,
    pub length_bytes: u64,
    /// Name of the memory export that the process has mapped.
    pub parent: String,
    /// Path of the layer to write.
    pub layer: String,
    pub hold: Hold,
    /// Layers of an earlier capture of the same mapping, bottom first; the new layer may lie upon them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Vec<String>>,
}

/// Names a capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    pub job: String,
}

/// Consecutive layers, bottom first, that become one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    pub layers: Vec<String>,
    pub into: String,
}

/// A plain file that becomes a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportRaw {
    pub source: String,
    pub into: String,
}

/// A layer (a file or a blob's descriptor) whose canonical bytes are hashed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest {
    pub path: String,
}

/// A layer whose canonical form becomes a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compact {
    pub layer: String,
    pub into: String,
}

/// Begins to note the blocks of remote blobs in the order in which they are first read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStart {
    pub trace: String,
    /// Descriptors of the blobs that count; none named: every blob.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
}

/// Ends a trace and writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceFinish {
    pub trace: String,
    pub into: String,
}

/// Fetches the blocks of a trace in the background, in its order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefetch {
    /// A file that `trace_finish` has written.
    pub path: String,
    /// Descriptors of blobs that no export may have open yet. Blobs that are neither here nor open are skipped.
    pub blobs: Vec<String>,
}

/// Fetches whole blobs in the background.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    /// Their descriptors.
    pub paths: Vec<String>,
    /// Over all fills that run; the last one asked for holds. 0 stops them.
    pub bytes_per_s_max: u64,
}

/// Gives cached bytes back: at least `bytes` (of the least used, as far as none is in use) or all of one blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheEvict {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// A body that is not a request. The id is there when at least that could be read, so that it can be answered.
#[derive(Debug, thiserror::Error)]
#[error("not a valid request: {reason}")]
pub struct BadRequest {
    pub id: Option<u64>,
    pub reason: String,
}

impl Request {
    /// Reads a frame's body. The id is read first: a wrong field must be answered under the request's own id.
    pub fn decode(body: &[u8]) -> Result<Request, BadRequest> {
        #[derive(Deserialize)]
        struct Envelope {
            id: u64,
        }
        let bad = |id| {
            move |error: serde_json::Error| BadRequest {
                id,
                reason: error.to_string(),
            }
        };
        let id = serde_json::from_slice::<Envelope>(body).map_err(bad(None))?.id;
        let operation = serde_json::from_slice::<Operation>(body).map_err(bad(Some(id)))?;
        Ok(Request { id, operation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_field_is_reported_under_the_id_of_its_request() {
        let error = Request::decode(br#"{"id":7,"op":"unexport"}"#).unwrap_err();
        assert_eq!(error.id, Some(7));
        assert!(error.to_string().contains("name"), "{error}");
    }

    #[test]
    fn an_unknown_operation_is_named() {
        let error = Request::decode(br#"{"id":7,"op":"explode"}"#).unwrap_err();
        assert!(error.to_string().contains("explode"), "{error}");
        assert!(Request::decode(b"nonsense").unwrap_err().id.is_none());
    }
}
