//! What the clients learn about a path: `EntryInfo`.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::metadata::{self, Metadata};
use crate::users::Users;

/// In proto3 JSON form: 64-bit numbers are text, and the default of a field may be left out.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    pub name: String,
    /// Of what a link points to.
    pub r#type: &'static str,
    pub path: String,
    pub size: String,
    /// Permission bits only.
    pub mode: u32,
    pub permissions: String,
    pub owner: String,
    pub group: String,
    pub modified_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    #[serde(skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_symlink: bool,
}

impl EntryInfo {
    /// Looks at a path itself (a link is not followed, except for its type and target).
    pub fn of(path: &Path, users: &Users) -> io::Result<Self> {
        let meta = std::fs::symlink_metadata(path)?;
        let is_symlink = meta.file_type().is_symlink();
        let target_type = if is_symlink {
            std::fs::metadata(path).ok().map(|m| m.file_type())
        } else {
            None
        };
        let file_type = if is_symlink {
            target_type
        } else {
            Some(meta.file_type())
        };
        let r#type = match file_type {
            Some(kind) if kind.is_dir() => "FILE_TYPE_DIRECTORY",
            Some(kind) if kind.is_file() => "FILE_TYPE_FILE",
            _ => "FILE_TYPE_UNSPECIFIED",
        };
        let name = path
            .file_name()
            .map_or_else(|| "/".into(), |name| name.to_string_lossy().into_owned());
        Ok(EntryInfo {
            name,
            r#type,
            path: path.to_string_lossy().into_owned(),
            size: meta.len().to_string(),
            mode: meta.mode() & 0o777,
            permissions: permissions(&meta),
            owner: users.user_name(meta.uid()),
            group: users.group_name(meta.gid()),
            modified_time: rfc3339(meta.mtime(), meta.mtime_nsec()),
            symlink_target: is_symlink.then(|| target_of(path).to_string_lossy().into_owned()),
            metadata: metadata::read(path),
            is_symlink,
        })
    }

    /// Leaves out what came after the clients that fail on unknown fields.
    pub fn for_strict_client(mut self) -> Self {
        self.metadata = Metadata::new();
        self.is_symlink = false;
        self
    }
}

/// Where a link leads, absolute; of a broken one, where it would lead.
fn target_of(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| {
        let base = path.parent().unwrap_or(Path::new("/"));
        let target = std::fs::read_link(path).unwrap_or_default();
        super::path::resolve(&target.to_string_lossy(), base, base)
    })
}

/// UTC with a `Z`; a time out of range (a broken file system) is the epoch.
fn rfc3339(seconds: i64, nanos: i64) -> String {
    let nanos = i32::try_from(nanos).unwrap_or(0);
    jiff::Timestamp::new(seconds, nanos)
        .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
        .to_string()
}

/// The text of Go's `FileMode`, which the clients show: flag letters in this order, then nine bits.
fn permissions(meta: &std::fs::Metadata) -> String {
    let (kind, mode) = (meta.file_type(), meta.mode());
    let flags = [
        (kind.is_dir(), 'd'),
        (kind.is_symlink(), 'L'),
        (kind.is_block_device() || kind.is_char_device(), 'D'),
        (kind.is_fifo(), 'p'),
        (kind.is_socket(), 'S'),
        (mode & 0o4000 != 0, 'u'),
        (mode & 0o2000 != 0, 'g'),
        (kind.is_char_device(), 'c'),
        (mode & 0o1000 != 0, 't'),
    ];
    let mut text: String = flags.iter().filter(|(set, _)| *set).map(|(_, letter)| letter).collect();
    if text.is_empty() {
        text.push('-');
    }
    for (position, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> position) != 0 { letter } else { '-' });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_file_a_directory_and_links_are_described_as_the_clients_expect() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let file = root.join("a b");
        std::fs::write(&file, "1234").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        symlink("a b", root.join("link")).unwrap();
        symlink("gone/../x", root.join("broken")).unwrap();
        let of = |name: &str| EntryInfo::of(&root.join(name), &Users::load()).unwrap();
        let info = of("a b");
        assert_eq!(
            (info.permissions.as_str(), info.mode, info.size.as_str()),
            ("-rw-r-----", 0o640, "4")
        );
        assert!(info.modified_time.ends_with('Z') && !info.is_symlink);
        let link = of("link");
        assert_eq!(
            (link.r#type, link.permissions.as_str()),
            ("FILE_TYPE_FILE", "Lrwxrwxrwx")
        );
        assert_eq!(link.symlink_target.as_deref(), file.to_str());
        let broken = of("broken");
        assert_eq!(broken.r#type, "FILE_TYPE_UNSPECIFIED");
        assert_eq!(broken.symlink_target.as_deref(), root.join("x").to_str());
        let tmp = EntryInfo::of(Path::new("/tmp"), &Users::load()).unwrap();
        assert_eq!(tmp.permissions, "dtrwxrwxrwx");
        assert_eq!(EntryInfo::of(Path::new("/"), &Users::load()).unwrap().name, "/");
    }

    #[test]
    fn a_time_is_written_in_utc() {
        assert_eq!(rfc3339(0, 5_000_000), "1970-01-01T00:00:00.005Z");
    }
}
