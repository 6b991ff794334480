//! Removes files and whole directories, and hides what lower layers made (whiteouts).

use super::{Child, RESCUE_FOLDER, Result, Tree};
use crate::ext4::{FileType, Inode, ROOT_INO};

impl Tree {
    /// Removes a name, and all below it. A name that is not there is no error.
    pub fn remove(&mut self, directory: u32, name: &[u8]) -> Result<()> {
        let found = self.directory(directory)?;
        let Some(child) = found.children.remove(name) else {
            return Ok(());
        };
        found.changed = true;
        // A list instead of recursion: an archive may nest as deep as it likes.
        let mut todo = vec![child];
        while let Some(child) = todo.pop() {
            if child.file_type == FileType::Directory {
                self.directory(child.ino)?;
                if let Some(gone) = self.directories.remove(&child.ino) {
                    todo.extend(gone.children.values());
                }
            }
            self.drop_link(child)?;
        }
        Ok(())
    }

    /// A whiteout: removes what lower layers made at `name` and below. What this layer made there stays.
    pub fn hide(&mut self, directory: u32, name: &[u8]) -> Result<()> {
        match self.child(directory, name)? {
            None => Ok(()),
            Some(_) if directory == ROOT_INO && name == RESCUE_FOLDER => Ok(()),
            Some(child) if !child.fresh => self.remove(directory, name),
            Some(child) if child.file_type == FileType::Directory => self.hide_children(child.ino),
            Some(_) => Ok(()),
        }
    }

    /// An opaque whiteout: hides all that lower layers made in the directory.
    pub fn hide_children(&mut self, directory: u32) -> Result<()> {
        let mut todo = vec![directory];
        while let Some(ino) = todo.pop() {
            let children = self.directory(ino)?.children.iter();
            let children: Vec<(Box<[u8]>, Child)> = children.map(|(name, child)| (name.clone(), *child)).collect();
            for (name, child) in children {
                match child.fresh {
                    false if ino == ROOT_INO && *name == *RESCUE_FOLDER => {}
                    false => self.remove(ino, &name)?,
                    true if child.file_type == FileType::Directory => todo.push(child.ino),
                    true => {}
                }
            }
        }
        Ok(())
    }

    fn drop_link(&mut self, child: Child) -> Result<()> {
        let mut inode = self.ext2.read_inode(child.ino)?;
        let is_dir = child.file_type == FileType::Directory;
        if !is_dir && inode.links() > 1 {
            inode.set_links(inode.links() - 1);
            return Ok(self.ext2.write_inode(child.ino, &inode)?);
        }
        if has_blocks(&inode) {
            self.ext2.free_content(child.ino, &mut inode)?;
        }
        self.ext2.free_attributes(child.ino, &mut inode)?;
        Ok(self.ext2.free_inode(child.ino, is_dir, self.epoch_s)?)
    }
}

fn has_blocks(inode: &Inode) -> bool {
    inode.has_extents() && inode.sectors() > 0
}
