//! ZFiles: what goes in comes out, by any range, also of files as other writers make them.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aenv_layers::zfile::CompressError;
use aenv_layers::{Algorithm, Blob, Damage, Error, ZFile, ZFileOptions, ZFileWriter};
use proptest::prelude::*;
use support::zfile::{forged, open, options, packed, single_block, small};
use support::{Memory, content, mixed};

proptest! {
    #[test]
    fn any_range_reads_as_the_original(
        length in 0usize..300_000,
        seed in any::<u64>(),
        options in options(),
        pieces in prop::collection::vec(1usize..50_000, 1..6),
        ranges in prop::collection::vec((0usize..300_000, 0usize..100_000), 10),
    ) {
        let original = mixed(length, seed);
        // Written in pieces of any size.
        let mut writer = ZFileWriter::new(Vec::new(), options).unwrap();
        let mut rest = original.as_slice();
        for size in pieces.iter().cycle() {
            let (piece, after) = rest.split_at(rest.len().min(*size));
            writer.append(piece).unwrap();
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        let (stored, report) = writer.finish().unwrap();
        prop_assert_eq!(report.blocks, (length as u64).div_ceil(u64::from(options.block_bytes)));
        prop_assert!(stored == packed(&original, options), "the bytes do not depend on the pieces");
        let zfile = open(stored).unwrap();
        prop_assert_eq!(zfile.len_bytes(), length as u64);
        prop_assert_eq!((zfile.algorithm(), zfile.block_bytes()), (options.algorithm, options.block_bytes));
        prop_assert!(content(&zfile).unwrap() == original);
        for (start, count) in ranges {
            let mut part = vec![0xcc; count];
            match original.get(start..start + count) {
                Some(expected) => {
                    zfile.read_exact_at(&mut part, start as u64).unwrap();
                    prop_assert!(part == expected);
                }
                None => {
                    let error = zfile.read_exact_at(&mut part, start as u64).unwrap_err();
                    let short = matches!(error, Error::Corrupt { damage: Damage::ShortRead { .. }, .. });
                    prop_assert!(short, "{}", error);
                }
            }
        }
    }
}

#[test]
fn a_read_fetches_the_blocks_it_touches_in_one_go() {
    let original = mixed(64 * 4096, 5);
    let memory = Arc::new(Memory::new("stored", packed(&original, small())));
    let zfile = ZFile::open(Path::new("a.zfile"), memory.clone()).unwrap();
    let reads = |buf: &mut [u8], offset| {
        let before = memory.reads.load(Ordering::Relaxed);
        zfile.read_exact_at(buf, offset).unwrap();
        memory.reads.load(Ordering::Relaxed) - before
    };
    assert_eq!(reads(&mut [0; 4096], 4096), 1);
    assert_eq!(reads(&mut [0; 2], 4095), 1);
    assert_eq!(reads(&mut [0; 100_000], 5), 1);
    assert_eq!(reads(&mut [], 5), 0);
}

#[test]
fn blocks_larger_than_we_write_are_read() {
    for block_bytes in [512, 1 << 16, 1 << 20] {
        // Noise: the stored block is larger than the original.
        let original: Vec<u8> = mixed(8 << 20, 1)
            .into_iter()
            .filter(|&byte| byte > 0x7f)
            .take(block_bytes)
            .collect();
        let block = lz4_flex::block::compress(&original);
        let stored = single_block(&block, Algorithm::Lz4, block_bytes as u32, block_bytes as u64);
        assert!(content(&open(stored).unwrap()).unwrap() == original, "{block_bytes}");
    }
}

#[test]
fn a_header_that_was_written_again_is_the_truth() {
    let original = mixed(60_000, 3);
    let good = packed(&original, small());
    let trailer = good[good.len() - 512..].to_vec();
    // As upstream's commit does it: a header, not sealed, with all that the trailer says.
    let mut stored = forged(&good, false, |header| {
        header.copy_from_slice(&trailer);
        header[32] = 0x1b;
    });
    let end = stored.len();
    stored[end - 512..].fill(0xee);
    assert!(
        content(&open(stored).unwrap()).unwrap() == original,
        "the trailer is not looked at"
    );
}

#[test]
fn a_file_without_checksums_is_read() {
    let original = mixed(60_000, 3);
    let stored = packed(
        &original,
        ZFileOptions {
            checksum: false,
            ..small()
        },
    );
    // Nor of its ends and table: as upstream's oldest writers left them.
    let mut stored = stored.clone();
    let end = stored.len() - 512;
    for at in [0, end] {
        stored[at + 32] &= !0x10;
        stored[at + 28..at + 32].fill(0);
    }
    let zfile = open(stored).unwrap();
    assert!(!zfile.has_checksums());
    assert!(content(&zfile).unwrap() == original);
}

#[test]
fn many_threads_read_one_file() {
    let original = Arc::new(mixed(1 << 20, 9));
    let zfile = Arc::new(open(packed(&original, ZFileOptions::default())).unwrap());
    std::thread::scope(|scope| {
        for seed in 0..8u64 {
            let (zfile, original) = (zfile.clone(), original.clone());
            scope.spawn(move || {
                let mut part = vec![0; 5000];
                for step in 0..300u64 {
                    let at = (seed * 7919 + step * 104_729) % ((1 << 20) - 5000);
                    zfile.read_exact_at(&mut part, at).unwrap();
                    assert!(part == original[at as usize..][..5000]);
                }
            });
        }
    });
}

#[test]
fn options_that_no_reader_could_hold_are_refused() {
    let with = |options: ZFileOptions| ZFileWriter::new(Vec::new(), options).map(|_| ()).unwrap_err();
    for block_bytes in [0, 2048, 5000, 1 << 16] {
        let error = with(ZFileOptions { block_bytes, ..small() });
        assert!(matches!(error, CompressError::BlockSize { .. }), "{error}");
    }
    for level in [0, -1, 20] {
        let error = with(ZFileOptions {
            algorithm: Algorithm::Zstd,
            level,
            ..small()
        });
        assert!(matches!(error, CompressError::Level { .. }), "{error}");
    }
}
