//! From a name in an archive to a directory of the image, as `chroot` would find it.
//!
//! There is no path of the host here at all: symbolic links are followed inside of the image, `..` above the root stays at
//! the root. The last component is never followed.

use super::{Child, Result, Tree};
use crate::ext4::{FileType, ROOT_INO, target};

/// Longest name of a file, ext4's limit.
pub const NAME_BYTES_MAX: usize = 255;
/// Links followed on the way to one file; the kernel's limit is 40, the usual unpackers' 255.
const LINKS_FOLLOWED_MAX: usize = 255;
/// Components on the way to one file, links included.
const STEPS_MAX: usize = 1 << 16;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    #[error("a name has {bytes} bytes; ext4 has room for {NAME_BYTES_MAX}")]
    NameTooLong { bytes: usize },
    #[error("a path has {bytes} bytes; the limit is {limit}", limit = crate::tar::PATH_BYTES_MAX)]
    TooLong { bytes: usize },
    #[error("a name holds a NUL")]
    Nul,
    #[error("too many symbolic links on the way")]
    Loop,
    #[error("the path names the root directory")]
    Root,
}

/// A cleaned path: no empty parts, no `.` and `..`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePath {
    parts: Vec<Vec<u8>>,
}

impl ImagePath {
    /// Cleans by the text alone, as the usual unpackers do: `a/../b` is `b` even where `a` is a link. Errors: `TooLong`,
    /// `NameTooLong`, `Nul`.
    pub fn parse(text: &[u8]) -> Result<ImagePath, PathError> {
        if text.len() > crate::tar::PATH_BYTES_MAX {
            return Err(PathError::TooLong { bytes: text.len() });
        }
        if text.contains(&0) {
            return Err(PathError::Nul);
        }
        let mut parts: Vec<Vec<u8>> = Vec::new();
        for part in text.split(|&byte| byte == b'/') {
            match part {
                b"" | b"." => {}
                b".." => drop(parts.pop()),
                part if part.len() > NAME_BYTES_MAX => return Err(PathError::NameTooLong { bytes: part.len() }),
                part => parts.push(part.to_vec()),
            }
        }
        Ok(ImagePath { parts })
    }

    /// The folder's parts and the last one; none for the root.
    pub fn split(&self) -> Option<(&[Vec<u8>], &[u8])> {
        self.parts.split_last().map(|(last, folder)| (folder, &last[..]))
    }
}

/// What to do with folders on the way that are not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// Make them; what is no folder makes way.
    Create,
    /// Answer none.
    Stop,
}

impl Tree {
    /// The directory that `folder` leads to. With `Create` the folders on the way count as touched by this layer.
    pub(crate) fn resolve(&mut self, folder: &[Vec<u8>], missing: Missing) -> Result<Option<u32>> {
        let mut way: Vec<(u32, Vec<u8>, u32)> = Vec::new();
        // What is still to go, the next part last.
        let mut todo: Vec<Vec<u8>> = folder.iter().rev().cloned().collect();
        let (mut links, mut steps) = (0, 0);
        while let Some(part) = todo.pop() {
            steps += 1;
            if steps > STEPS_MAX {
                return endless(missing);
            }
            if part == b".." {
                way.pop();
                continue;
            }
            let here = way.last().map_or(ROOT_INO, |(_, _, ino)| *ino);
            let found = self.child(here, &part)?;
            match found {
                Some(child) if child.file_type == FileType::Directory => way.push((here, part, child.ino)),
                Some(child) if child.file_type == FileType::Symlink => {
                    links += 1;
                    if links > LINKS_FOLLOWED_MAX {
                        return endless(missing);
                    }
                    let target = self.read_target(child)?;
                    if target.first() == Some(&b'/') {
                        way.clear();
                    }
                    push_target(&target, &mut todo)?;
                }
                _ if missing == Missing::Stop => return Ok(None),
                _ => {
                    let ino = self.make_folder(here, &part, found)?;
                    way.push((here, part, ino));
                }
            }
        }
        let last = way.last().map_or(ROOT_INO, |(_, _, ino)| *ino);
        if missing == Missing::Create {
            for (directory, name, _) in &way {
                self.touch(*directory, name)?;
            }
        }
        Ok(Some(last))
    }

    /// Marks a name as one of this layer.
    pub(super) fn touch(&mut self, directory: u32, name: &[u8]) -> Result<()> {
        if let Some(child) = self.directory(directory)?.children.get_mut(name) {
            child.fresh = true;
        }
        Ok(())
    }

    fn read_target(&mut self, link: Child) -> Result<Vec<u8>> {
        let inode = self.ext2.read_inode(link.ino)?;
        Ok(target(self.ext2.device(), link.ino, &inode)?)
    }

    /// A folder that the archive does not name, in the place of what is no folder.
    fn make_folder(&mut self, directory: u32, name: &[u8], found: Option<Child>) -> Result<u32> {
        if found.is_some() {
            self.remove(directory, name)?;
        }
        let attributes = self.implied_attributes();
        self.make_directory(directory, name, &attributes)
    }
}

/// A loop of links leads nowhere: there is nothing to hide behind it, and nothing can be made there.
fn endless(missing: Missing) -> Result<Option<u32>> {
    match missing {
        Missing::Stop => Ok(None),
        Missing::Create => Err(PathError::Loop.into()),
    }
}

/// Puts a link's target before what is still to go.
fn push_target(target: &[u8], todo: &mut Vec<Vec<u8>>) -> Result<(), PathError> {
    for part in target.rsplit(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            part if part.len() > NAME_BYTES_MAX => return Err(PathError::NameTooLong { bytes: part.len() }),
            part => todo.push(part.to_vec()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    fn parts(text: &[u8]) -> Vec<Vec<u8>> {
        ImagePath::parse(text).unwrap().parts
    }

    #[test]
    fn paths_stay_inside_of_the_root() {
        assert_eq!(parts(b"../../etc/./passwd/"), [b"etc".to_vec(), b"passwd".to_vec()]);
        assert_eq!(parts(b"/a//b/../../../c"), [b"c".to_vec()]);
        assert_eq!(parts(b"./"), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn names_have_limits() {
        assert!(ImagePath::parse(&[b'a'; 255]).is_ok());
        assert_eq!(
            ImagePath::parse(&[b'a'; 256]),
            Err(PathError::NameTooLong { bytes: 256 })
        );
        assert_eq!(ImagePath::parse(b"a\0b"), Err(PathError::Nul));
        assert!(matches!(
            ImagePath::parse(&b"a/".repeat(3000)),
            Err(PathError::TooLong { .. })
        ));
    }
}
