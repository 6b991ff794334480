//! Answers: `{"id":N,"ok":{...}}` or `{"id":N,"error":{"kind":"...","message":"..."}}`.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What went wrong, in the words that clients decide by. The message is for people only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The named export, job or file is not there.
    NotFound,
    /// The name is taken with other fields, or the file to write is already there.
    Exists,
    /// The request is malformed, out of range, or does not fit the state of what it names.
    Invalid,
    /// A limit is reached or another operation holds the thing; trying later can help.
    Busy,
    /// The file system has no room.
    NoSpace,
    /// A system call failed; the message names the file and the call.
    Io,
    /// The capture was cancelled.
    Canceled,
    /// A layer is damaged or not a layer.
    Corrupt,
    /// This kernel or this build cannot do it.
    Unsupported,
}

/// The error half of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub kind: ErrorKind,
    pub message: String,
}

/// Either half of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome<T> {
    #[serde(rename = "ok")]
    Ok(T),
    #[serde(rename = "error")]
    Error(ErrorBody),
}

/// The answer of operations that have nothing to say but that they are done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloOk {
    pub version: u32,
    pub pid: u32,
    pub keeper_pid: u32,
    pub memory_mount: String,
    pub disk_mount: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportOk {
    pub path: String,
    pub inode: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbandonOk {
    /// Requests that were waiting and have been answered with EIO.
    pub waiting: u64,
}

/// Which mount an export is on, and so what may be done to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportKind {
    Memory,
    Disk,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportInfo {
    pub name: String,
    pub kind: ExportKind,
    pub inode: u64,
    pub size_bytes: u64,
    pub layers: Vec<String>,
    pub upper: Option<String>,
    pub abandoned: bool,
    /// The last request that ended in an error of the store or the disk, if any did since blockd started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<ExportFailure>,
}

/// Why an export answered with an I/O error, and how long ago.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportFailure {
    pub message: String,
    pub age_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportsOk {
    pub exports: Vec<ExportInfo>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealDiskOk {
    pub layer: String,
    pub data_bytes: u64,
    pub index_entries: u64,
    pub duration_us: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureStartOk {
    pub dirty_bytes: u64,
    pub scan_us: u64,
    pub copy_us: u64,
    /// Whether the layer will lie upon the base that was asked for, and not upon the mapped image.
    #[serde(default)]
    pub based: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureFinishOk {
    pub layer: String,
    pub data_bytes: u64,
    /// Zero pages over a parent that reads something else: trim segments.
    pub zero_bytes: u64,
    /// Pages left out because the parent reads the same.
    pub skipped_bytes: u64,
    pub duration_us: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeOk {
    pub layer: String,
    pub data_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportRawOk {
    pub layer: String,
    pub data_bytes: u64,
    pub size_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DigestOk {
    /// sha256 of the canonical bytes, 64 hex digits.
    pub digest: String,
    /// Of the canonical bytes.
    pub size_bytes: u64,
    pub data_bytes: u64,
    /// Whether the file itself is not in canonical form.
    pub sparse: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactOk {
    pub layer: String,
    pub data_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceFinishOk {
    pub blocks: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefetchOk {
    pub job: String,
}

/// One blob of the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedBlobInfo {
    pub digest: String,
    pub cached_bytes: u64,
    pub size_bytes: u64,
    /// Whether an export, a prefetch or a fill has it open.
    pub in_use: bool,
}

/// The cache as it is, and what happened since this blockd started. All zero where blockd was given no cache.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheOk {
    pub size_bytes: u64,
    pub size_bytes_max: u64,
    /// Those in use first, then the larger ones; as many as fit in an answer.
    pub blobs: Vec<CachedBlobInfo>,
    pub blobs_total: u64,
    /// Blocks that a reader found, and blocks that it had to wait for.
    pub hits: u64,
    pub misses: u64,
    pub bytes_from_store: u64,
    pub bytes_from_cache: u64,
    /// Reads that waited for a store which failed or was silent, and for how long in total.
    pub stalls: u64,
    pub stall_us: u64,
    pub verify_failures: u64,
    pub evicted_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheEvictOk {
    pub freed_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatsOk {
    /// Events since this blockd started, by name.
    pub counters: std::collections::BTreeMap<String, u64>,
    pub buffer_bytes: u64,
    pub exports: u64,
    pub captures: u64,
    pub threads: u64,
}

#[derive(Serialize, Deserialize)]
struct Answer<T> {
    id: u64,
    #[serde(flatten)]
    outcome: Outcome<T>,
}

/// The body of a good answer. The types above hold nothing that JSON cannot carry, hence no error.
pub fn encode_ok<T: Serialize>(id: u64, ok: &T) -> Vec<u8> {
    encode(&Answer {
        id,
        outcome: Outcome::Ok(ok),
    })
}

/// The body of a refusal.
pub fn encode_error(id: u64, kind: ErrorKind, message: &str) -> Vec<u8> {
    encode(&Answer::<Empty> {
        id,
        outcome: Outcome::Error(ErrorBody {
            kind,
            message: message.to_owned(),
        }),
    })
}

/// Reads an answer whose good half is a `T`.
pub fn decode_answer<T: DeserializeOwned>(body: &[u8]) -> Result<(u64, Outcome<T>), serde_json::Error> {
    let answer: Answer<T> = serde_json::from_slice(body)?;
    Ok((answer.id, answer.outcome))
}

fn encode<T: Serialize>(answer: &T) -> Vec<u8> {
    serde_json::to_vec(answer).unwrap_or_else(|error| unreachable!("an answer is always JSON: {error}"))
}
