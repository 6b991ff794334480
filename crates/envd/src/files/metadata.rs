//! User metadata of files: extended attributes `user.e2b.<key>`, set by `X-Metadata-<key>` headers.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use http::HeaderMap;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

const HEADER_PREFIX: &str = "x-metadata-";
const XATTR_PREFIX: &str = "user.e2b.";

/// Linux allows 255 bytes for a name, prefix included.
const KEY_BYTES_MAX: usize = 255 - XATTR_PREFIX.len();
/// All of a file's metadata, prefixes included: what an inode's attribute block holds.
const TOTAL_BYTES_MAX: usize = 4096;
/// Longest list of attribute names the kernel gives out.
const NAMES_BYTES_MAX: usize = 64 << 10;
const NAMES_BYTES_USUAL: usize = 1 << 10;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MetadataError {
    #[error("metadata key is empty")]
    KeyEmpty,
    #[error("metadata key '{key}' is longer than {KEY_BYTES_MAX} bytes")]
    KeyLong { key: String },
    #[error("metadata value of '{key}' holds other than printable ASCII characters")]
    ValueText { key: String },
    #[error("metadata is larger than {TOTAL_BYTES_MAX} bytes")]
    TooLarge,
}

pub type Metadata = BTreeMap<String, String>;

/// The metadata that a request's headers name. Of a repeated header the first value counts.
pub fn from_headers(headers: &HeaderMap) -> Result<Metadata, MetadataError> {
    let mut metadata = Metadata::new();
    let mut total = 0;
    for name in headers.keys() {
        let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX) else {
            continue;
        };
        let value = headers.get(name).map(|value| value.as_bytes()).unwrap_or_default();
        if key.is_empty() {
            return Err(MetadataError::KeyEmpty);
        }
        if key.len() > KEY_BYTES_MAX {
            return Err(MetadataError::KeyLong { key: key.into() });
        }
        let printable = value.iter().all(|byte| (0x20..=0x7e).contains(byte));
        let text = std::str::from_utf8(value).ok().filter(|_| printable);
        let text = text.ok_or_else(|| MetadataError::ValueText { key: key.into() })?;
        total += XATTR_PREFIX.len() + key.len() + text.len();
        metadata.insert(key.into(), text.into());
    }
    if total > TOTAL_BYTES_MAX {
        Err(MetadataError::TooLarge)
    } else {
        Ok(metadata)
    }
}

/// Replaces the metadata of an open file. Without any, a file system that has no attributes is fine.
pub fn replace(file: impl AsFd, metadata: &Metadata) -> io::Result<()> {
    let mut names = vec![0u8; NAMES_BYTES_MAX];
    match rustix::fs::flistxattr(&file, &mut names) {
        Ok(length) => {
            for name in names_of(names.get(..length).unwrap_or_default()) {
                if !metadata.contains_key(&name) {
                    rustix::fs::fremovexattr(&file, format!("{XATTR_PREFIX}{name}"))?;
                }
            }
        }
        Err(Errno::NOTSUP) if metadata.is_empty() => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    for (key, value) in metadata {
        rustix::fs::fsetxattr(
            &file,
            format!("{XATTR_PREFIX}{key}"),
            value.as_bytes(),
            XattrFlags::empty(),
        )?;
    }
    Ok(())
}

/// The metadata of a path (of a link's target); empty where it cannot be read.
pub fn read(path: &Path) -> Metadata {
    let Ok(c_path) = CString::new(path.as_os_str().as_bytes()) else {
        return Metadata::new();
    };
    let mut metadata = Metadata::new();
    for name in names_of(&name_list(&c_path)) {
        let mut value = vec![0u8; TOTAL_BYTES_MAX];
        let attribute = format!("{XATTR_PREFIX}{name}");
        if let Ok(length) = rustix::fs::getxattr(c_path.as_c_str(), attribute, &mut value) {
            value.truncate(length);
            metadata.insert(name, String::from_utf8_lossy(&value).into_owned());
        }
    }
    metadata
}

/// The NUL-separated attribute names of a path. Most files have none, so a small buffer is tried first.
fn name_list(path: &std::ffi::CStr) -> Vec<u8> {
    let mut small = [0u8; NAMES_BYTES_USUAL];
    match rustix::fs::listxattr(path, &mut small) {
        Ok(length) => small.get(..length).unwrap_or_default().to_vec(),
        Err(Errno::RANGE) => {
            let mut names = vec![0u8; NAMES_BYTES_MAX];
            let length = rustix::fs::listxattr(path, names.as_mut_slice()).unwrap_or(0);
            names.truncate(length);
            names
        }
        Err(_) => Vec::new(),
    }
}

/// Our names in a NUL-separated list, without the prefix.
fn names_of(list: &[u8]) -> impl Iterator<Item = String> + '_ {
    list.split(|byte| *byte == 0).filter_map(|name| {
        std::str::from_utf8(name)
            .ok()?
            .strip_prefix(XATTR_PREFIX)
            .map(str::to_owned)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn headers(entries: &[(&str, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in entries {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn keys_are_lower_case_and_the_first_value_counts() {
        let found = from_headers(&headers(&[
            ("X-Metadata-Author", b"a"),
            ("x-metadata-author", b"b"),
            ("x", b"c"),
        ]));
        assert_eq!(found.unwrap(), Metadata::from([("author".into(), "a".into())]));
    }

    #[test]
    fn what_no_attribute_can_hold_is_refused() {
        let long_key = format!("x-metadata-{}", "k".repeat(247));
        let long = vec![b'v'; 4096];
        let error = |entries: &[(&str, &[u8])]| from_headers(&headers(entries)).unwrap_err();
        assert!(matches!(error(&[(&long_key, b"v")]), MetadataError::KeyLong { .. }));
        assert!(matches!(
            error(&[("x-metadata-a", b"\xc3\xbc")]),
            MetadataError::ValueText { .. }
        ));
        assert_eq!(error(&[("x-metadata-", b"v")]), MetadataError::KeyEmpty);
        assert_eq!(error(&[("x-metadata-a", &long)]), MetadataError::TooLarge);
    }
}
