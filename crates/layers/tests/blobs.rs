//! Layers whose bytes are no local file: what an opener gives meaning to, what is shared, what fails and how.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use aenv_layers::{Blob, Error, ErrorKind, FileBlob, Layer, LayerWriter, Opener, Registry, Stack, Uuid};
use support::Memory;

const SECTOR: u64 = 512;
const SIZE: u64 = 64 * SECTOR;

/// Takes a descriptor's text as the name of the file that holds the bytes. Waits until `crowd` opens run at once.
#[derive(Debug)]
struct Descriptors {
    opens: AtomicUsize,
    crowd: Barrier,
}

impl Descriptors {
    fn new(crowd: usize) -> Arc<Self> {
        Arc::new(Descriptors {
            opens: AtomicUsize::new(0),
            crowd: Barrier::new(crowd),
        })
    }
}

impl Opener for Descriptors {
    fn open(&self, path: &Path) -> Result<Arc<dyn Blob>, Error> {
        self.opens.fetch_add(1, Ordering::Relaxed);
        self.crowd.wait();
        let target = std::fs::read_to_string(path).unwrap();
        let bytes = std::fs::read(target).map_err(|source| Error::Remote {
            path: path.to_owned(),
            source: source.into(),
        })?;
        Ok(Arc::new(Memory::new(path.to_str().unwrap(), bytes)))
    }
}

/// A layer whose sectors hold `value`, and its descriptor.
fn described(folder: &Path, value: u8) -> PathBuf {
    let path = folder.join(format!("layer{value}"));
    let mut writer = LayerWriter::create(&path, SIZE, Uuid::NIL).unwrap();
    writer
        .append(u64::from(value) * SECTOR, &[value; SECTOR as usize])
        .unwrap();
    writer.finish().unwrap();
    let descriptor = folder.join(format!("{value}.blob"));
    std::fs::write(&descriptor, path.to_str().unwrap()).unwrap();
    descriptor
}

#[test]
fn a_stack_of_descriptors_is_opened_side_by_side_and_shared() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (1..=8).map(|value| described(folder.path(), value)).collect();
    // Each open waits for the seven others: one after the other would never end.
    let opener = Descriptors::new(8);
    let registry = Registry::with_opener(opener.clone());
    let stack = Stack::open_with(&registry, &paths, None, SIZE).unwrap();
    let again = Stack::open_with(&registry, &paths, None, SIZE).unwrap();
    assert_eq!(
        opener.opens.load(Ordering::Relaxed),
        8,
        "the second stack shares the layers of the first"
    );
    let mut content = vec![0xcc; SIZE as usize];
    for stack in [&stack, &again] {
        stack.read_at(&mut content, 0).unwrap();
        let found: Vec<u8> = content
            .chunks(SECTOR as usize)
            .map(|sector| sector[0])
            .take(10)
            .collect();
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]);
    }
}

/// Gives out blobs that the test made.
#[derive(Debug)]
struct Prepared(std::collections::HashMap<PathBuf, Arc<Memory>>);

impl Opener for Prepared {
    fn open(&self, path: &Path) -> Result<Arc<dyn Blob>, Error> {
        Ok(self.0[path].clone())
    }
}

#[test]
fn a_read_over_several_distant_layers_announces_its_pieces_first() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (1..=3).map(|value| described(folder.path(), value)).collect();
    let blob = |path: &PathBuf| {
        let layer = std::fs::read_to_string(path).unwrap();
        (
            path.clone(),
            Arc::new(Memory::new("blob", std::fs::read(layer).unwrap())),
        )
    };
    let blobs: std::collections::HashMap<_, _> = paths.iter().map(blob).collect();
    let stack = Stack::open_with(
        &Registry::with_opener(Arc::new(Prepared(blobs.clone()))),
        &paths,
        None,
        SIZE,
    )
    .unwrap();
    let announced = |buf: &mut [u8], offset| {
        blobs.values().for_each(|blob| blob.announced.lock().unwrap().clear());
        stack.read_at(buf, offset).unwrap();
        paths
            .iter()
            .map(|path| blobs[path].announced.lock().unwrap().clone())
            .collect::<Vec<_>>()
    };
    let piece = vec![(4096, SECTOR)];
    assert_eq!(
        announced(&mut [0; SIZE as usize], 0),
        [piece.clone(), piece.clone(), piece.clone()]
    );
    assert_eq!(announced(&mut [0; 1024], SECTOR), [piece.clone(), piece, vec![]]);
    assert_eq!(
        announced(&mut [0; 512], SECTOR),
        [vec![], vec![], vec![]],
        "one piece is read at once"
    );
}

#[test]
fn the_number_of_a_removed_descriptor_names_no_other_layer_while_it_is_open() {
    let folder = tempfile::tempdir().unwrap();
    let registry = Registry::with_opener(Descriptors::new(1));
    let first = described(folder.path(), 1);
    let layer = registry.open(&first).unwrap();
    std::fs::remove_file(&first).unwrap();
    // A file system hands a free inode number out again at once, but not one that is open.
    for value in 2..20 {
        let other = registry.open(&described(folder.path(), value)).unwrap();
        assert!(!Arc::ptr_eq(&layer, &other));
        assert_eq!(other.segments()[0].start(), u64::from(value));
    }
}

#[test]
fn what_an_opener_cannot_reach_is_an_io_error_that_keeps_its_cause() {
    let folder = tempfile::tempdir().unwrap();
    let descriptor = folder.path().join("gone.blob");
    std::fs::write(&descriptor, "/nowhere/at/all").unwrap();
    let registry = Registry::with_opener(Descriptors::new(1));
    let error = Stack::open_with(&registry, std::slice::from_ref(&descriptor), None, SIZE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("gone.blob"), "{error}");
    assert!(std::error::Error::source(&error).is_some());
    assert_eq!(
        registry.open(Path::new("/nowhere")).unwrap_err().kind(),
        ErrorKind::NotFound
    );
}

#[test]
fn a_layer_opens_from_any_blob() {
    let folder = tempfile::tempdir().unwrap();
    described(folder.path(), 3);
    let path = folder.path().join("layer3");
    let bytes = std::fs::read(&path).unwrap();
    let blob = FileBlob::open(&path).unwrap();
    assert_eq!(blob.len_bytes(), bytes.len() as u64);
    let mut end = vec![0; 4096];
    blob.read_exact_at(&mut end, blob.len_bytes() - 4096).unwrap();
    assert_eq!(end, bytes[bytes.len() - 4096..]);
    let named = Path::new("a name");
    let layer = Layer::open_blob(named, Arc::new(Memory::new("a name", bytes.clone()))).unwrap();
    assert_eq!((layer.path(), layer.data_bytes()), (named, SECTOR));
    let short = Memory::new("a name", bytes[..bytes.len() - 4096].to_vec());
    assert_eq!(
        Layer::open_blob(named, Arc::new(short)).unwrap_err().kind(),
        ErrorKind::Corrupt
    );
}
