//! Client paths: relative ones, `~`, and directories made on the way.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Gid, Uid};

use crate::users::User;

/// Makes a client's path absolute and removes `.`, `..` and doubled slashes, without looking at the disk.
/// `~` and `~/x` are below `home`, other relative paths (and the empty one) below `base`.
pub fn resolve(path: &str, base: &Path, home: &Path) -> PathBuf {
    let joined = match path.strip_prefix('~') {
        Some("") => home.to_path_buf(),
        Some(rest) if rest.starts_with('/') => home.join(rest.trim_start_matches('/')),
        _ => base.join(path),
    };
    let mut clean = PathBuf::from("/");
    for component in joined.components() {
        match component {
            Component::Normal(name) => clean.push(name),
            // Above the root is the root.
            Component::ParentDir => {
                clean.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    clean
}

/// Creates a directory and its missing parents; the new ones belong to the user.
/// An existing directory is fine; anything else in the way is an error of kind `NotADirectory`.
pub fn make_dirs(path: &Path, user: &User) -> io::Result<()> {
    let mut missing = Vec::new();
    let mut current = path;
    loop {
        match std::fs::metadata(current) {
            Ok(meta) if meta.is_dir() => break,
            Ok(_) => return Err(io::Error::from(io::ErrorKind::NotADirectory)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(current),
            Err(error) => return Err(error),
        }
        match current.parent() {
            Some(parent) => current = parent,
            None => break,
        }
    }
    for folder in missing.into_iter().rev() {
        match std::fs::DirBuilder::new().mode(0o755).create(folder) {
            Ok(()) => own(folder, user)?,
            // Another request made it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Gives a new entry to the user. A daemon that is not root (tests) owns what it makes already.
pub fn own(path: &Path, user: &User) -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        rustix::fs::chown(path, Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(user.gid)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved_like_a_shell_would() {
        let at = |path| resolve(path, Path::new("/work"), Path::new("/home/user"));
        for (given, want) in [
            ("/a/b", "/a/b"),
            ("a", "/work/a"),
            ("", "/work"),
            (".", "/work"),
            ("~", "/home/user"),
            ("~/x", "/home/user/x"),
            ("~x", "/work/~x"),
            ("/a/../../b//c/.", "/b/c"),
            ("a b\nc/ü", "/work/a b\nc/ü"),
        ] {
            assert_eq!(at(given), PathBuf::from(want), "{given:?}");
        }
    }
}
