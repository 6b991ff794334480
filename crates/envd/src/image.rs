//! Makes the file system of an OCI image fit for the SDKs, once, when a template is built of it: a user that commands
//! and file calls can run as, and the working directory that the image names.
//!
//! Done here and not with tools of the image, which may have none (distroless, scratch). Only what is missing is made.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::chown;
use std::path::{Component, Path, PathBuf};

use crate::users::{User, Users};

/// The first number that distributions give to people.
const UID_FIRST: u32 = 1000;
const UID_LAST: u32 = 60_000;
/// The length that `useradd` allows.
const NAME_BYTES_MAX: usize = 32;
/// Links that lead to each other; the kernel follows 40.
const LINKS_MAX: u32 = 40;

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("'{name}' is not a user name: lower-case letters, digits, '-' and '_', 1 to {NAME_BYTES_MAX}")]
    Name { name: String },
    #[error("no user number from {UID_FIRST} to {UID_LAST} is free")]
    NumbersUsedUp,
    #[error("the image runs as '{name}', a user that its /etc/passwd does not have")]
    UnknownUser { name: String },
    #[error("workdir '{path}' is not an absolute path")]
    Relative { path: String },
    #[error("cannot {step} {path}")]
    File {
        step: &'static str,
        path: String,
        source: io::Error,
    },
}

/// Adds the user, its group of the same number and its home, unless the image knows the name.
pub fn ensure_user(root: &Path, users: &Users, name: &str) -> Result<(), ImageError> {
    if !is_name(name) {
        return Err(ImageError::Name { name: name.into() });
    }
    if users.find(name).is_some() {
        return Ok(());
    }
    let id = (UID_FIRST..=UID_LAST)
        .find(|id| !users.has_id(*id))
        .ok_or(ImageError::NumbersUsedUp)?;
    let home = format!("/home/{name}");
    let shell = ["/bin/bash", "/bin/sh"]
        .into_iter()
        .find(|shell| root.join(&shell[1..]).exists())
        .unwrap_or("/bin/sh");
    // `*`: no password opens it.
    append_line(root, "etc/group", &format!("{name}:*:{id}:"))?;
    append_line(root, "etc/passwd", &format!("{name}:*:{id}:{id}::{home}:{shell}"))?;
    let made = make_directories(&root.join(&home[1..]))?;
    if let Some(directory) = made.last() {
        own(directory, id)?;
    }
    Ok(())
}

/// The user that the image runs as. Docker refuses such an image too, but only when it is run.
pub fn known_user(users: &Users, name: &str) -> Result<User, ImageError> {
    users
        .find(name)
        .ok_or_else(|| ImageError::UnknownUser { name: name.into() })
}

/// Makes the directory and its parents where they are missing; those made belong to `owner`.
pub fn ensure_workdir(root: &Path, path: &str, owner: &User) -> Result<(), ImageError> {
    if !path.starts_with('/') {
        return Err(ImageError::Relative { path: path.into() });
    }
    let made = make_directories(&root.join(normalised(path)))?;
    for directory in &made {
        chown(directory, Some(owner.uid), Some(owner.gid)).map_err(failed("give away", directory))?;
    }
    Ok(())
}

/// Writes everything out and keeps the file system from changing: what is on the disk is then all that there is, and
/// its journal is empty. Whoever writes afterwards waits for ever.
pub fn freeze(root: &Path) -> Result<(), ImageError> {
    /// `_IOWR('X', 119, int)`, linux/fs.h.
    const FIFREEZE: libc::c_ulong = 0xc004_5877;
    let directory = File::open(root).map_err(failed("open", root))?;
    // SAFETY: FIFREEZE takes no argument that the kernel would follow.
    if unsafe { libc::ioctl(directory.as_raw_fd(), FIFREEZE, 0) } == -1 {
        return Err(failed("freeze", root)(io::Error::last_os_error()));
    }
    Ok(())
}

/// The path without its first slash, `.` and `..`, which cannot leave the root.
fn normalised(path: &str) -> PathBuf {
    let mut parts = PathBuf::new();
    for component in Path::new(path).components() {
        match component {
            Component::ParentDir => {
                parts.pop();
            }
            Component::Normal(name) => parts.push(name),
            _ => {}
        }
    }
    parts
}

/// Makes what is missing of a path, top first, and says what was made. The last is the path itself, or where a link of
/// that name leads.
fn make_directories(path: &Path) -> Result<Vec<PathBuf>, ImageError> {
    make_behind_links(path, LINKS_MAX)
}

fn make_behind_links(path: &Path, links_max: u32) -> Result<Vec<PathBuf>, ImageError> {
    let mut missing: Vec<PathBuf> = path
        .ancestors()
        .take_while(|part| !part.as_os_str().is_empty() && !part.exists())
        .map(Path::to_owned)
        .collect();
    missing.reverse();
    let mut made = Vec::new();
    for directory in missing {
        match fs::read_link(&directory) {
            // A link to nothing, as /home to var/home where /var is filled at the first boot.
            Ok(target) if links_max > 0 => {
                let parent = directory.parent().unwrap_or(Path::new("/"));
                made.extend(make_behind_links(&parent.join(target), links_max - 1)?);
            }
            _ => {
                fs::create_dir(&directory).map_err(failed("make", &directory))?;
                made.push(directory);
            }
        }
    }
    Ok(made)
}

/// Adds a line to a file that may be missing, or lack the end of its last line.
fn append_line(root: &Path, file: &str, line: &str) -> Result<(), ImageError> {
    let path = root.join(file);
    make_directories(path.parent().unwrap_or(root))?;
    let old = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        other => other.map_err(failed("read", &path))?,
    };
    let gap = if old.last().is_none_or(|byte| *byte == b'\n') {
        ""
    } else {
        "\n"
    };
    let mut open = OpenOptions::new();
    let mut opened: File = open
        .append(true)
        .create(true)
        .open(&path)
        .map_err(failed("open", &path))?;
    opened
        .write_all(format!("{gap}{line}\n").as_bytes())
        .map_err(failed("write", &path))
}

fn own(path: &Path, id: u32) -> Result<(), ImageError> {
    chown(path, Some(id), Some(id)).map_err(failed("give away", path))
}

fn failed(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ImageError {
    let path = path.display().to_string();
    move |source| ImageError::File { step, path, source }
}

/// What every distribution's tools take as a name.
fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_');
    let starts_well = name
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_lowercase() || byte == b'_');
    name.len() <= NAME_BYTES_MAX && starts_well && name.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(passwd: &str) -> (tempfile::TempDir, Users) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/passwd"), passwd).unwrap();
        (root, Users::of(passwd, "staff:x:1001:\n"))
    }

    /// To whom a test without privileges may give what it makes.
    fn myself() -> User {
        // SAFETY: getuid cannot fail.
        Users::default().find(&unsafe { libc::getuid() }.to_string()).unwrap()
    }

    #[test]
    fn a_missing_user_is_made_with_the_first_free_number() {
        let (root, users) = image("root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/:/bin/sh");
        ensure_user(root.path(), &users, "user").unwrap();
        let passwd = fs::read_to_string(root.path().join("etc/passwd")).unwrap();
        assert!(
            passwd.ends_with("app:x:1000:1000::/:/bin/sh\nuser:*:1002:1002::/home/user:/bin/sh\n"),
            "{passwd}"
        );
        assert_eq!(
            fs::read_to_string(root.path().join("etc/group")).unwrap(),
            "user:*:1002:\n"
        );
        assert!(root.path().join("home/user").is_dir());
    }

    #[test]
    fn a_user_that_is_there_stays_as_it_is() {
        let (root, users) = image("user:x:7:7::/u:/bin/sh\n");
        ensure_user(root.path(), &users, "user").unwrap();
        assert_eq!(
            fs::read_to_string(root.path().join("etc/passwd")).unwrap(),
            "user:x:7:7::/u:/bin/sh\n"
        );
        assert!(!root.path().join("home").exists());
    }

    #[test]
    fn names_that_would_break_the_file_are_refused() {
        let (root, users) = image("");
        for bad in ["", "a:b", "a\nb", "-a", "Ä", "1a", &"x".repeat(33)] {
            assert!(
                matches!(ensure_user(root.path(), &users, bad), Err(ImageError::Name { .. })),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn directories_are_made_where_a_links_target_is_missing() {
        let (root, users) = image("");
        std::os::unix::fs::symlink("var/home", root.path().join("home")).unwrap();
        ensure_user(root.path(), &users, "user").unwrap();
        assert!(root.path().join("var/home/user").is_dir());
        std::os::unix::fs::symlink("loop", root.path().join("loop")).unwrap();
        assert!(matches!(
            ensure_workdir(root.path(), "/loop/x", &myself()),
            Err(ImageError::File { .. })
        ));
    }

    #[test]
    fn the_user_of_the_image_must_be_there() {
        let (_, users) = image("app:x:7:7::/u:/bin/sh\n");
        assert_eq!(known_user(&users, "app").unwrap().uid, 7);
        assert_eq!(known_user(&users, "4242").unwrap().uid, 4242);
        assert!(matches!(
            known_user(&users, "ghost"),
            Err(ImageError::UnknownUser { .. })
        ));
    }

    #[test]
    fn a_workdir_is_made_inside_the_root() {
        let (root, _) = image("");
        ensure_workdir(root.path(), "/srv/../app/./x", &myself()).unwrap();
        assert!(root.path().join("app/x").is_dir());
        assert!(!root.path().join("srv").exists());
        assert!(matches!(
            ensure_workdir(root.path(), "app", &myself()),
            Err(ImageError::Relative { .. })
        ));
    }
}
