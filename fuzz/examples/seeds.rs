//! Makes the seed corpus with our own writers: `RUSTFLAGS= cargo run --example seeds -- corpus`. Fuzzing adds nothing to
//! the committed corpus; what it finds stays in its working copy.
//!
//! An example, because a program without libFuzzer cannot be built with libFuzzer's flags.

use std::path::Path;

use aenv_fuzz::compact_lsmt;
use aenv_layers::{Layer, LayerWriter, Upper, Uuid, merge};

const SECTOR: u64 = 512;
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let corpus = std::env::args().nth(1).ok_or("the folder of the corpus is missing")?;
    let corpus = Path::new(&corpus);
    let scratch = std::env::temp_dir().join(format!("aenv-seeds-{}", std::process::id()));
    std::fs::create_dir(&scratch)?;
    let made = lsmt(corpus, &scratch);
    std::fs::remove_dir_all(&scratch)?;
    made
}

fn save(corpus: &Path, target: &str, name: &str, bytes: &[u8]) -> Result<()> {
    let folder = corpus.join(target);
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join(name), bytes)?;
    Ok(())
}

/// Layers of all shapes, each as a compact input with and without repaired checksum; pairs of them as stacks.
fn lsmt(corpus: &Path, scratch: &Path) -> Result<()> {
    let shapes = [
        ("empty", written(scratch, "empty", 8, &[])?),
        ("one", written(scratch, "one", 64, &[(1, 2, true)])?),
        ("mixed", written(scratch, "mixed", 64, &[(1, 2, true), (10, 5, false), (20, 1, true), (63, 1, false)])?),
        ("zeros", written(scratch, "zeros", 1 << 20, &[(0, 40_000, false)])?),
        ("dense", written(scratch, "dense", 64, &(0..16).map(|i| (i * 3, 2, i % 3 != 0)).collect::<Vec<_>>())?),
        ("sparse", sealed(scratch)?),
    ];
    for (name, file) in &shapes {
        save(corpus, "lsmt", name, &compact_lsmt(file, true))?;
        save(corpus, "lsmt", &format!("{name}-strict"), &compact_lsmt(file, false))?;
    }
    save(corpus, "lsmt", "verbatim", &[&[2], &shapes[1].1[..]].concat())?;
    for (lower, upper) in [(2, 4), (4, 2), (1, 5), (3, 1)] {
        let (name, lower) = (format!("{}-{}", shapes[lower].0, shapes[upper].0), &shapes[lower].1);
        let pair = (compact_lsmt(lower, true), compact_lsmt(&shapes[upper].1, true));
        let split = u16::try_from(pair.0.len())?.to_le_bytes();
        save(corpus, "stack", &name, &[&split, &pair.0[..], &pair.1[..]].concat())?;
    }
    merged(corpus, scratch)
}

/// A layer of `(first sector, sectors, data or zero)`.
fn written(scratch: &Path, name: &str, sectors: u64, runs: &[(u64, u64, bool)]) -> Result<Vec<u8>> {
    let path = scratch.join(name);
    let mut writer = LayerWriter::create(&path, sectors * SECTOR, Uuid::NIL)?;
    // Random identities would make the corpus new at each making.
    writer.set_uuid(Uuid::from_bytes([0x5a; 16]));
    for &(start, length, data) in runs {
        match data {
            true => writer.append(start * SECTOR, &vec![start as u8 | 1; (length * SECTOR) as usize])?,
            false => writer.append_zero(start * SECTOR, length * SECTOR)?,
        }
    }
    writer.finish()?;
    Ok(std::fs::read(path)?)
}

/// An upper after its seal: sparse, unpadded places, written over trimmed.
fn sealed(scratch: &Path) -> Result<Vec<u8>> {
    let path = scratch.join("upper");
    let upper = Upper::create(&path, 64 * SECTOR, Uuid::from_bytes([0xa5; 16]))?;
    upper.write_at(&[7; 1536], 5 * SECTOR)?;
    upper.discard(6 * SECTOR, 20 * SECTOR)?;
    upper.write_at(&[9; 512], 10 * SECTOR)?;
    upper.seal()?;
    let mut bytes = std::fs::read(path)?;
    // Its identity is random; the checksum does not matter to a compact input that is repaired.
    let trailer = bytes.len() - 4096;
    for at in [56, trailer + 56] {
        bytes[at..at + 36].copy_from_slice(b"5A5A5A5A-5A5A-5A5A-5A5A-5A5A5A5A5A5A");
    }
    Ok(bytes)
}

fn merged(corpus: &Path, scratch: &Path) -> Result<()> {
    let layers = [scratch.join("mixed"), scratch.join("dense")];
    merge(&layers, &scratch.join("merged"))?;
    let file = std::fs::read(scratch.join("merged"))?;
    assert!(!Layer::open(&scratch.join("merged"))?.segments().is_empty());
    save(corpus, "lsmt", "merged", &compact_lsmt(&file, true))
}
