//! A hostile ZFile: opened, its blocks read whole and in pieces, and what it holds opened as a layer.
#![no_main]

use std::path::Path;
use std::sync::Arc;

use aenv_fuzz::{MemoryBlob, MemoryFile, read_enveloped, repair_zfile};
use aenv_layers::{Blob, ZFile};
use libfuzzer_sys::fuzz_target;

/// Bytes of the original that are looked at: a small file may claim terabytes.
const LOOKED_AT: u64 = 1 << 20;

// Bit 0 of the first byte: put the checksums right. The rest is the file.
fuzz_target!(|input: &[u8]| {
    let Some((&flags, file)) = input.split_first() else {
        return;
    };
    let mut file = file.to_vec();
    if flags & 1 != 0 {
        repair_zfile(&mut file);
    }
    read(&file);
    let file = MemoryFile::new(&file);
    read_enveloped(file.path());
});

fn read(file: &[u8]) {
    let Ok(original) = ZFile::open(Path::new("memory"), Arc::new(MemoryBlob(file.to_vec()))) else {
        return;
    };
    let length = original.len_bytes().min(LOOKED_AT) as usize;
    let mut whole = vec![0xa5; length];
    if original.read_exact_at(&mut whole, 0).is_ok() {
        let step = (original.block_bytes() as usize / 3).max(1000);
        for at in (0..length).step_by(step) {
            let mut part = vec![0x5a; step.min(length - at)];
            original
                .read_exact_at(&mut part, at as u64)
                .expect("a part of what was read whole");
            assert_eq!(part, whole[at..at + part.len()], "at {at}");
        }
    }
    let mut beyond = [0; 16];
    let end = original.len_bytes();
    assert!(
        original.read_exact_at(&mut beyond, end.saturating_sub(1)).is_err(),
        "bytes beyond the end"
    );
}
