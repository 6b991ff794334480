//! ZFiles that are damaged or lie: one bad block harms its own reads only, and each lie is named.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use aenv_layers::{Algorithm, Blob, Damage, ErrorKind, ZFile, ZFileDamage, ZFileOptions};
use proptest::prelude::*;
use support::zfile::{damage, forged, open, options, packed, put, single_block, small};
use support::{Memory, content, mixed};

proptest! {
    #[test]
    fn a_changed_byte_is_an_error_or_harmless(
        seed in any::<u64>(),
        options in options(),
        place in any::<prop::sample::Index>(),
        change in 1..=255u8,
    ) {
        let original = mixed(60_000, seed);
        let mut stored = packed(&original, ZFileOptions { checksum: true, ..options });
        let at = place.index(stored.len());
        stored[at] ^= change;
        match open(stored).and_then(|zfile| content(&zfile)) {
            Ok(found) => prop_assert!(found == original, "byte {}", at),
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
    }

    #[test]
    fn forged_numbers_never_panic(
        fields in prop::collection::vec((prop::sample::select(vec![24usize, 32, 40, 48, 56, 64, 72, 80, 84, 88]), number()), 1..4),
        table in prop::collection::vec((0usize..15, prop_oneof![0..9000u32, any::<u32>()]), 0..3),
    ) {
        let stored = packed(&mixed(60_000, 3), small());
        let mut stored = stored.clone();
        let table_at = stored.len() - 512 - 15 * 4;
        for (entry, value) in table {
            stored[table_at + entry * 4..][..4].copy_from_slice(&value.to_le_bytes());
        }
        let crc = !crc32c::crc32c_append(!0, &stored[table_at..table_at + 60]);
        let stored = forged(&stored, true, |trailer| {
            trailer[64..68].copy_from_slice(&crc.to_le_bytes());
            fields.iter().for_each(|(at, value)| put(trailer, *at, *value));
        });
        if let Ok(zfile) = open(stored) {
            let mut part = vec![0; 10_000.min(zfile.len_bytes() as usize)];
            let _ = zfile.read_exact_at(&mut part, 0);
            let last = zfile.len_bytes() - part.len() as u64;
            let _ = zfile.read_exact_at(&mut part, last);
            zfile.will_read(0, u64::MAX);
        }
    }

    #[test]
    fn noise_in_blocks_never_panics_nor_passes_for_another_length(
        noise in prop::collection::vec(any::<u8>(), 1..3000),
        algorithm in prop_oneof![Just(Algorithm::Lz4), Just(Algorithm::Zstd)],
    ) {
        let block = 4096 + noise.len() % 5000;
        let mut stored = packed(&vec![0; block], ZFileOptions { algorithm, block_bytes: 16384, checksum: false, ..small() });
        // The only block of the file, replaced.
        let table_at = stored.len() - 512 - 4;
        let mut forged_file = stored[..512].to_vec();
        forged_file.extend(&noise);
        let offset = forged_file.len() as u64;
        let entry = (noise.len() as u32).to_le_bytes();
        forged_file.extend(entry);
        forged_file.extend(stored.split_off(table_at + 4));
        let crc = !crc32c::crc32c_append(!0, &entry);
        let forged_file = forged(&forged_file, true, |trailer| {
            put(trailer, 40, offset);
            trailer[64..68].copy_from_slice(&crc.to_le_bytes());
        });
        match content(&open(forged_file).unwrap()) {
            // By chance the noise is a block of this length.
            Ok(found) => prop_assert_eq!(found.len(), block),
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
    }
}

/// Numbers that like the edges.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..70_000u64,
        Just(u64::MAX),
        (40..64u32).prop_map(|shift| 1 << shift),
        any::<u64>()
    ]
}

#[test]
fn one_bad_block_fails_its_own_reads_only() {
    let original = mixed(20 * 4096, 5);
    let mut stored = packed(&original, small());
    // Somewhere in the middle of the data; find the block by trying.
    let middle = stored.len() / 2;
    stored[middle] ^= 1;
    let zfile = open(stored).unwrap();
    let mut bad = Vec::new();
    for block in 0..20u64 {
        let mut part = [0; 4096];
        match zfile.read_exact_at(&mut part, block * 4096) {
            Ok(()) => assert!(part == original[block as usize * 4096..][..4096]),
            Err(error) => {
                let damage = Damage::ZFile(ZFileDamage::BlockChecksum { block });
                assert!(error.to_string() == format!("a.zfile: {damage}"), "{error}");
                bad.push(block);
            }
        }
    }
    assert_eq!(bad.len(), 1);
    assert!(content(&zfile).is_err());
}

#[test]
fn a_block_that_was_bad_only_once_is_read_again() {
    let original = mixed(8 * 4096, 5);
    let stored = packed(&original, small());
    let at = stored.len() as u64 / 2;
    for (bad_reads, healed) in [(1, true), (2, true), (3, false)] {
        let memory = Arc::new(Memory {
            bad: at..at + 1,
            bad_reads: AtomicUsize::new(bad_reads),
            ..Memory::new("stored", stored.clone())
        });
        let zfile = ZFile::open(Path::new("a.zfile"), memory.clone()).unwrap();
        assert_eq!(
            content(&zfile).is_ok_and(|found| found == original),
            healed,
            "{bad_reads} bad reads"
        );
        assert_eq!(memory.distrusted.load(Ordering::Relaxed), bad_reads.min(2));
    }
}

#[test]
fn each_lie_of_an_end_has_its_error() {
    let good = packed(&mixed(60_000, 3), small());
    let length = good.len() as u64;
    let trailer = |at: usize, value: u64| damage(forged(&good, true, |bytes| put(bytes, at, value)));
    let byte = |at_end: bool, at: usize, value: u8| damage(forged(&good, at_end, |bytes| bytes[at] = value));
    assert_eq!(damage(good[..1000].to_vec()), ZFileDamage::TooShort { length: 1000 });
    assert_eq!(damage(good[1..].to_vec()), ZFileDamage::Magic { part: "header" });
    assert_eq!(
        damage(good[..good.len() - 1].to_vec()),
        ZFileDamage::Magic { part: "trailer" }
    );
    assert_eq!(
        byte(true, 32, 0x17),
        ZFileDamage::Flags {
            part: "trailer",
            flags: 0x17
        }
    );
    assert_eq!(
        byte(true, 32, 0x12),
        ZFileDamage::Flags {
            part: "trailer",
            flags: 0x12
        }
    );
    assert_eq!(
        byte(false, 32, 0x11),
        ZFileDamage::Flags {
            part: "header",
            flags: 0x11
        }
    );
    assert_eq!(
        byte(true, 33, 1),
        ZFileDamage::Flags {
            part: "trailer",
            flags: 0x116
        }
    );
    assert_eq!(byte(true, 32, 0x36), ZFileDamage::CompressedTable);
    assert_eq!(byte(true, 76, 0), ZFileDamage::Algorithm { algorithm: 0 });
    assert_eq!(byte(true, 78, 1), ZFileDamage::Dictionary);
    assert_eq!(
        trailer(72, 5000 | 1 << 32),
        ZFileDamage::BlockSize { block_bytes: 5000 }
    );
    assert_eq!(
        trailer(72, 1 << 21 | 1 << 32),
        ZFileDamage::BlockSize { block_bytes: 1 << 21 }
    );
    assert_eq!(trailer(56, u64::MAX), ZFileDamage::TooLarge { length: u64::MAX });
    assert_eq!(
        trailer(56, 70_000),
        ZFileDamage::BlockCount {
            found: 15,
            expected: 18
        }
    );
    assert_eq!(
        trailer(48, u64::MAX),
        ZFileDamage::BlockCount {
            found: u64::MAX,
            expected: 15
        }
    );
    for offset in [0, 511, length - 512 - 59, u64::MAX - 3] {
        assert_eq!(trailer(40, offset), ZFileDamage::TableOutside { offset, blocks: 15 });
    }
    let mut flipped = good.clone();
    flipped[100] ^= 1;
    assert_eq!(damage(flipped), ZFileDamage::HeaderChecksum { part: "header" });
}

#[test]
fn each_lie_of_a_jump_table_has_its_error() {
    let good = packed(&mixed(60_000, 3), small());
    let table_at = good.len() - 512 - 60;
    let with = |entry: usize, length: u32| {
        let mut stored = good.clone();
        stored[table_at + entry * 4..][..4].copy_from_slice(&length.to_le_bytes());
        let crc = !crc32c::crc32c_append(!0, &stored[table_at..table_at + 60]);
        damage(forged(&stored, true, |trailer| {
            trailer[64..68].copy_from_slice(&crc.to_le_bytes())
        }))
    };
    assert_eq!(with(2, 4), ZFileDamage::BlockLength { block: 2, length: 4 });
    assert_eq!(
        with(2, u32::MAX),
        ZFileDamage::BlockLength {
            block: 2,
            length: u32::MAX
        }
    );
    let mut swapped = good.clone();
    swapped[table_at..table_at + 8].rotate_left(4);
    assert_eq!(damage(swapped), ZFileDamage::TableChecksum);
    // Each as long as allowed: the data is over before the last one.
    let mut stored = good.clone();
    for entry in 0..15 {
        stored[table_at + entry * 4..][..4].copy_from_slice(&4100u32.to_le_bytes());
    }
    let outside = damage(forged(&stored, true, |_| ()));
    assert!(matches!(outside, ZFileDamage::BlockOutside { .. }), "{outside}");
}

#[test]
fn a_block_that_would_unpack_to_more_or_less_is_refused() {
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        // A MiB of zeros in one tiny block, declared as a last block of 4096 bytes, and as one of 4095.
        let bomb = match algorithm {
            Algorithm::Lz4 => lz4_flex::block::compress(&vec![0; 1 << 20]),
            Algorithm::Zstd => zstd::bulk::compress(&vec![0; 1 << 20], 3).unwrap(),
        };
        let less = match algorithm {
            Algorithm::Lz4 => lz4_flex::block::compress(&[0; 100]),
            Algorithm::Zstd => zstd::bulk::compress(&[0; 100], 3).unwrap(),
        };
        for block in [&bomb, &less] {
            let stored = single_block(block, algorithm, 4096, 4096);
            assert_eq!(damage(stored), ZFileDamage::BlockContent { block: 0, length: 4096 });
        }
    }
}
