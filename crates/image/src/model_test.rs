//! What a whole conversion makes, read back by our own reader and checked by e2fsck: cases by hand, and random sequences of
//! layers against a slow, obvious model of a tree.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::PathBuf;

use proptest::prelude::*;

use crate::apply::{ApplyError, Report, Request, apply_input};
use crate::check::check;
use crate::dump::{Source, dump};
use crate::entries::EntryError;
use crate::ext4::Time;
use crate::input::{Compression, Input};
use crate::tar::{Entry, Kind, Reader, Writer};
use crate::tree::TreeError;

const DISK: u64 = 16 << 20;

/// An image under construction in a folder of its own.
struct Image {
    folder: tempfile::TempDir,
    size: u64,
    layers: Vec<PathBuf>,
}

/// What a dump says of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    kind: Kind,
    mode: u16,
    content: Vec<u8>,
    /// The first path of the same file.
    same_as: String,
}

impl Image {
    fn new(size: u64) -> Image {
        Image {
            folder: tempfile::tempdir().unwrap(),
            size,
            layers: Vec::new(),
        }
    }

    fn request(&self, name: &str) -> Request {
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

    fn apply_as(&self, name: &str, archive: &[u8]) -> Result<Report, ApplyError> {
        let input = Input::start(Box::new(Cursor::new(archive.to_vec())), Compression::None, 1 << 30);
        apply_input(&self.request(name), input, &mut |_| {})
    }

    /// Applies a layer, which must be clean.
    fn apply(&mut self, archive: &[u8]) -> Result<Report, ApplyError> {
        let name = format!("{}.lsmt", self.layers.len());
        let report = self.apply_as(&name, archive)?;
        self.layers.push(self.folder.path().join(name));
        check(self.layers.clone(), None, self.folder.path().to_owned()).unwrap();
        Ok(report)
    }

    fn dump(&self) -> Vec<u8> {
        let mut archive = Vec::new();
        let source = Source {
            layers: self.layers.clone(),
            size_bytes: self.size,
            scratch: self.folder.path().to_owned(),
        };
        dump(&source, &mut archive).unwrap();
        archive
    }

    fn tree(&self) -> BTreeMap<String, Node> {
        let archive = self.dump();
        let mut reader = Reader::new(&archive[..]);
        let mut tree: BTreeMap<String, Node> = BTreeMap::new();
        while let Some(entry) = reader.next_entry().unwrap() {
            let path = String::from_utf8(entry.path.clone()).unwrap().trim_end_matches('/').to_owned();
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
struct Item(Entry, Vec<u8>);

fn item(kind: Kind, path: &str, mode: u16) -> Item {
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

fn file(path: &str, data: &[u8]) -> Item {
    let Item(entry, _) = item(Kind::Regular, path, 0o644);
    let size = data.len() as u64;
    Item(Entry { size, ..entry }, data.to_vec())
}

fn folder(path: &str, mode: u16) -> Item {
    item(Kind::Directory, path, mode)
}

fn link(kind: Kind, path: &str, target: &str) -> Item {
    let Item(entry, data) = item(kind, path, 0o777);
    Item(Entry { link: target.into(), ..entry }, data)
}

fn archive(items: &[Item]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    for Item(entry, data) in items {
        writer.entry(entry).unwrap();
        writer.data(data).unwrap();
    }
    writer.finish().unwrap()
}

fn paths(image: &Image) -> Vec<String> {
    image.tree().into_keys().collect()
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_of_their_own_layer() {
    let mut image = Image::new(DISK);
    image
        .apply(&archive(&[file("a/old", b"1"), file("a/keep", b"1"), file("b/c/old", b"1"), file("d", b"1")]))
        .unwrap();
    let second = [
        file("b/c/new", b"2"),
        item(Kind::Regular, "a/.wh.old", 0),
        item(Kind::Regular, "b/.wh..wh..opq", 0),
        file("d", b"2"),
        item(Kind::Regular, ".wh.d", 0),
        item(Kind::Regular, "nowhere/.wh.x", 0),
        item(Kind::Regular, ".wh.lost+found", 0),
    ];
    let report = image.apply(&archive(&second)).unwrap();
    assert_eq!((report.files, report.whiteouts), (2, 5));
    assert_eq!(paths(&image), ["a", "a/keep", "b", "b/c", "b/c/new", "d"]);
    assert_eq!(image.tree()["d"].content, b"2");
}

#[test]
fn equal_inputs_give_equal_bytes() {
    let image = Image::new(DISK);
    let items: Vec<Item> = (0..500).map(|n| file(&format!("dir/file {n}"), &vec![n as u8; n * 7])).collect();
    for name in ["one", "other"] {
        image.apply_as(name, &archive(&items)).unwrap();
    }
    let read = |name| std::fs::read(image.folder.path().join(name)).unwrap();
    assert!(read("one") == read("other"), "the layers differ");
}

#[test]
fn a_full_disk_says_how_much_is_missing() {
    let mut image = Image::new(DISK);
    let big = vec![1; 10 << 20];
    let items = archive(&[file("one", &big), file("two", &big), file("three", &big)]);
    let Err(ApplyError::DiskFull { missing, .. }) = image.apply(&items) else {
        panic!("30 MiB fitted in 16");
    };
    // 30 MiB were asked for, and somewhat less than 16 were there.
    assert!((14 << 20..=16 << 20).contains(&missing), "{missing}");
    assert_eq!(std::fs::read_dir(image.folder.path()).unwrap().count(), 0);
}

#[test]
fn a_disk_without_inodes_says_so_too() {
    let mut image = Image::new(DISK);
    let items: Vec<Item> = (0..2000).map(|n| file(&format!("{n}"), b"")).collect();
    assert!(matches!(image.apply(&archive(&items)), Err(ApplyError::DiskFull { .. })));
}

#[test]
fn a_wrong_digest_leaves_no_layer() {
    let image = Image::new(DISK);
    let expected = "sha256:0000000000000000000000000000000000000000000000000000000000000000".parse().unwrap();
    for wrong in [
        Request { expect_diff_id: Some(expected), ..image.request("x") },
        Request { expect_blob: Some(expected), ..image.request("x") },
    ] {
        let input = Input::start(Box::new(Cursor::new(archive(&[file("a", b"1")]))), Compression::None, 1 << 20);
        let error = apply_input(&wrong, input, &mut |_| {}).unwrap_err();
        assert!(matches!(error, ApplyError::DiffId { .. } | ApplyError::Blob { .. }));
    }
    assert_eq!(std::fs::read_dir(image.folder.path()).unwrap().count(), 0);
}

#[test]
fn a_large_directory_gets_an_index_and_loses_it_again() {
    let mut image = Image::new(64 << 20);
    let name = |n: usize| format!("many/a name that takes some room in its block {n}");
    let items: Vec<Item> = (0..3000).map(|n| link(Kind::Symlink, &name(n), "t")).collect();
    image.apply(&archive(&items)).unwrap();
    assert_eq!(paths(&image).len(), 3001);
    image.apply(&archive(&[link(Kind::HardLink, "last", &name(2999))])).unwrap();
    assert_eq!(paths(&image).len(), 3002);
    let gone: Vec<Item> = (0..2990).map(|n| file(&name(n).replace("many/", "many/.wh."), b"")).collect();
    image.apply(&archive(&gone)).unwrap();
    assert_eq!(paths(&image).len(), 12);
}

#[test]
fn a_file_in_many_pieces_keeps_its_content() {
    let mut image = Image::new(DISK);
    // Every second block is freed, so that the large file must take the holes.
    let small: Vec<Item> = (0..800).map(|n| file(&format!("small/{n}"), &[7; 10_000])).collect();
    image.apply(&archive(&small)).unwrap();
    let gone: Vec<Item> = (0..800).step_by(2).map(|n| file(&format!("small/.wh.{n}"), b"")).collect();
    image.apply(&archive(&gone)).unwrap();
    let large: Vec<u8> = (0..9_000_001u32).map(|n| (n % 251) as u8).collect();
    image.apply(&archive(&[file("large", &large)])).unwrap();
    assert!(image.tree()["large"].content == large, "the content differs");
    image.apply(&archive(&[folder("large", 0o755)])).unwrap();
    assert_eq!(image.tree()["large"].kind, Kind::Directory);
}

#[test]
fn hostile_entries_are_refused_by_name() {
    let mut image = Image::new(DISK);
    image.apply(&archive(&[folder("d", 0o755), link(Kind::Symlink, "loop", "loop"), file("f", b"")])).unwrap();
    let cases: [(Item, fn(&TreeError) -> bool); 5] = [
        (link(Kind::HardLink, "x", "d"), |e| matches!(e, TreeError::LinkToDirectory)),
        (link(Kind::HardLink, "x", "../../etc/none"), |e| matches!(e, TreeError::LinkTargetMissing)),
        (file("loop/x", b""), |e| matches!(e, TreeError::Path(_))),
        (file("lost+found", b""), |e| matches!(e, TreeError::RescueFolder)),
        (link(Kind::Symlink, "x", ""), |e| matches!(e, TreeError::TargetLength { .. })),
    ];
    for (hostile, expected) in cases {
        let error = image.apply(&archive(std::slice::from_ref(&hostile))).unwrap_err();
        let ApplyError::Entry(EntryError::Apply { source, .. }) = &error else {
            panic!("{hostile:?}: {error}");
        };
        assert!(expected(source), "{hostile:?}: {source}");
    }
    assert_eq!(image.layers.len(), 1);
}

/// The model: paths of existing files, each with the number of its node.
#[derive(Debug, Default, Clone)]
struct Model {
    paths: BTreeMap<Vec<String>, usize>,
    nodes: Vec<(Kind, u16, Vec<u8>)>,
    fresh: std::collections::BTreeSet<Vec<String>>,
}

impl Model {
    fn kind(&self, path: &[String]) -> Option<Kind> {
        match path {
            [] => Some(Kind::Directory),
            path => self.paths.get(path).map(|&node| self.nodes[node].0),
        }
    }

    fn remove(&mut self, path: &[String]) {
        self.paths.retain(|at, _| !at.starts_with(path));
        self.fresh.retain(|at| !at.starts_with(path));
    }

    fn add(&mut self, path: Vec<String>, kind: Kind, mode: u16, content: &[u8]) {
        self.nodes.push((kind, mode, content.to_vec()));
        self.fresh.insert(path.clone());
        self.paths.insert(path, self.nodes.len() - 1);
    }

    /// Follows links; none for a loop, and where something is missing that may not be made.
    fn resolve(&mut self, parts: &[String], make: bool) -> Option<Vec<String>> {
        let mut at: Vec<String> = Vec::new();
        let mut todo: Vec<String> = parts.iter().rev().cloned().collect();
        for _ in 0..10_000 {
            let Some(part) = todo.pop() else {
                for end in 1..=at.len() {
                    if make {
                        self.fresh.insert(at[..end].to_vec());
                    }
                }
                return Some(at);
            };
            if part == ".." {
                at.pop();
                continue;
            }
            let next = [&at[..], &[part]].concat();
            match self.kind(&next) {
                Some(Kind::Directory) => at = next,
                Some(Kind::Symlink) => {
                    let target = String::from_utf8(self.nodes[self.paths[&next]].2.clone()).unwrap();
                    if target.starts_with('/') {
                        at.clear();
                    }
                    todo.extend(target.rsplit('/').filter(|part| !part.is_empty()).map(str::to_owned));
                }
                _ if !make => return None,
                _ => {
                    self.remove(&next);
                    self.add(next.clone(), Kind::Directory, 0o755, b"");
                    at = next;
                }
            }
        }
        None
    }

    /// False where the layer must be refused.
    fn apply(&mut self, Item(entry, data): &Item) -> bool {
        let path = String::from_utf8(entry.path.clone()).unwrap();
        let mut parts: Vec<String> = path.split('/').map(str::to_owned).collect();
        let name = parts.pop().unwrap();
        if let Some(hidden) = name.strip_prefix(".wh.") {
            if let Some(at) = self.resolve(&parts, false) {
                let (path, opaque) = match hidden {
                    ".wh..opq" => (at, true),
                    hidden => ([&at[..], &[hidden.to_owned()]].concat(), false),
                };
                let gone: Vec<Vec<String>> = self
                    .paths
                    .keys()
                    .filter(|at| at.starts_with(&path) && !(opaque && **at == path) && !self.fresh.contains(*at))
                    .cloned()
                    .collect();
                gone.iter().for_each(|path| self.remove(path));
            }
            return true;
        }
        let Some(at) = self.resolve(&parts, true) else {
            return false;
        };
        let at = [&at[..], &[name]].concat();
        match entry.kind {
            Kind::Directory if self.kind(&at) == Some(Kind::Directory) => {
                let node = self.paths[&at];
                self.nodes[node].1 = entry.mode;
                self.fresh.insert(at);
            }
            Kind::HardLink => {
                let link = String::from_utf8(entry.link.clone()).unwrap();
                let mut parts: Vec<String> = link.split('/').map(str::to_owned).collect();
                let last = parts.pop().unwrap();
                let Some(target) = self.resolve(&parts, false) else {
                    return false;
                };
                let target = [&target[..], &[last]].concat();
                match self.kind(&target) {
                    None | Some(Kind::Directory) => return false,
                    _ => {}
                }
                let node = self.paths[&target];
                if target != at {
                    self.remove(&at);
                }
                self.paths.insert(at.clone(), node);
                self.fresh.insert(at);
            }
            kind => {
                self.remove(&at);
                let content = if kind == Kind::Symlink { &entry.link } else { data };
                self.add(at, kind, entry.mode, content);
            }
        }
        true
    }

    fn tree(&self) -> BTreeMap<String, Node> {
        let mut first: BTreeMap<usize, String> = BTreeMap::new();
        // In the order of a dump: parents before children, names in byte order.
        let named = self.paths.iter().map(|(path, &node)| {
            let path = path.join("/");
            let (kind, mode, content) = self.nodes[node].clone();
            let same_as = first.entry(node).or_insert_with(|| path.clone()).clone();
            (path, Node { kind, mode, content, same_as })
        });
        named.collect()
    }
}

fn any_path() -> impl Strategy<Value = String> {
    proptest::collection::vec("[abc]", 1..4).prop_map(|parts| parts.join("/"))
}

fn any_item() -> impl Strategy<Value = Item> {
    let target = prop_oneof![any_path(), any_path().prop_map(|path| format!("/{path}")), Just("../a".to_owned())];
    prop_oneof![
        4 => (any_path(), proptest::collection::vec(any::<u8>(), 0..9000)).prop_map(|(path, data)| file(&path, &data)),
        3 => (any_path(), 0..8u16).prop_map(|(path, mode)| folder(&path, 0o700 + mode)),
        2 => (any_path(), target).prop_map(|(path, target)| link(Kind::Symlink, &path, &target)),
        1 => (any_path(), any_path()).prop_map(|(path, target)| link(Kind::HardLink, &path, &target)),
        1 => any_path().prop_map(|path| item(Kind::Fifo, &path, 0o600)),
        2 => any_path().prop_map(|path| {
            let (folder, name) = path.rsplit_once('/').map_or(("", &path[..]), |(folder, name)| (folder, name));
            file(format!("{folder}/.wh.{name}").trim_start_matches('/'), b"")
        }),
        1 => any_path().prop_map(|path| file(&format!("{path}/.wh..wh..opq"), b"")),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn random_layers_give_the_tree_of_the_model(
        layers in proptest::collection::vec(proptest::collection::vec(any_item(), 0..12), 1..4)
    ) {
        let mut image = Image::new(DISK);
        let mut model = Model::default();
        for mut items in layers {
            // What must be refused alone would refuse the whole layer: it is left out, after a try on a copy.
            model.fresh.clear();
            items.retain(|item| {
                let mut next = model.clone();
                let accepted = next.apply(item);
                if accepted {
                    model = next;
                }
                accepted
            });
            image.apply(&archive(&items)).map_err(|error| TestCaseError::fail(format!("{error:?}")))?;
            prop_assert_eq!(image.tree(), model.tree());
        }
    }

    #[test]
    fn damaged_archives_never_give_an_unclean_disk(
        items in proptest::collection::vec(any_item(), 1..12),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..8),
    ) {
        let mut bytes = archive(&items);
        for (at, value, repair) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
            if repair {
                repair_checksum(&mut bytes, at / 512 * 512);
            }
        }
        let mut image = Image::new(DISK);
        // Checks the disk where it was accepted; errors are fine, panics are not.
        let _ = image.apply(&bytes);
    }
}

/// Lets a damaged header pass the first test.
fn repair_checksum(bytes: &mut [u8], at: usize) {
    let Some(record) = bytes.get_mut(at..at + 512) else {
        return;
    };
    record[148..156].fill(b' ');
    let sum: u32 = record.iter().map(|&byte| u32::from(byte)).sum();
    record[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
}
