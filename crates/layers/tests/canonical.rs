//! The canonical form of a layer that was sealed in place: byte for byte what a writer makes.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use aenv_layers::{
    Blob, Canonical, CanonicalReader, Error, Layer, LayerWriter, MAX_SEGMENT_SECTORS, Stack, Upper, Uuid, compact,
    digest,
};
use proptest::prelude::*;

const SECTOR: u64 = 512;
const PARENT: Uuid = Uuid::from_bytes([7; 16]);

fn canonical_bytes(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut reader = CanonicalReader::new(&Layer::open(path).unwrap());
    assert_eq!(reader.read_to_end(&mut bytes).unwrap() as u64, reader.len());
    bytes
}

/// What each sector of an image is: untouched, zero, or data of one value.
type Image = Vec<Option<u8>>;

/// The layer of an image as a writer makes it, sector by sector.
fn written(path: &Path, image: &Image, uuid: Uuid) -> Vec<u8> {
    let mut writer = LayerWriter::create(path, image.len() as u64 * SECTOR, PARENT).unwrap();
    writer.set_uuid(uuid);
    for (sector, content) in image.iter().enumerate() {
        let offset = sector as u64 * SECTOR;
        match content {
            Some(0) => writer.append_zero(offset, SECTOR).unwrap(),
            Some(value) => writer.append(offset, &[*value; SECTOR as usize]).unwrap(),
            None => {}
        }
    }
    writer.finish().unwrap();
    std::fs::read(path).unwrap()
}

#[test]
fn a_long_run_and_zeros_are_packed_as_a_writer_packs_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("upper");
    let sectors = 2 * MAX_SEGMENT_SECTORS + 100;
    let mut image: Image = vec![None; sectors as usize + 64];
    let upper = Upper::create(&path, image.len() as u64 * SECTOR, PARENT).unwrap();
    upper
        .write_at(&vec![3; (sectors * SECTOR) as usize], 8 * SECTOR)
        .unwrap();
    image[8..8 + sectors as usize].fill(Some(3));
    upper.discard(0, 4 * SECTOR).unwrap();
    image[..4].fill(Some(0));
    upper.discard(1000 * SECTOR, SECTOR).unwrap();
    image[1000] = Some(0);
    let uuid = upper.uuid();
    upper.seal().unwrap();
    let expected = written(&folder.path().join("straight"), &image, uuid);
    assert!(canonical_bytes(&path) == expected);
    let layer = Layer::open(&path).unwrap();
    assert!(layer.is_sparse());
    let into = folder.path().join("dense");
    let report = compact(&layer, &into).unwrap();
    assert_eq!(report.data_bytes, (sectors - 1) * SECTOR);
    assert!(!report.layer.is_sparse());
    assert!(std::fs::read(&into).unwrap() == expected);
    assert!(
        canonical_bytes(&into) == expected,
        "a dense layer is its own canonical form"
    );
    assert!(matches!(compact(&layer, &into), Err(Error::Exists { .. })));
    let (sparse, dense) = (digest(&path).unwrap(), digest(&into).unwrap());
    assert_eq!(
        (&sparse.digest, sparse.size_bytes),
        (&dense.digest, expected.len() as u64)
    );
    assert_eq!((sparse.sparse, dense.sparse), (true, false));
}

#[test]
fn the_digest_is_the_sha256_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let uuid = Uuid::from_bytes([0x11; 16]);
    written(&path, &vec![Some(1), None, Some(0), Some(2)], uuid);
    let output = std::process::Command::new("sha256sum").arg(&path).output().unwrap();
    let expected = String::from_utf8(output.stdout).unwrap();
    assert_eq!(digest(&path).unwrap().digest, expected.split(' ').next().unwrap());
}

#[test]
fn an_upper_that_nobody_wrote_to_has_a_canonical_form_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("upper");
    let upper = Upper::create(&path, 1 << 20, Uuid::NIL).unwrap();
    upper.seal().unwrap();
    let bytes = canonical_bytes(&path);
    assert_eq!(bytes.len(), 8192);
    std::fs::write(folder.path().join("copy"), &bytes).unwrap();
    assert_eq!(Layer::open(&folder.path().join("copy")).unwrap().segments().len(), 0);
}

proptest! {
    #[test]
    fn whatever_its_history_a_sealed_upper_has_the_bytes_of_a_straight_write(
        changes in prop::collection::vec((0u64..200, 1u64..40, 0u8..5), 0..40),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut image: Image = vec![None; 240];
        let path = folder.path().join("upper");
        let upper = Upper::create(&path, 240 * SECTOR, PARENT).unwrap();
        for (start, length, value) in changes {
            match value {
                0 => upper.discard(start * SECTOR, length * SECTOR).unwrap(),
                _ => upper.write_at(&vec![value; (length * SECTOR) as usize], start * SECTOR).unwrap(),
            }
            image[start as usize..(start + length) as usize].fill(Some(value));
        }
        let uuid = upper.uuid();
        upper.seal().unwrap();
        prop_assert!(canonical_bytes(&path) == written(&folder.path().join("straight"), &image, uuid));
    }

    #[test]
    fn any_range_of_the_form_is_the_range_of_the_stream(ranges in prop::collection::vec((0u64..60_000, 0u64..20_000), 20)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("upper");
        let upper = Upper::create(&path, 1 << 20, PARENT).unwrap();
        for number in 0..40u8 {
            upper.write_at(&[number + 1; 3 * SECTOR as usize], u64::from(number) * 16 * SECTOR).unwrap();
        }
        upper.seal().unwrap();
        let bytes = canonical_bytes(&path);
        let canonical = Canonical::new(&Layer::open(&path).unwrap());
        for (start, length) in ranges {
            let (start, end) = (start as usize, (start + length) as usize);
            let mut part = vec![0xcc; length as usize];
            match bytes.get(start..end) {
                Some(expected) => {
                    canonical.read_exact_at(&mut part, start as u64).unwrap();
                    prop_assert!(part == expected);
                    let mut reader = canonical.reader();
                    reader.seek(SeekFrom::Start(start as u64)).unwrap();
                    reader.read_exact(&mut part).unwrap();
                    prop_assert!(part == expected);
                }
                None => prop_assert!(canonical.read_exact_at(&mut part, start as u64).is_err() || length == 0),
            }
        }
    }
}

#[test]
fn a_stack_over_the_dense_form_reads_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let (path, into) = (folder.path().join("upper"), folder.path().join("dense"));
    let upper = Upper::create(&path, 1 << 20, Uuid::NIL).unwrap();
    for number in 0..100u64 {
        upper
            .write_at(&[number as u8; 512], (number * 37 % 2000) * SECTOR)
            .unwrap();
    }
    upper.seal().unwrap();
    compact(&Layer::open(&path).unwrap(), &into).unwrap();
    let content = |path: &Path| {
        let mut bytes = vec![0; 1 << 20];
        Stack::open(&[path.to_owned()], None, 1 << 20)
            .unwrap()
            .read_at(&mut bytes, 0)
            .unwrap();
        bytes
    };
    assert!(content(&path) == content(&into));
}
