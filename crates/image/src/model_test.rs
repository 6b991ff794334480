//! Random sequences of layers against a slow, obvious model of a tree, and damaged archives.

use std::collections::{BTreeMap, BTreeSet};

use aenv_layers::import_raw;
use proptest::prelude::*;

use crate::conversion_test::raw_disk;
use crate::dump::{Source, dump};
use crate::tar::Kind;
use crate::test_image::{DISK, Image, Item, Node, archive, file, folder, item, link};

/// The model: paths of existing files, each with the number of its node.
#[derive(Debug, Default, Clone)]
struct Model {
    paths: BTreeMap<Vec<String>, usize>,
    nodes: Vec<(Kind, u16, Vec<u8>)>,
    fresh: BTreeSet<Vec<String>>,
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

    fn hide(&mut self, folder: &[String], hidden: &str) {
        let Some(at) = self.resolve(folder, false) else {
            return;
        };
        let (path, opaque) = match hidden {
            ".wh..opq" => (at, true),
            hidden => ([&at[..], &[hidden.to_owned()]].concat(), false),
        };
        let mut gone: Vec<Vec<String>> = self.paths.keys().cloned().collect();
        gone.retain(|at| at.starts_with(&path) && !(opaque && *at == path) && !self.fresh.contains(at));
        gone.iter().for_each(|path| self.remove(path));
    }

    /// False where the layer must be refused.
    fn apply(&mut self, Item(entry, data): &Item) -> bool {
        let path = String::from_utf8(entry.path.clone()).unwrap();
        let mut parts: Vec<String> = path.split('/').map(str::to_owned).collect();
        let name = parts.pop().unwrap();
        if let Some(hidden) = name.strip_prefix(".wh.") {
            self.hide(&parts, hidden);
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
            (
                path,
                Node {
                    kind,
                    mode,
                    content,
                    same_as,
                },
            )
        });
        named.collect()
    }
}

fn any_path() -> impl Strategy<Value = String> {
    proptest::collection::vec("[abc]", 1..4).prop_map(|parts| parts.join("/"))
}

fn any_item() -> impl Strategy<Value = Item> {
    let target = prop_oneof![
        any_path(),
        any_path().prop_map(|path| format!("/{path}")),
        Just("../a".to_owned())
    ];
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
        layers in proptest::collection::vec(proptest::collection::vec(any_item(), 0..24), 1..4)
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
    fn damaged_disks_are_refused_or_read_but_never_believed(
        changes in proptest::collection::vec((0..1usize << 20, any::<u8>()), 1..40),
    ) {
        let image = damaged_image(&changes);
        let source = Source {
            layers: image.layers.clone(),
            size_bytes: DISK,
            scratch: image.folder.path().to_owned(),
            max_bytes: 4 * DISK,
        };
        // Errors are fine; panics, endless loops and endless archives are not.
        let _ = dump(&source, std::io::sink());
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

/// A disk whose first part, where all that describes it lies, was changed: inode tables and directories mostly.
fn damaged_image(changes: &[(usize, u8)]) -> Image {
    let mut image = Image::new(DISK);
    let mut items: Vec<Item> = (0..60).map(|n| file(&format!("d/e/{n}"), &vec![1; n * 500])).collect();
    items.push(link(Kind::Symlink, "link", &"t".repeat(100)));
    items.push(link(Kind::HardLink, "hard", "d/e/1"));
    image.apply(&archive(&items)).unwrap();
    let disk = raw_disk(&image, DISK);
    let mut bytes = std::fs::read(&disk).unwrap();
    // Only places that are in use: zeros are most of a disk.
    let used: Vec<usize> = (1024..2 << 20).filter(|&at| bytes[at] != 0 && bytes[at] != 1).collect();
    for (at, value) in changes {
        bytes[used[at % used.len()]] = *value;
    }
    std::fs::write(&disk, bytes).unwrap();
    image.layers = vec![image.folder.path().join("damaged.lsmt")];
    import_raw(&disk, &image.layers[0]).unwrap();
    image
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
