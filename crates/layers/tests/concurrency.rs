//! Many threads on one stack while it is sealed again and again.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use aenv_layers::{Registry, Stack};

const SECTOR: u64 = 512;
const WRITERS: u64 = 4;
/// Sectors of each writer. Not a multiple of 64, so that writers share words of the map.
const REGION: u64 = 150;
const SIZE: u64 = WRITERS * REGION * SECTOR;
const SEALS: usize = 40;

/// Every sector of one round of one writer has the same bytes: number and sector, mixed.
fn stamp(round: u64, sector: u64) -> [u8; SECTOR as usize] {
    let word = (round << 16 | sector).to_le_bytes();
    std::array::from_fn(|i| word[i % 8])
}

/// Writes and discards its own region for as long as it is told, reading each change back at once. Returns what each
/// sector holds at the end.
fn write_region(stack: &Stack, first: u64, stop: &AtomicBool) -> Vec<Vec<u8>> {
    let mut model = vec![vec![0u8; SECTOR as usize]; REGION as usize];
    let mut seed = first + 1;
    let mut round = 1;
    while !stop.load(Ordering::Relaxed) {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let start = (seed >> 33) % REGION;
        let count = (1 + (seed >> 50) % 40).min(REGION - start);
        let discards = seed >> 62 == 0;
        let sectors = start..start + count;
        for sector in sectors.clone() {
            model[sector as usize] = match discards {
                true => vec![0; SECTOR as usize],
                false => stamp(round, first + sector).to_vec(),
            };
        }
        let expected = model[start as usize..(start + count) as usize].concat();
        let offset = (first + start) * SECTOR;
        match discards {
            true => stack.discard(offset, count * SECTOR).unwrap(),
            false => stack.write_at(&expected, offset).unwrap(),
        }
        let mut found = vec![0xcc; expected.len()];
        stack.read_at(&mut found, offset).unwrap();
        assert!(
            found == expected,
            "an acknowledged change of {sectors:?} in round {round} is not there"
        );
        round += 1;
    }
    model
}

#[test]
fn disjoint_writers_see_their_own_writes_through_seals() {
    let folder = tempfile::tempdir().unwrap();
    let name = |number: usize| folder.path().join(number.to_string());
    let registry = Registry::new();
    let stack = Stack::open_with(&registry, &[], Some(&name(0)), SIZE).unwrap();
    let stop = AtomicBool::new(false);
    let model: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let (stack, stop) = (&stack, &stop);
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| scope.spawn(move || write_region(stack, number * REGION, stop)))
            .collect();
        for number in 1..=SEALS {
            stack.seal_upper(Some(&name(number))).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    let model = model.concat();
    let mut found = vec![0xcc; SIZE as usize];
    stack.read_at(&mut found, 0).unwrap();
    assert!(found == model);
    // And so does the next process.
    let layers: Vec<PathBuf> = (0..SEALS).map(name).collect();
    drop(stack);
    let stack = Stack::open(&layers, Some(&name(SEALS)), SIZE).unwrap();
    stack.read_at(&mut found, 0).unwrap();
    assert!(found == model);
}

#[test]
fn overlapping_writes_and_discards_leave_whole_sectors_of_one_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let stack = Stack::open(&[], Some(&folder.path().join("u")), SIZE).unwrap();
    std::thread::scope(|scope| {
        for value in 1..=4u8 {
            let stack = &stack;
            scope.spawn(move || {
                for round in 0..300u64 {
                    let offset = (round * 7 + u64::from(value)) % 60 * SECTOR;
                    match value {
                        4 => stack.discard(offset, 30 * SECTOR).unwrap(),
                        _ => stack.write_at(&[value; 30 * SECTOR as usize], offset).unwrap(),
                    }
                }
            });
        }
    });
    let mut found = vec![0xcc; SIZE as usize];
    stack.read_at(&mut found, 0).unwrap();
    for (sector, bytes) in found.chunks(SECTOR as usize).enumerate() {
        assert!(
            bytes[0] < 4 && bytes.iter().all(|&byte| byte == bytes[0]),
            "sector {sector}: {:?}",
            &bytes[..8]
        );
    }
}
