//! ZFiles to test with: written by us, then changed as a liar would.

use std::path::Path;
use std::sync::Arc;

use aenv_layers::zfile::compress;
use aenv_layers::{Algorithm, Damage, Error, ZFile, ZFileDamage, ZFileOptions};
use proptest::prelude::*;

use super::{Memory, content};

pub fn packed(original: &[u8], options: ZFileOptions) -> Vec<u8> {
    let mut stored = Vec::new();
    let report = compress(original, &mut stored, options).unwrap();
    assert_eq!(
        (report.original_bytes, report.stored_bytes),
        (original.len() as u64, stored.len() as u64)
    );
    stored
}

pub fn open(stored: Vec<u8>) -> Result<ZFile, Error> {
    ZFile::open(Path::new("a.zfile"), Arc::new(Memory::new("stored", stored)))
}

pub fn small() -> ZFileOptions {
    ZFileOptions {
        block_bytes: 4096,
        ..ZFileOptions::default()
    }
}

pub fn options() -> impl Strategy<Value = ZFileOptions> {
    let algorithm = prop_oneof![Just(Algorithm::Lz4), Just(Algorithm::Zstd)];
    (algorithm, 1..5i32, 12..=15u32, any::<bool>()).prop_map(|(algorithm, level, shift, checksum)| ZFileOptions {
        algorithm,
        level,
        block_bytes: 1 << shift,
        checksum,
    })
}

/// The damage of a file that must not open or not read.
pub fn damage(stored: Vec<u8>) -> ZFileDamage {
    let outcome = open(stored).and_then(|zfile| content(&zfile));
    match outcome.map(|_| ()).unwrap_err() {
        Error::Corrupt {
            path,
            damage: Damage::ZFile(damage),
        } => {
            assert_eq!(path, Path::new("a.zfile"));
            damage
        }
        other => panic!("{other}"),
    }
}

/// A change of the file's trailer or header, its checksum made right again.
pub fn forged(stored: &[u8], at_end: bool, change: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut stored = stored.to_vec();
    let start = if at_end { stored.len() - 512 } else { 0 };
    let end = &mut stored[start..start + 512];
    change(end);
    end[28..32].fill(0);
    let crc = !crc32c::crc32c_append(!0, end);
    end[28..32].copy_from_slice(&crc.to_le_bytes());
    stored
}

pub fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// A file of one block, as another writer would make it.
pub fn single_block(block: &[u8], algorithm: Algorithm, block_bytes: u32, original_bytes: u64) -> Vec<u8> {
    let options = ZFileOptions {
        algorithm,
        checksum: false,
        ..small()
    };
    let good = packed(&[1; 4096], options);
    let mut stored = good[..512].to_vec();
    stored.extend(block);
    let offset = stored.len() as u64;
    let entry = (block.len() as u32).to_le_bytes();
    stored.extend(entry);
    stored.extend(&good[good.len() - 512..]);
    let crc = !crc32c::crc32c_append(!0, &entry);
    forged(&stored, true, |trailer| {
        put(trailer, 40, offset);
        put(trailer, 56, original_bytes);
        trailer[64..68].copy_from_slice(&crc.to_le_bytes());
        trailer[72..76].copy_from_slice(&block_bytes.to_le_bytes());
    })
}
