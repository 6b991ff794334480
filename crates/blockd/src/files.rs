//! Writing files so that they are whole: atomically for readers, durably where asked.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Replaces a small file. It is whole for every process at any time, also after our death; it is *not* synced: what
/// blockd records is worth nothing after a power loss, when every guest is gone too.
pub fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = sibling(path, ".tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(content)?;
    fs::rename(&temporary, path)
}

/// The path with something appended to its last component.
pub fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Makes a file and its directory entry survive a power loss.
pub fn sync_with_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// Renames a file to a name that must be free.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let here = rustix::fs::CWD;
    Ok(rustix::fs::renameat_with(
        here,
        from,
        here,
        to,
        rustix::fs::RenameFlags::NOREPLACE,
    )?)
}

/// Removes a file that may be gone already.
pub fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
