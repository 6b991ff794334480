//! Files that lie: every flipped bit, every cut, random bytes. An open may refuse; what it does not refuse must read as
//! what the file says, and never as zeros in place of data.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use aenv_layers::{Damage, Error, ErrorKind, Layer, LayerWriter, Stack, Upper, Uuid, map_path, merge};
use proptest::prelude::*;

const SECTOR: u64 = 512;
const SIZE: u64 = 64 * SECTOR;
const MAGIC: [u8; 24] = [
    b'L', b'S', b'M', b'T', 0, 1, 2, 0, 0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c, 0xa2, 0xd2, 0xc8, 0xec, 0x4f,
    0xcf, 0xae, 0x8a,
];

fn sample(folder: &Path) -> PathBuf {
    let path = folder.join("layer");
    let mut writer = LayerWriter::create(&path, SIZE, Uuid::NIL).unwrap();
    writer.append(SECTOR, &[0x11; 3 * SECTOR as usize]).unwrap();
    writer.append_zero(10 * SECTOR, 5 * SECTOR).unwrap();
    writer.append(20 * SECTOR, &[0x22; SECTOR as usize]).unwrap();
    writer.finish().unwrap();
    path
}

fn content(path: &Path) -> aenv_layers::Result<Vec<u8>> {
    let stack = Stack::open(&[path.to_owned()], None, SIZE)?;
    let mut content = vec![0xcc; SIZE as usize];
    stack.read_at(&mut content, 0)?;
    Ok(content)
}

/// A file as bytes, to be damaged and put back.
fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_flipped_bit_of_our_own_file_is_refused_or_harmless() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path());
    let good = std::fs::read(&path).unwrap();
    let expected = content(&path).unwrap();
    let index = 4096 + 4 * SECTOR as usize;
    let trailer = good.len() - 4096;
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut refused = 0;
    for at in (0..390).chain(index..index + 3 * 16).chain(trailer..trailer + 390) {
        for bit in 0..8 {
            file.write_all_at(&[good[at] ^ (1 << bit)], at as u64).unwrap();
            match content(&path) {
                Ok(found) => assert!(found == expected, "bit {bit} of byte {at}"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "bit {bit} of byte {at}: {error}");
                    refused += 1;
                }
            }
        }
        file.write_all_at(&good[at..at + 1], at as u64).unwrap();
    }
    // Only flips inside the free-text tag, which switch the checksum off or are not part of it, may pass.
    assert!(refused > 8 * (2 * 134 + 48), "{refused}");
}

#[test]
fn a_file_cut_at_any_sector_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path());
    let good = std::fs::read(&path).unwrap();
    for length in (0..good.len()).step_by(SECTOR as usize).chain([1, good.len() - 1]) {
        write(&path, &good[..length]);
        let error = content(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{length}: {error}");
        assert!(error.to_string().contains("layer"), "{error}");
    }
}

#[test]
fn a_file_that_shrinks_after_the_open_is_an_error_not_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let path = sample(folder.path());
    let stack = Stack::open(std::slice::from_ref(&path), None, SIZE).unwrap();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(4096 + SECTOR)
        .unwrap();
    let mut buf = [0; 3 * SECTOR as usize];
    match stack.read_at(&mut buf, SECTOR).unwrap_err() {
        Error::Corrupt {
            damage: Damage::ShortRead { offset, missing },
            ..
        } => {
            assert_eq!((offset, missing), (4096 + SECTOR, 2 * SECTOR));
        }
        other => panic!("{other}"),
    }
}

/// A foreign file: no checksum, so only the checks of the index stand between it and a read.
fn forged(entries: &[(u64, u64, u64, bool)], virtual_size: u64, data_sectors: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    bytes.extend((0..data_sectors * SECTOR).map(|i| (i / SECTOR) as u8 | 1));
    let index_offset = bytes.len() as u64;
    for &(offset, length, file_sector, zero) in entries {
        bytes.extend((offset & ((1 << 50) - 1) | length << 50).to_le_bytes());
        bytes.extend((file_sector & ((1 << 55) - 1) | u64::from(zero) << 55).to_le_bytes());
    }
    let trailer = bytes.len();
    bytes.resize(trailer + 4096, 0);
    for (at, flags) in [(0, 3u8), (trailer, 6)] {
        bytes[at..at + 24].copy_from_slice(&MAGIC);
        bytes[at + 24..at + 28].copy_from_slice(&390u32.to_le_bytes());
        bytes[at + 28] = flags;
        bytes[at + 48..at + 56].copy_from_slice(&virtual_size.to_le_bytes());
        bytes[at + 132] = 1;
    }
    bytes[trailer + 32..trailer + 40].copy_from_slice(&index_offset.to_le_bytes());
    bytes[trailer + 40..trailer + 48].copy_from_slice(&(entries.len() as u64).to_le_bytes());
    bytes
}

fn damage(bytes: &[u8]) -> Option<Damage> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forged");
    write(&path, bytes);
    match Layer::open(&path) {
        Ok(_) => None,
        Err(Error::Corrupt { path: named, damage }) => {
            assert_eq!(named, path);
            Some(damage)
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn each_lie_of_an_index_has_its_error() {
    let top = (1 << 50) - 2;
    assert_eq!(damage(&forged(&[(0, 2, 8, false), (2, 1, 8, true)], SIZE, 4)), None);
    assert_eq!(
        damage(&forged(&[(0, 0, 8, false)], SIZE, 4)),
        Some(Damage::EmptySegment { entry: 0 })
    );
    assert_eq!(
        damage(&forged(&[(0, 2, 8, false), (1, 1, 9, false)], SIZE, 4)),
        Some(Damage::Unsorted { entry: 1 })
    );
    assert_eq!(
        damage(&forged(&[(5, 1, 8, false), (1, 1, 9, false)], SIZE, 4)),
        Some(Damage::Unsorted { entry: 1 })
    );
    assert_eq!(
        damage(&forged(&[(0, 2, 7, false)], SIZE, 4)),
        Some(Damage::DataOutside { entry: 0 })
    );
    assert_eq!(
        damage(&forged(&[(0, 2, 11, false)], SIZE, 4)),
        Some(Damage::DataOutside { entry: 0 })
    );
    assert_eq!(
        damage(&forged(&[(0, 2, u64::MAX, false)], SIZE, 4)),
        Some(Damage::DataOutside { entry: 0 })
    );
    assert_eq!(
        damage(&forged(&[(63, 2, 8, false)], SIZE, 4)),
        Some(Damage::BeyondSize { entry: 0 })
    );
    assert_eq!(
        damage(&forged(&[(top, 16_383, 8, true)], 0, 4)),
        Some(Damage::BeyondSize { entry: 0 })
    );
    assert_eq!(
        damage(&forged(&[(u64::MAX, 1, 8, false)], SIZE, 4)),
        None,
        "padding is skipped"
    );
    assert_eq!(
        damage(&forged(&[], u64::MAX, 4)),
        Some(Damage::VirtualSize { size: u64::MAX })
    );
}

#[test]
fn each_lie_of_a_trailer_has_its_error() {
    let good = forged(&[(0, 2, 8, false)], SIZE, 4);
    let trailer = good.len() - 4096;
    let with = |at: usize, value: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        damage(&bytes)
    };
    let outside = |offset: u64, entries: u64| Some(Damage::IndexOutside { offset, entries });
    assert_eq!(with(trailer, b"x"), Some(Damage::NotLsmt { part: "trailer" }));
    assert_eq!(with(0, b"x"), Some(Damage::NotLsmt { part: "header" }));
    assert_eq!(
        with(trailer + 28, &[2]),
        Some(Damage::Flags {
            part: "trailer",
            flags: 2
        }),
        "not sealed"
    );
    assert_eq!(
        with(trailer + 28, &[7]),
        Some(Damage::Flags {
            part: "trailer",
            flags: 7
        }),
        "a header"
    );
    assert_eq!(
        with(trailer + 28, &[4]),
        Some(Damage::Flags {
            part: "trailer",
            flags: 4
        }),
        "an index file"
    );
    assert_eq!(
        with(28, &[2]),
        Some(Damage::Flags {
            part: "header",
            flags: 2
        })
    );
    assert_eq!(
        with(trailer + 31, &[0x80]),
        Some(Damage::Flags {
            part: "trailer",
            flags: 0x8000_0006
        })
    );
    assert_eq!(with(trailer + 132, &[9]), Some(Damage::Version { version: 9 }));
    assert_eq!(with(trailer + 32, &u64::MAX.to_le_bytes()), outside(u64::MAX, 1));
    assert_eq!(
        with(trailer + 40, &u64::MAX.to_le_bytes()),
        outside(4096 + 4 * SECTOR, u64::MAX)
    );
    assert_eq!(
        with(trailer + 40, &(1u64 << 60).to_le_bytes()),
        outside(4096 + 4 * SECTOR, 1 << 60)
    );
    assert_eq!(with(trailer + 32, &0u64.to_le_bytes()), outside(0, 1));
    assert_eq!(with(trailer + 32, &4097u64.to_le_bytes()), outside(4097, 1));
}

#[test]
fn a_damaged_map_is_refused_or_harmless() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("upper");
    Upper::create(&path, SIZE, Uuid::NIL)
        .unwrap()
        .write_at(&[7; 2 * SECTOR as usize], SECTOR)
        .unwrap();
    let map = map_path(&path);
    let good = std::fs::read(&map).unwrap();
    for at in 0..44 {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        write(&map, &bad);
        assert_eq!(Upper::open(&path).unwrap_err().kind(), ErrorKind::Corrupt, "byte {at}");
    }
    for length in (0..good.len()).step_by(SECTOR as usize) {
        write(&map, &good[..length]);
        assert_eq!(
            Upper::open(&path).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "length {length}"
        );
    }
    write(&map, &good);
    assert!(Upper::open(&path).is_ok());
    // Bits beyond the end of the image must not become segments of the layer.
    let mut bad = good.clone();
    bad[4096 + 8..4096 + 4096].fill(0xff);
    write(&map, &bad);
    let (layer, report) = Upper::open(&path).unwrap().seal().unwrap();
    assert_eq!((layer.segments().len(), report.data_bytes), (1, 2 * SECTOR));
}

#[test]
fn an_upper_without_one_of_its_files_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("upper");
    let create = || Upper::create(&path, SIZE, Uuid::NIL);
    create().unwrap().write_at(&[7; SECTOR as usize], 0).unwrap();
    assert_eq!(create().unwrap_err().kind(), ErrorKind::Exists);
    assert!(matches!(Layer::open(&path), Err(Error::NotSealed { .. })));
    let kept = std::fs::read(map_path(&path)).unwrap();
    std::fs::remove_file(map_path(&path)).unwrap();
    assert!(matches!(
        Upper::open(&path),
        Err(Error::Corrupt {
            damage: Damage::MapMissing,
            ..
        })
    ));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(Upper::open(&path).unwrap_err().kind(), ErrorKind::NotFound);
    write(&map_path(&path), &kept);
    assert!(matches!(
        create(),
        Err(Error::Corrupt {
            damage: Damage::DataMissing,
            ..
        })
    ));
    // A map of another upper, bytes all right.
    std::fs::remove_file(map_path(&path)).unwrap();
    create().unwrap();
    write(&map_path(&path), &kept);
    assert!(matches!(
        Upper::open(&path),
        Err(Error::Corrupt {
            damage: Damage::Map,
            ..
        })
    ));
}

/// Numbers that like the edges.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..80u64,
        Just(u64::MAX),
        Just(1 << 50),
        (1u64 << 50) - 20_000..1 << 50,
        any::<u64>()
    ]
}

proptest! {
    #[test]
    fn a_forged_index_never_panics_and_never_reads_zeros_for_data(
        entries in prop::collection::vec((number(), 0..16_384u64, number(), any::<bool>()), 0..6),
        virtual_size in number(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("forged");
        write(&path, &forged(&entries, virtual_size, 40));
        let Ok(layer) = Layer::open(&path) else { return Ok(()) };
        for segment in layer.segments() {
            prop_assert!(segment.end() > segment.start());
            // An odd size is rounded up by the caller.
            let size = layer.virtual_size().next_multiple_of(SECTOR);
            if let Ok(stack) = Stack::open(std::slice::from_ref(&path), None, size.max(SECTOR)) {
                let mut buf = vec![0xcc; (segment.sectors() * SECTOR) as usize];
                stack.read_at(&mut buf, segment.start() * SECTOR).unwrap();
                prop_assert!(segment.is_zero() || buf.iter().all(|&byte| byte != 0));
            }
        }
        let into = folder.path().join("merged");
        let merged = merge(&[path], &into).unwrap();
        prop_assert_eq!(merged.data_bytes, layer.data_bytes());
    }

    #[test]
    fn random_bytes_never_panic(body in prop::collection::vec(any::<u8>(), 0..3000), ends in any::<[[u8; 110]; 2]>()) {
        let mut bytes = vec![0; 4096];
        bytes.extend(&body);
        bytes.resize(bytes.len().next_multiple_of(512) + 4096, 0);
        let trailer = bytes.len() - 4096;
        for (at, end) in [(0, &ends[0]), (trailer, &ends[1])] {
            bytes[at..at + 24].copy_from_slice(&MAGIC);
            bytes[at + 24..at + 134].copy_from_slice(end);
            bytes[at + 29..at + 32].fill(0);
            bytes[at + 132] &= 1;
        }
        bytes[28] = 3;
        bytes[trailer + 28] = 6;
        // Small numbers half of the time, or nothing would get past the first check.
        if ends[0][0] % 2 == 0 {
            bytes[trailer + 34..trailer + 40].fill(0);
            bytes[trailer + 41..trailer + 56].fill(0);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("random");
        write(&path, &bytes);
        if let Ok(layer) = Layer::open(&path) {
            prop_assert!(layer.segments().iter().all(|s| s.sectors() > 0));
        }
    }
}
