//! Mounting, and telling a mount from a folder without asking the file system on it, which may have no daemon.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::limits::TRANSFER_BYTES_MAX;

/// Tells our mounts from others in /proc/mounts.
const KIND: &str = "fuse.aenv";

#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error("cannot open /dev/fuse (is the fuse module loaded?)")]
    NoFuse(#[source] io::Error),
    #[error("cannot mount {}", path.display())]
    Mount {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot unmount what is left at {}", path.display())]
    Stale {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} carries a file system of kind {kind}, which is not ours", path.display())]
    Foreign { path: PathBuf, kind: String },
}

/// Mounts and returns the connection. The root's attributes are asked of blockd later; nothing here waits for it.
pub fn mount(source: &str, path: &Path) -> Result<OwnedFd, MountError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let fuse = rustix::fs::open("/dev/fuse", flags, Mode::empty()).map_err(|error| MountError::NoFuse(error.into()))?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={TRANSFER_BYTES_MAX}",
        fuse.as_raw_fd()
    );
    let failed = |source: io::Error| MountError::Mount {
        path: path.to_owned(),
        source,
    };
    let options = CString::new(options).map_err(|error| failed(error.into()))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount(source, path, KIND, flags, options.as_c_str()).map_err(|error| failed(error.into()))?;
    Ok(fuse)
}

/// Detaches at once, also with files open: their connection ends with the last descriptor.
pub fn unmount(path: &Path) {
    while is_mounted(path) {
        if let Err(error) = rustix::mount::unmount(path, UnmountFlags::DETACH) {
            say!("aenv-blockd keeper: cannot unmount {}: {error}", path.display());
            return;
        }
    }
}

/// Removes what a keeper and a blockd that died together left. Caller: holds both locks, so no daemon serves it.
pub fn remove_stale(path: &Path) -> Result<(), MountError> {
    while let Some(entry) = find(path) {
        if entry.kind != KIND {
            return Err(MountError::Foreign {
                path: path.to_owned(),
                kind: entry.kind,
            });
        }
        say!("aenv-blockd keeper: removing the stale mount at {}", path.display());
        let failed = |error: rustix::io::Errno| MountError::Stale {
            path: path.to_owned(),
            source: error.into(),
        };
        rustix::mount::unmount(path, UnmountFlags::DETACH).map_err(failed)?;
    }
    Ok(())
}

pub fn is_mounted(path: &Path) -> bool {
    find(path).is_some_and(|entry| entry.kind == KIND)
}

/// The kernel's default of 128 KiB is the upper bound of what INIT can ask for, unless it is raised here.
pub fn set_read_ahead(path: &Path) {
    let Some(entry) = find(path) else { return };
    let file = format!("/sys/class/bdi/{}/read_ahead_kb", entry.device);
    if let Err(error) = std::fs::write(&file, (TRANSFER_BYTES_MAX >> 10).to_string()) {
        say!("aenv-blockd keeper: cannot set {file}; cold memory images load slower: {error}");
    }
}

struct Entry {
    device: String,
    kind: String,
}

/// The top-most mount at a path, from /proc/self/mountinfo: `id parent device root path options... - kind source ...`.
fn find(path: &Path) -> Option<Entry> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let path = resolved(path);
    mounts.lines().rev().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut fields = left.split(' ').skip(2);
        let device = fields.next()?.to_owned();
        let here = unescape(fields.nth(1)?) == path.to_string_lossy();
        here.then(|| Entry {
            device,
            kind: right.split(' ').next().unwrap_or_default().to_owned(),
        })
    })
}

/// With symbolic links in its *parent* resolved: looking at the last component would ask the mount itself.
fn resolved(path: &Path) -> PathBuf {
    match (
        path.parent().and_then(|parent| parent.canonicalize().ok()),
        path.file_name(),
    ) {
        (Some(parent), Some(name)) => parent.join(name),
        _ => path.to_owned(),
    }
}

/// Space, tab, newline and backslash stand as octal numbers in that file.
fn unescape(field: &str) -> String {
    field
        .replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\012", "\n")
        .replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_a_mount_and_not_ours() {
        assert!(find(Path::new("/proc")).is_some_and(|entry| entry.kind == "proc"));
        assert!(!is_mounted(Path::new("/proc")));
        assert!(find(Path::new("/proc/self")).is_none());
        assert!(matches!(
            remove_stale(Path::new("/proc")),
            Err(MountError::Foreign { .. })
        ));
    }

    #[test]
    fn paths_with_spaces_are_found() {
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
    }
}
