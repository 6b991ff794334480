//! The files of spec/layers/ as a whole: layers and their envelopes, for the tools of upstream to read. This test makes
//! them again and compares; after a wanted change of the format,
//! `cargo test -p aenv-layers --test golden_files -- --ignored` writes them, and upstream's verdict is due again.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use aenv_layers::zfile::compress;
use aenv_layers::{
    Algorithm, CanonicalReader, Layer, LayerWriter, Stack, TarFrame, Upper, Uuid, ZFileOptions, compact, merge,
};
use sha2::{Digest, Sha256};

const SECTOR: u64 = 512;
const SIZE: u64 = 1 << 20;
const BASE: Uuid = Uuid::from_bytes([
    0xba, 0x5e, 0x00, 0x00, 0x00, 0x00, 0x40, 0x00, 0x80, 0x00, 0, 0, 0, 0, 0, 1,
]);
const TOP: Uuid = Uuid::from_bytes([
    0x70, 0xb0, 0x00, 0x00, 0x00, 0x00, 0x40, 0x00, 0x80, 0x00, 0, 0, 0, 0, 0, 2,
]);

fn spec() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../spec/layers")
}

/// All files, made in `folder`.
fn make(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let base = base_layer(folder);
    let top = top_layer(folder);
    merge(&[base.clone(), top.clone()], &folder.join("merged.lsmt")).unwrap();
    let (sparse, dense) = (folder.join("sparse.lsmt"), folder.join("dense.lsmt"));
    sealed_upper(&sparse);
    compact(&Layer::open(&sparse).unwrap(), &dense).unwrap();
    let mut raw = vec![0; SIZE as usize];
    Stack::open(&[base.clone(), top], None, SIZE)
        .unwrap()
        .read_at(&mut raw, 0)
        .unwrap();
    let mut files = BTreeMap::new();
    for name in ["base.lsmt", "top.lsmt", "merged.lsmt", "sparse.lsmt", "dense.lsmt"] {
        files.insert(name.to_owned(), std::fs::read(folder.join(name)).unwrap());
    }
    for (name, algorithm, block_bytes, checksum) in [
        ("base-lz4-4k", Algorithm::Lz4, 4 << 10, true),
        ("base-lz4-16k", Algorithm::Lz4, 16 << 10, true),
        ("base-lz4-32k", Algorithm::Lz4, 32 << 10, true),
        ("base-lz4-unchecked", Algorithm::Lz4, 4 << 10, false),
        ("base-zstd-4k", Algorithm::Zstd, 4 << 10, true),
        ("base-zstd-32k", Algorithm::Zstd, 32 << 10, true),
    ] {
        let options = ZFileOptions {
            algorithm,
            level: 3,
            block_bytes,
            checksum,
        };
        let mut stored = Vec::new();
        compress(CanonicalReader::new(&Layer::open(&base).unwrap()), &mut stored, options).unwrap();
        files.insert(format!("{name}.zfile"), stored);
    }
    files.insert("base.tar".to_owned(), in_tar(&files["base.lsmt"]));
    files.insert("base-lz4-4k.tar".to_owned(), in_tar(&files["base-lz4-4k.zfile"]));
    files.insert("SHA256SUMS".to_owned(), sums(&files, &raw).into_bytes());
    files
}

/// Runs of text and of noise, one longer than a segment's alignment, and a zero run.
fn base_layer(folder: &Path) -> PathBuf {
    let path = folder.join("base.lsmt");
    let mut writer = LayerWriter::create(&path, SIZE, Uuid::NIL).unwrap();
    writer.set_uuid(BASE);
    writer.append(0, &support::mixed(20_480, 1)).unwrap();
    writer.append(64 * SECTOR, &[0x61; 3 * SECTOR as usize]).unwrap();
    writer.append_zero(100 * SECTOR, 8 * SECTOR).unwrap();
    writer.append(128 * SECTOR, &support::mixed(65_536, 2)).unwrap();
    writer.append(SIZE - SECTOR, &[0x7a; SECTOR as usize]).unwrap();
    writer.finish().unwrap();
    path
}

/// Over the base: covers parts of its runs, and one with zeros.
fn top_layer(folder: &Path) -> PathBuf {
    let path = folder.join("top.lsmt");
    let mut writer = LayerWriter::create(&path, SIZE, BASE).unwrap();
    writer.set_uuid(TOP);
    writer.append(8 * SECTOR, &support::mixed(4096, 3)).unwrap();
    writer.append_zero(130 * SECTOR, 6 * SECTOR).unwrap();
    writer.append(200 * SECTOR, &support::mixed(8192, 4)).unwrap();
    writer.finish().unwrap();
    path
}

/// The upper of upper.hex, sealed in place: the identity of a new one would be random.
fn sealed_upper(path: &Path) {
    std::fs::write(path, support::vector(&spec().join("upper.hex"))).unwrap();
    std::fs::write(
        aenv_layers::map_path(path),
        support::vector(&spec().join("upper.map.hex")),
    )
    .unwrap();
    Upper::open(path).unwrap().seal().unwrap();
}

fn in_tar(content: &[u8]) -> Vec<u8> {
    let TarFrame { head, tail } = TarFrame::new(content.len() as u64);
    [&head, content, &tail].concat()
}

/// As `sha256sum` prints them, and, as a comment, that of the image that base and top make.
fn sums(files: &BTreeMap<String, Vec<u8>>, raw: &[u8]) -> String {
    let sum = |bytes: &[u8]| -> String { Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect() };
    let lines = files.iter().map(|(name, bytes)| format!("{}  {name}\n", sum(bytes)));
    lines
        .chain([format!("# {} bytes of base under top: {}\n", raw.len(), sum(raw))])
        .collect()
}

#[test]
fn the_files_are_what_the_code_makes() {
    let folder = tempfile::tempdir().unwrap();
    for (name, made) in make(folder.path()) {
        let kept = std::fs::read(spec().join(&name)).unwrap_or_default();
        let different = kept.iter().zip(&made).position(|(a, b)| a != b);
        assert_eq!((different, made.len()), (None, kept.len()), "{name}");
    }
}

#[test]
#[ignore = "writes spec/layers"]
fn write_the_files() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in make(folder.path()) {
        std::fs::write(spec().join(name), bytes).unwrap();
    }
}

#[test]
fn a_layer_reads_the_same_in_every_envelope() {
    let read = |name: &str| {
        let mut content = vec![0xcc; SIZE as usize];
        let stack = Stack::open(&[spec().join(name)], None, SIZE).unwrap();
        stack.read_at(&mut content, 0).unwrap();
        content
    };
    let expected = read("base.lsmt");
    let digest = aenv_layers::digest(&spec().join("base.lsmt")).unwrap();
    for entry in std::fs::read_dir(spec()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.starts_with("base") {
            assert!(read(&name) == expected, "{name}");
            assert_eq!(aenv_layers::digest(&spec().join(&name)).unwrap(), digest, "{name}");
        }
    }
}
