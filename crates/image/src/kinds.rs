//! The class of an error, for callers of the program: they decide by it, never by the text.
//!
//! The words are those of blockd's control protocol (`aenv_wire::block`).

use std::io;

use aenv_layers::ErrorKind;

use crate::apply::ApplyError;
use crate::check::CheckError;
use crate::device::DeviceError;
use crate::dump::DumpError;
use crate::entries::EntryError;
use crate::ext2::Ext2Error;
use crate::ext4::Ext4Error;
use crate::input::{InputError, input_error};
use crate::layer::LayerError;
use crate::programs::ProgramError;
use crate::tar::TarError;
use crate::tree::TreeError;

const NOT_FOUND: &str = "not_found";
const EXISTS: &str = "exists";
const INVALID: &str = "invalid";
const NO_SPACE: &str = "no_space";
const IO: &str = "io";
const CORRUPT: &str = "corrupt";
const UNSUPPORTED: &str = "unsupported";

/// An error that has a class.
pub trait Kind: std::error::Error {
    fn kind(&self) -> &'static str;

    /// For a disk of the image that is too small: by how much.
    fn missing_bytes(&self) -> Option<u64> {
        None
    }
}

impl Kind for ApplyError {
    fn kind(&self) -> &'static str {
        match self {
            ApplyError::Size { .. } => INVALID,
            ApplyError::Exists { .. } => EXISTS,
            ApplyError::Parents(error) => layers(error),
            ApplyError::Program(error) => program(error),
            ApplyError::Device(error) => device(error),
            ApplyError::FileSystem(error) => ext2(error),
            ApplyError::Input(error) => input(error),
            ApplyError::Entry(error) => entry(error),
            ApplyError::Finish(error) => tree(error),
            ApplyError::DiffId { .. } | ApplyError::Blob { .. } => CORRUPT,
            ApplyError::DiskFull { .. } => NO_SPACE,
            ApplyError::Layer(LayerError::Write(error)) => layers(error),
            ApplyError::Layer(LayerError::Read(error)) => device(error),
            ApplyError::Publish { source, .. } => system(source),
        }
    }

    fn missing_bytes(&self) -> Option<u64> {
        match self {
            ApplyError::DiskFull { missing, .. } => Some(*missing),
            _ => None,
        }
    }
}

impl Kind for DumpError {
    fn kind(&self) -> &'static str {
        match self {
            DumpError::Layers(error) => layers(error),
            DumpError::Device(error) => device(error),
            DumpError::Program(error) => program(error),
            DumpError::Read(error) => ext4(error),
            DumpError::Write(error) => system(error),
            DumpError::PathTooLong { .. } | DumpError::TooMany => UNSUPPORTED,
            DumpError::TooLarge { .. } => INVALID,
        }
    }
}

impl Kind for CheckError {
    fn kind(&self) -> &'static str {
        match self {
            CheckError::Open(error) => error.kind(),
            CheckError::Copy(error) => device(error),
            CheckError::Program(error) => program(error),
        }
    }
}

fn layers(error: &aenv_layers::Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => NOT_FOUND,
        ErrorKind::Exists => EXISTS,
        ErrorKind::Invalid => INVALID,
        ErrorKind::NoSpace => NO_SPACE,
        ErrorKind::Io => IO,
        ErrorKind::Corrupt => CORRUPT,
    }
}

fn system(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        io::ErrorKind::AlreadyExists => EXISTS,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => NO_SPACE,
        _ => IO,
    }
}

fn program(error: &ProgramError) -> &'static str {
    match error {
        ProgramError::Start { source, .. } => system(source),
        ProgramError::MakeFileSystem { .. } => IO,
        ProgramError::HostFull { .. } => NO_SPACE,
        ProgramError::NotClean { .. } | ProgramError::Journal { .. } => CORRUPT,
    }
}

fn device(error: &DeviceError) -> &'static str {
    match error {
        DeviceError::Scratch { source, .. } => system(source),
        DeviceError::Parent(error) => layers(error),
        DeviceError::Outside { .. } => CORRUPT,
    }
}

fn ext2(error: &Ext2Error) -> &'static str {
    match error {
        // The file systems are ours: what the library refuses is damage.
        Ext2Error::Library { .. } => CORRUPT,
        Ext2Error::Device { source, .. } => device(source),
        Ext2Error::NoInode | Ext2Error::NoBlocks => NO_SPACE,
        Ext2Error::AttributesTooLarge { .. } | Ext2Error::Geometry { .. } => UNSUPPORTED,
    }
}

fn ext4(error: &Ext4Error) -> &'static str {
    match error {
        Ext4Error::Device(error) => device(error),
        Ext4Error::NotExt4 | Ext4Error::Damaged { .. } => CORRUPT,
        Ext4Error::Unsupported { .. } => UNSUPPORTED,
    }
}

fn input(error: &InputError) -> &'static str {
    match error {
        InputError::Open { source, .. } => system(source),
        // A decoder's errors are none of the system's.
        InputError::Read(source) if source.raw_os_error().is_some() => IO,
        InputError::Read(_) => CORRUPT,
        InputError::TooLarge { .. } => INVALID,
        InputError::Ended => IO,
    }
}

fn entry(error: &EntryError) -> &'static str {
    match error {
        EntryError::Tar(TarError::Read(source)) => input_error(source).map_or(IO, input),
        EntryError::Tar(TarError::UnknownType { .. }) => UNSUPPORTED,
        EntryError::Tar(_) => CORRUPT,
        EntryError::Apply { source, .. } => tree(source),
        EntryError::EmptyWhiteout { .. } | EntryError::RootReplaced | EntryError::TooMany => INVALID,
    }
}

fn tree(error: &TreeError) -> &'static str {
    match error {
        TreeError::Change(error) => ext2(error),
        TreeError::Read(error) => ext4(error),
        TreeError::Device(error) => device(error),
        TreeError::NoBlocks { .. } | TreeError::NoInodes => NO_SPACE,
        TreeError::Path(_) | TreeError::LinkTargetMissing | TreeError::LinkToDirectory => INVALID,
        TreeError::TargetLength { .. } => INVALID,
        TreeError::TooManyLinks
        | TreeError::DirectoryTooLarge
        | TreeError::FileTooLarge { .. }
        | TreeError::DeviceNumbers { .. }
        | TreeError::RescueFolder => UNSUPPORTED,
    }
}
