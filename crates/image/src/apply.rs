//! Applies one OCI layer to the stack of its parents: the archive's entries, in their order, with whiteouts.
//!
//! Owns: what an entry means in an image, as the usual unpackers (umoci, containerd) understand it. Does not own: the tree
//! it changes ([`crate::tree`]), the stream ([`crate::input`], [`crate::tar`]) and the layer's file ([`crate::layer`]).

use std::path::{Path, PathBuf};

use aenv_layers::{Layer, Stack, Uuid};

use crate::device::{BLOCK_BYTES, Device, DeviceError};
use crate::entries::{Entries, EntryError};
use crate::ext2::{Ext2, Ext2Error};
use crate::input::{Compression, Digest, Digests, Input, InputError};
use crate::layer::{Identity, LayerError, write_layer};
use crate::partial::Partial;
use crate::programs::{DISK_BYTES_MAX, DISK_BYTES_MIN, ProgramError, make_file_system};
use crate::tar::Reader;
use crate::tree::{Tree, TreeError};
use crate::uuid::derived;

/// Identity of file systems whose layer has no expected digest.
const NO_DIGEST: &[u8] = b"no digest";

/// One conversion.
#[derive(Debug, Clone)]
pub struct Request {
    /// Of the disk; every layer of an image has the same.
    pub size_bytes: u64,
    /// Bottom first; none for the first layer.
    pub parents: Vec<PathBuf>,
    /// None: standard input.
    pub tar: Option<PathBuf>,
    pub compression: Compression,
    pub expect_diff_id: Option<Digest>,
    pub expect_blob: Option<Digest>,
    pub out: PathBuf,
    /// Of the file system (first layer only); by default it follows from the expected digest.
    pub uuid: Option<Uuid>,
    /// Seconds since 1970 that date what has no time in the archive.
    pub epoch_s: u32,
    /// Most bytes of the archive.
    pub max_bytes: u64,
}

/// What a conversion made.
#[derive(Debug, Clone, Copy)]
pub struct Report {
    pub data_bytes: u64,
    /// Entries that made something; whiteouts are not counted.
    pub files: u64,
    pub whiteouts: u64,
    /// Extended attributes that an image may not bring along, or that ext4 cannot hold.
    pub skipped_attributes: u64,
    pub digests: Digests,
}

#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("a disk of {size} bytes is not between {DISK_BYTES_MIN} and {DISK_BYTES_MAX} in steps of 4096")]
    Size { size: u64 },
    #[error("{}: already exists", path.display())]
    Exists { path: PathBuf },
    #[error("cannot open the parent layers")]
    Parents(#[source] aenv_layers::Error),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error("cannot prepare the disk")]
    Device(#[from] DeviceError),
    #[error("cannot open the file system of the parents")]
    FileSystem(#[from] Ext2Error),
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Entry(#[from] EntryError),
    #[error("cannot write the directories")]
    Finish(#[source] TreeError),
    #[error("the archive has digest {found}, not {expected}")]
    DiffId { expected: Digest, found: Digest },
    #[error("the blob has digest {found}, not {expected}")]
    Blob { expected: Digest, found: Digest },
    #[error("the image's disk of {size} bytes is too small: {missing} bytes are missing")]
    DiskFull { size: u64, missing: u64 },
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error("{}: the finished layer cannot get its name", path.display())]
    Publish {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// Converts one layer. `progress` is told the bytes of the blob that were read, often. After an error nothing is left.
pub fn apply(request: &Request, progress: &mut dyn FnMut(u64)) -> Result<Report, ApplyError> {
    check(request)?;
    let input = Input::open(request.tar.as_deref(), request.compression, request.max_bytes)?;
    apply_input(request, input, progress)
}

/// As [`apply`], of a stream that is open.
pub fn apply_input(request: &Request, input: Input, progress: &mut dyn FnMut(u64)) -> Result<Report, ApplyError> {
    check(request)?;
    let parent = parent_uuid(&request.parents)?;
    let tree = Tree::new(open_file_system(request)?, request.epoch_s);
    let mut entries = Entries::new(Reader::new(input), tree);
    let counts = entries.apply_all(&mut |input| progress(input.blob_bytes()))?;
    let (reader, tree) = entries.into_parts();
    let digests = reader.into_inner().finish()?;
    // Before the shortage is told: what is missing in a forged archive is of no interest.
    verify(request, &digests)?;
    if counts.missing_bytes > 0 {
        let (size, missing) = (request.size_bytes, counts.missing_bytes);
        return Err(ApplyError::DiskFull { size, missing });
    }
    let ext2 = tree.finish().map_err(|error| match error {
        TreeError::NoBlocks { blocks } => ApplyError::DiskFull {
            size: request.size_bytes,
            missing: blocks * BLOCK_BYTES,
        },
        other => ApplyError::Finish(other),
    })?;
    let own = layer_uuid(request, parent, &digests);
    let partial = Partial::beside(&request.out);
    let data_bytes = write_layer(ext2.device(), partial.path(), Identity { own, parent })?;
    partial
        .publish(&request.out)
        .map_err(|source| publish_error(&request.out, source))?;
    Ok(Report {
        data_bytes,
        files: counts.files,
        whiteouts: counts.whiteouts,
        skipped_attributes: counts.skipped_attributes,
        digests,
    })
}

fn check(request: &Request) -> Result<(), ApplyError> {
    let size = request.size_bytes;
    if !(DISK_BYTES_MIN..=DISK_BYTES_MAX).contains(&size) || !size.is_multiple_of(BLOCK_BYTES) {
        return Err(ApplyError::Size { size });
    }
    match request.out.symlink_metadata() {
        Ok(_) => Err(ApplyError::Exists {
            path: request.out.clone(),
        }),
        Err(_) => Ok(()),
    }
}

fn parent_uuid(parents: &[PathBuf]) -> Result<Uuid, ApplyError> {
    match parents.last() {
        Some(path) => Ok(Layer::open(path).map_err(ApplyError::Parents)?.uuid()),
        None => Ok(Uuid::NIL),
    }
}

fn open_file_system(request: &Request) -> Result<Ext2, ApplyError> {
    let parent = match request.parents.is_empty() {
        true => None,
        false => Some(Stack::open(&request.parents, None, request.size_bytes).map_err(ApplyError::Parents)?),
    };
    let first = parent.is_none();
    let folder = request.out.parent().unwrap_or(Path::new(""));
    let mut device = Device::new(request.size_bytes, parent, folder)?;
    if first {
        let uuid = file_system_uuid(request).to_string().to_lowercase();
        make_file_system(device.scratch(), request.size_bytes, &uuid, request.epoch_s)?;
        device.adopt()?;
    }
    Ok(Ext2::open(device)?)
}

fn verify(request: &Request, found: &Digests) -> Result<(), ApplyError> {
    if let Some(expected) = request.expect_blob
        && expected != found.blob
    {
        let found = found.blob;
        return Err(ApplyError::Blob { expected, found });
    }
    match request.expect_diff_id {
        Some(expected) if expected != found.diff_id => Err(ApplyError::DiffId {
            expected,
            found: found.diff_id,
        }),
        _ => Ok(()),
    }
}

fn file_system_uuid(request: &Request) -> Uuid {
    let digest = request.expect_diff_id.or(request.expect_blob);
    let seed = digest.map_or(NO_DIGEST.to_vec(), |digest| digest.0.to_vec());
    request.uuid.unwrap_or_else(|| derived(&[b"file system", &seed]))
}

/// Equal inputs give an equal layer, so its identity follows from them.
fn layer_uuid(request: &Request, parent: Uuid, digests: &Digests) -> Uuid {
    let file_system = if request.parents.is_empty() {
        file_system_uuid(request)
    } else {
        Uuid::NIL
    };
    derived(&[
        b"layer",
        parent.as_bytes(),
        &digests.diff_id.0,
        &request.size_bytes.to_le_bytes(),
        &request.epoch_s.to_le_bytes(),
        file_system.as_bytes(),
    ])
}

fn publish_error(path: &Path, source: std::io::Error) -> ApplyError {
    match source.kind() {
        std::io::ErrorKind::AlreadyExists => ApplyError::Exists { path: path.to_owned() },
        _ => ApplyError::Publish {
            path: path.to_owned(),
            source,
        },
    }
}
