//! A file that appears under its final name when it is complete and durable, or not at all.
//!
//! It is written without a name (`O_TMPFILE`), so that a killed process leaves nothing; where the file system cannot do
//! that (NFS), under a hidden temporary one. Giving it its name does not replace a file where names are digests: one that
//! is there is the same one, made by somebody who was faster. A copy of a blob may be replaced.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{At, Failed};
use crate::journal::sync_folder;

/// Readable for all who may enter the folder, as other files of a repository.
const MODE: u32 = 0o644;

/// A file on its way.
#[derive(Debug)]
pub(crate) struct NewFile {
    folder: PathBuf,
    file: File,
    /// Its temporary name, if it needed one.
    temporary: Option<PathBuf>,
}

impl NewFile {
    /// Starts a file that will be in `folder`, which is made if missing.
    pub fn create(folder: &Path) -> Result<NewFile, Failed> {
        NewFile::with_mode(folder, MODE)
    }

    /// As `create`, with other permissions.
    pub fn with_mode(folder: &Path, mode: u32) -> Result<NewFile, Failed> {
        std::fs::create_dir_all(folder).at(folder, "make the folder")?;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(folder, flags, Mode::from_raw_mode(mode)) {
            Ok(file) => Ok(NewFile::of(folder, file, None)),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => NewFile::named(folder, mode),
            Err(e) => Err(e).at(folder, "create a file"),
        }
    }

    fn named(folder: &Path, mode: u32) -> Result<NewFile, Failed> {
        let path = folder.join(hidden());
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(mode).open(&path);
        Ok(NewFile::of(folder, file.at(&path, "create")?.into(), Some(path)))
    }

    fn of(folder: &Path, file: OwnedFd, temporary: Option<PathBuf>) -> NewFile {
        NewFile {
            folder: folder.to_owned(),
            file: file.into(),
            temporary,
        }
    }

    /// Takes the space for `bytes` now, so that a disk that is too small is known before the work is done.
    pub fn reserve(&self, bytes: u64) -> Result<(), Failed> {
        let reserve = || rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, bytes);
        match rustix::io::retry_on_intr(reserve) {
            // Then the writes will tell.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::INVAL) => Ok(()),
            Err(e) => Err(e).at(&self.folder, "reserve space for a file"),
        }
    }

    /// Makes the file durable and gives it its name. Durable on return; tells whether a file of that name was there.
    pub fn publish(mut self, name: &str) -> Result<bool, Failed> {
        let target = self.folder.join(name);
        self.file.sync_all().at(&target, "sync")?;
        let linked = self.link(&target);
        self.discard();
        let was_there = match linked {
            Ok(()) => false,
            Err(Errno::EXIST) => true,
            Err(e) => return Err(e).at(&target, "give the file its name"),
        };
        // Also for another's file: its name may not be durable yet.
        sync_folder(&self.folder)?;
        Ok(was_there)
    }

    /// Makes the file durable and gives it its name, from whatever file has it. Durable on return.
    pub fn replace(mut self, name: &str) -> Result<(), Failed> {
        let target = self.folder.join(name);
        self.file.sync_all().at(&target, "sync")?;
        if self.temporary.is_none() {
            // What has no name cannot take the place of another.
            let path = self.folder.join(hidden());
            self.link(&path).at(&path, "give the file a name")?;
            self.temporary = Some(path);
        }
        if let Some(path) = &self.temporary {
            std::fs::rename(path, &target).at(&target, "give the file its name")?;
        }
        self.temporary = None;
        sync_folder(&self.folder)
    }

    fn link(&self, target: &Path) -> rustix::io::Result<()> {
        match &self.temporary {
            Some(path) => rustix::fs::linkat(CWD, path, CWD, target, AtFlags::empty()),
            None => {
                let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                rustix::fs::linkat(CWD, own, CWD, target, AtFlags::SYMLINK_FOLLOW)
            }
        }
    }

    fn discard(&mut self) {
        if let Some(path) = self.temporary.take() {
            // A leftover is hidden and of no name that anything looks for.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        self.discard();
    }
}

/// A name that nothing looks for.
fn hidden() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!(".{}.{}.partial", std::process::id(), now.as_nanos())
}

/// The folder and the name of a file that is to be written. Errors: kind of an invalid input for one without a name.
pub(crate) fn split(path: &Path) -> Result<(&Path, &str), Failed> {
    let name = path.file_name().and_then(|name| name.to_str());
    let (folder, name) = path.parent().zip(name).ok_or_else(|| Failed::File {
        path: path.to_owned(),
        step: "use as a name",
        source: io::ErrorKind::InvalidInput.into(),
    })?;
    let here = folder.as_os_str().is_empty();
    Ok((if here { Path::new(".") } else { folder }, name))
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    type Create = fn(&Path) -> Result<NewFile, Failed>;

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        for create in [NewFile::create as Create, |folder| NewFile::named(folder, MODE)] {
            let dir = tempfile::tempdir().unwrap();
            let mut file = create(dir.path()).unwrap();
            file.write_all(b"half").unwrap();
            drop(file);
            assert!(names(dir.path()).is_empty());
            let mut file = create(dir.path()).unwrap();
            file.reserve(1 << 20).unwrap();
            file.write_all(b"whole").unwrap();
            assert!(!file.publish("name").unwrap());
            assert_eq!(names(dir.path()), ["name"]);
            assert_eq!(std::fs::read(dir.path().join("name")).unwrap(), b"whole");
        }
    }

    #[test]
    fn the_first_of_two_that_publish_one_name_wins() {
        for create in [NewFile::create as Create, |folder| NewFile::named(folder, MODE)] {
            let dir = tempfile::tempdir().unwrap();
            let (mut first, mut second) = (create(dir.path()).unwrap(), create(dir.path()).unwrap());
            first.write_all(b"one").unwrap();
            second.write_all(b"one").unwrap();
            assert!(!first.publish("name").unwrap());
            assert!(second.publish("name").unwrap());
            assert_eq!(names(dir.path()), ["name"]);
        }
    }

    #[test]
    fn a_copy_takes_the_place_of_what_is_there_with_its_own_permissions() {
        for create in [NewFile::with_mode, NewFile::named] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("name"), b"old and longer").unwrap();
            let mut file = create(dir.path(), 0o600).unwrap();
            file.write_all(b"new").unwrap();
            file.replace("name").unwrap();
            assert_eq!(names(dir.path()), ["name"]);
            let path = dir.path().join("name");
            assert_eq!(std::fs::read(&path).unwrap(), b"new");
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let error = NewFile::create(&file.join("layers")).unwrap_err();
        assert!(error.to_string().contains("file/layers"), "{error}");
    }
}
