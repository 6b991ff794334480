//! The bytes of spec/layers/, byte for byte. They were worked out from the format's description, the checksums by another
//! implementation; a change that makes this test fail changes the format.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};

use aenv_layers::{Layer, LayerWriter, Stack, Upper, Uuid, map_path};

const SECTOR: u64 = 512;
const UUID: Uuid = Uuid::from_bytes([
    0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x46, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff,
]);
const PARENT: Uuid = Uuid::from_bytes([
    0xff, 0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x49, 0x88, 0xb7, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x00,
]);

fn vector(name: &str) -> Vec<u8> {
    support::vector(
        &Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../spec/layers")
            .join(name),
    )
}

fn assert_same(found: &[u8], expected: &[u8]) {
    let different = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!((different, found.len()), (None, expected.len()));
}

fn put(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// First bytes of the sectors of a layer.
fn sectors(layer: &Path, size: u64, wanted: &[u64]) -> Vec<u8> {
    let stack = Stack::open(&[layer.to_owned()], None, size).unwrap();
    let mut sector = [0xcc; SECTOR as usize];
    let mut read = |&number: &u64| {
        stack.read_at(&mut sector, number * SECTOR).unwrap();
        assert!(sector.iter().all(|&byte| byte == sector[0]));
        sector[0]
    };
    wanted.iter().map(&mut read).collect()
}

#[test]
fn a_written_layer_has_the_bytes_of_the_format() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let mut writer = LayerWriter::create(&path, 64 * SECTOR, PARENT).unwrap();
    writer.set_uuid(UUID);
    writer.append(SECTOR, &[[0x11; 512], [0x22; 512]].concat()).unwrap();
    writer.append_zero(10 * SECTOR, 5 * SECTOR).unwrap();
    writer.append(20 * SECTOR, &[0x33; 512]).unwrap();
    writer.finish().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &vector("writer.hex"));
    let layer = Layer::open(&path).unwrap();
    assert_eq!(
        (layer.uuid(), layer.parent(), layer.virtual_size()),
        (UUID, PARENT, 64 * SECTOR)
    );
}

#[test]
fn a_new_upper_has_the_bytes_of_the_format() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("upper");
    let upper = Upper::create(&path, 100 * SECTOR, PARENT).unwrap();
    // The vector is the life of one upper up to here.
    upper.discard(3 * SECTOR, 3 * SECTOR).unwrap();
    upper.discard(99 * SECTOR, SECTOR).unwrap();
    upper.discard(64 * SECTOR, SECTOR).unwrap();
    upper.write_at(&[0xaa; 1536], 0).unwrap();
    upper.write_at(&[0xbb; 512], 64 * SECTOR).unwrap();
    let mut expected = vector("upper.hex");
    expected[0x9c00..0x9e00].fill(0);
    let mut map = vector("upper.map.hex");
    // But for its random identity.
    expected[56..92].copy_from_slice(upper.uuid().to_string().as_bytes());
    map[24..40].copy_from_slice(upper.uuid().as_bytes());
    let crc = crc32c::crc32c(&map[..40]);
    map[40..44].copy_from_slice(&crc.to_le_bytes());
    assert_same(&std::fs::read(&path).unwrap(), &expected);
    assert_same(&std::fs::read(map_path(&path)).unwrap(), &map);
}

#[test]
fn an_upper_reads_and_seals_to_the_bytes_of_the_format() {
    let folder = tempfile::tempdir().unwrap();
    let path = put(folder.path(), "upper", &vector("upper.hex"));
    put(folder.path(), "upper.map", &vector("upper.map.hex"));
    let upper = Upper::open(&path).unwrap();
    assert_eq!((upper.uuid(), upper.size()), (UUID, 100 * SECTOR));
    let mut content = vec![0xcc; 100 * SECTOR as usize];
    upper.read_at(&mut content, 0).unwrap();
    let filled: Vec<_> = (0..100).filter(|&sector| content[sector * 512] != 0).collect();
    assert_eq!(filled, [0, 1, 2, 64]);
    upper.seal().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &vector("sealed.hex"));
    assert!(!map_path(&path).exists());
    assert_eq!(
        sectors(&path, 100 * SECTOR, &[0, 2, 3, 63, 64, 70, 99]),
        [0xaa, 0xaa, 0, 0, 0xbb, 0, 0]
    );
}

#[test]
fn layers_of_upstream_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let compact = put(folder.path(), "compact", &vector("upstream-compact.hex"));
    assert_eq!(
        Layer::open(&compact).unwrap().segments().len(),
        3,
        "padding is no segment"
    );
    assert_eq!(
        sectors(&compact, 32768, &[0, 1, 2, 3, 10, 20, 21]),
        [0, 0x11, 0x11, 0, 0, 0x33, 0]
    );
    let sealed = put(folder.path(), "sealed", &vector("upstream-sealed.hex"));
    let layer = Layer::open(&sealed).unwrap();
    assert_eq!(
        (layer.uuid(), layer.parent(), layer.virtual_size()),
        (UUID, PARENT, 16 << 20)
    );
    assert_eq!(layer.segments()[2].sectors(), 16_383);
    assert_eq!(
        sectors(&sealed, 16 << 20, &[0, 1, 2, 4096, 20_479]),
        [0, 0x55, 0x66, 0, 0]
    );
}
