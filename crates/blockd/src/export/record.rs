//! What is kept on disk of an export: one small JSON file each, replaced atomically before an answer is given.
//!
//! Owns the file format and the inode counter. The next blockd reads these and serves the same inodes, so nothing that
//! a VMM could notice may live anywhere else.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aenv_wire::block::{ExportInfo, ExportKind, SealDiskOk};
use serde::{Deserialize, Serialize};

use crate::files::{remove_if_there, write_atomically};

/// Inode numbers are handed out in blocks: the counter's file is written once per block, and a crash skips the rest.
const INODE_BLOCK: u64 = 1024;
const FIRST_INODE: u64 = 1024;

/// One export. `sealing` is set from before the upper is touched until the swap is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub name: String,
    pub kind: ExportKind,
    pub inode: u64,
    pub size_bytes: u64,
    pub layers: Vec<String>,
    pub upper: Option<String>,
    pub abandoned: bool,
    pub sealing: Option<Sealing>,
    pub last_seal: Option<LastSeal>,
}

/// A seal that was begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealing {
    pub new_upper: Option<String>,
}

/// The last seal and what was answered: a client that lost the answer asks again and gets the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastSeal {
    pub new_upper: Option<String>,
    pub answer: SealDiskOk,
}

impl Record {
    pub fn info(&self) -> ExportInfo {
        ExportInfo {
            name: self.name.clone(),
            kind: self.kind,
            inode: self.inode,
            size_bytes: self.size_bytes,
            layers: self.layers.clone(),
            upper: self.upper.clone(),
            abandoned: self.abandoned,
            failure: None,
        }
    }
}

/// The folder of records.
#[derive(Debug)]
pub struct Records {
    folder: PathBuf,
    counter: PathBuf,
}

impl Records {
    pub fn open(state_dir: &Path) -> io::Result<Records> {
        let folder = state_dir.join("exports");
        fs::create_dir_all(&folder)?;
        Ok(Records {
            folder,
            counter: state_dir.join("next_inode"),
        })
    }

    pub fn write(&self, record: &Record) -> io::Result<()> {
        let json = serde_json::to_vec(record).map_err(io::Error::other)?;
        write_atomically(&self.path(&record.name), &json)
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        remove_if_there(&self.path(name))
    }

    /// Every readable record. One that is damaged (a power loss can do that) is set aside under another name and
    /// reported: it must not keep the daemon, and so every other guest, from coming back.
    pub fn load(&self) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match serde_json::from_slice::<Record>(&fs::read(&path)?) {
                Ok(record) => records.push(record),
                Err(error) => {
                    say!(
                        "aenv-blockd: record {} is damaged and set aside: {error}",
                        path.display()
                    );
                    fs::rename(&path, path.with_extension("broken"))?;
                }
            }
        }
        Ok(records)
    }

    /// A number above every one that was ever handed out.
    pub fn reserve_inodes(&self) -> io::Result<std::ops::Range<u64>> {
        let next = match fs::read_to_string(&self.counter) {
            Ok(text) => text.trim().parse().map_err(io::Error::other)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => FIRST_INODE,
            Err(error) => return Err(error),
        };
        let above = next + INODE_BLOCK;
        write_atomically(&self.counter, above.to_string().as_bytes())?;
        Ok(next..above)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.json"))
    }
}

#[cfg(test)]
pub fn example(name: &str, kind: ExportKind) -> Record {
    Record {
        name: name.to_owned(),
        kind,
        inode: 2000,
        size_bytes: 1 << 20,
        layers: vec!["/l/a".to_owned()],
        upper: None,
        abandoned: false,
        sealing: None,
        last_seal: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_again_and_damaged_ones_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::open(folder.path()).unwrap();
        let record = example("m.1", ExportKind::Memory);
        records.write(&record).unwrap();
        fs::write(folder.path().join("exports/bad.json"), b"{").unwrap();
        assert_eq!(records.load().unwrap(), [record]);
        assert!(folder.path().join("exports/bad.broken").exists());
        records.remove("m.1").unwrap();
        records.remove("m.1").unwrap();
        assert!(records.load().unwrap().is_empty());
    }

    #[test]
    fn inode_numbers_never_come_twice_over_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let first = Records::open(folder.path()).unwrap().reserve_inodes().unwrap();
        let second = Records::open(folder.path()).unwrap().reserve_inodes().unwrap();
        assert_eq!(first.end, second.start);
        assert!(first.start >= FIRST_INODE && !second.is_empty());
    }
}
