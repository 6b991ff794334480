//! For tests: an image in a folder of its own, archives from short descriptions, and the tree as a dump tells it.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::PathBuf;

use crate::apply::{ApplyError, Report, Request, apply_input};
use crate::check::check;
use crate::dump::{Source, dump};
use crate::ext4::Time;
use crate::input::{Compression, Input};
use crate::tar::{Entry, Kind, Reader, Writer};

/// Small: without a journal, and made in a moment.
pub const DISK: u64 = 16 << 20;

/// An image under construction in a folder of its own.
pub struct Image {
    pub folder: tempfile::TempDir,
    size: u64,
    pub layers: Vec<PathBuf>,
}

/// What a dump says of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub kind: Kind,
    pub mode: u16,
    pub content: Vec<u8>,
    /// The first path of the same file.
    pub same_as: String,
}

impl Image {
    pub fn new(size: u64) -> Image {
        Image {
            folder: tempfile::tempdir().unwrap(),
            size,
            layers: Vec::new(),
        }
    }

    pub fn request(&self, name: &str) -> Request {
        Request {
            size_bytes: self.size,
            parents: self.layers.clone(),
            tar: None,
            compression: Compression::None,
            expect_diff_id: None,
            expect_blob: None,
            out: self.folder.path().join(name),
            uuid: None,
            epoch_s: 1000,
            max_bytes: 1 << 30,
        }
    }

    pub fn apply_as(&self, name: &str, archive: &[u8]) -> Result<Report, ApplyError> {
        let input = Input::start(Box::new(Cursor::new(archive.to_vec())), Compression::None, 1 << 30);
        apply_input(&self.request(name), input, &mut |_| {})
    }

    /// Applies a layer, which must be clean.
    pub fn apply(&mut self, archive: &[u8]) -> Result<Report, ApplyError> {
        let name = format!("{}.lsmt", self.layers.len());
        let report = self.apply_as(&name, archive)?;
        self.layers.push(self.folder.path().join(name));
        check(self.layers.clone(), None, self.folder.path().to_owned()).unwrap();
        Ok(report)
    }

    pub fn dump(&self) -> Vec<u8> {
        let mut archive = Vec::new();
        let source = Source {
            layers: self.layers.clone(),
            size_bytes: self.size,
            scratch: self.folder.path().to_owned(),
            max_bytes: 1 << 30,
        };
        dump(&source, &mut archive).unwrap();
        archive
    }

    pub fn tree(&self) -> BTreeMap<String, Node> {
        let archive = self.dump();
        let mut reader = Reader::new(&archive[..]);
        let mut tree: BTreeMap<String, Node> = BTreeMap::new();
        while let Some(entry) = reader.next_entry().unwrap() {
            let path = String::from_utf8(entry.path.clone())
                .unwrap()
                .trim_end_matches('/')
                .to_owned();
            let node = match entry.kind {
                Kind::HardLink => tree[std::str::from_utf8(&entry.link).unwrap()].clone(),
                _ => Node {
                    kind: entry.kind,
                    mode: entry.mode,
                    content: content(&mut reader, &entry),
                    same_as: path.clone(),
                },
            };
            tree.insert(path, node);
        }
        tree.remove(".");
        tree
    }
}

fn content(reader: &mut Reader<&[u8]>, entry: &Entry) -> Vec<u8> {
    if entry.kind == Kind::Symlink {
        return entry.link.clone();
    }
    let mut content = vec![0; usize::try_from(entry.size).unwrap()];
    reader.read_data(&mut content).unwrap();
    content
}

/// An entry of an archive, with the data of a file.
#[derive(Debug, Clone)]
pub struct Item(pub Entry, pub Vec<u8>);

pub fn item(kind: Kind, path: &str, mode: u16) -> Item {
    let entry = Entry {
        kind,
        path: path.into(),
        link: Vec::new(),
        mode,
        uid: 0,
        gid: 0,
        mtime: Time::default(),
        atime: None,
        size: 0,
        pieces: None,
        major: 0,
        minor: 0,
        attributes: BTreeMap::new(),
    };
    Item(entry, Vec::new())
}

pub fn file(path: &str, data: &[u8]) -> Item {
    let Item(entry, _) = item(Kind::Regular, path, 0o644);
    let size = data.len() as u64;
    Item(Entry { size, ..entry }, data.to_vec())
}

pub fn folder(path: &str, mode: u16) -> Item {
    item(Kind::Directory, path, mode)
}

pub fn link(kind: Kind, path: &str, target: &str) -> Item {
    let Item(entry, data) = item(kind, path, 0o777);
    Item(
        Entry {
            link: target.into(),
            ..entry
        },
        data,
    )
}

pub fn archive(items: &[Item]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    for Item(entry, data) in items {
        writer.entry(entry).unwrap();
        writer.data(data).unwrap();
    }
    writer.finish().unwrap()
}
