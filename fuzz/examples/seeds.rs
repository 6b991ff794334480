//! Makes the seed corpus with our own writers: `RUSTFLAGS= cargo run --example seeds -- corpus`. Fuzzing adds nothing to
//! the committed corpus; what it finds stays in its working copy.
//!
//! An example, because a program without libFuzzer cannot be built with libFuzzer's flags.

use std::path::Path;

use aenv_fuzz::compact_lsmt;
use aenv_fuzz::{BlockListBuilder, Descriptor, Encryption, Hasher, Source};
use aenv_layers::zfile::compress;
use aenv_layers::{Algorithm, Layer, LayerWriter, TarFrame, Upper, Uuid, ZFileOptions, merge};

const SECTOR: u64 = 512;
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let corpus = std::env::args().nth(1).ok_or("the folder of the corpus is missing")?;
    let corpus = Path::new(&corpus);
    let scratch = std::env::temp_dir().join(format!("aenv-seeds-{}", std::process::id()));
    std::fs::create_dir(&scratch)?;
    let made = lsmt(corpus, &scratch)
        .and_then(|()| envelopes(corpus, &scratch))
        .and_then(|()| oci(corpus));
    let made = made.and_then(|()| blobs(corpus));
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
        (
            "mixed",
            written(
                scratch,
                "mixed",
                64,
                &[(1, 2, true), (10, 5, false), (20, 1, true), (63, 1, false)],
            )?,
        ),
        ("zeros", written(scratch, "zeros", 1 << 20, &[(0, 40_000, false)])?),
        (
            "dense",
            written(
                scratch,
                "dense",
                64,
                &(0..16).map(|i| (i * 3, 2, i % 3 != 0)).collect::<Vec<_>>(),
            )?,
        ),
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

/// ZFiles of small layers, tars around layers and around ZFiles. The first byte asks for repaired checksums.
fn envelopes(corpus: &Path, scratch: &Path) -> Result<()> {
    for (name, algorithm, block_bytes, checksum) in [
        ("mixed", Algorithm::Lz4, 4096, true),
        ("zeros", Algorithm::Zstd, 4096, true),
        ("dense", Algorithm::Lz4, 16_384, false),
        ("merged", Algorithm::Zstd, 32_768, true),
    ] {
        let plain = std::fs::read(scratch.join(name))?;
        let options = ZFileOptions {
            algorithm,
            block_bytes,
            checksum,
            ..ZFileOptions::default()
        };
        let mut stored = Vec::new();
        compress(&plain[..], &mut stored, options)?;
        save(corpus, "zfile", name, &[&[1], &stored[..]].concat())?;
        save(corpus, "tar", &format!("{name}-zfile"), &framed(&stored))?;
    }
    save(corpus, "tar", "one", &framed(&std::fs::read(scratch.join("one"))?))
}

fn framed(content: &[u8]) -> Vec<u8> {
    let frame = TarFrame::new(content.len() as u64);
    [&[1], &frame.head[..], content, &frame.tail].concat()
}

/// Archives of all kinds of entries. The first byte asks for repaired checksums, so none are made here.
fn oci(corpus: &Path) -> Result<()> {
    let record = "39 SCHILY.xattr.user.note=an attribute\n23 mtime=1700000000.25\n";
    let seeds: [(&str, Vec<Vec<u8>>); 5] = [
        (
            "files",
            vec![entry("etc/", b'5', "", b""), entry("etc/name", b'0', "", b"content\n")],
        ),
        (
            "links",
            vec![
                entry("a", b'0', "", b"a"),
                entry("b", b'1', "a", b""),
                entry("c", b'2', "../../a", b""),
            ],
        ),
        (
            "whiteouts",
            vec![
                entry("d/", b'5', "", b""),
                entry("d/e", b'0', "", b"e"),
                entry("d/.wh.e", b'0', "", b""),
                entry("d/.wh..wh..opq", b'0', "", b""),
            ],
        ),
        (
            "devices",
            vec![entry("dev/null", b'3', "", b""), entry("dev/pipe", b'6', "", b"")],
        ),
        (
            "extended",
            vec![
                entry("x", b'x', "", record.as_bytes()),
                entry("y", b'0', "", &[7; 5000]),
            ],
        ),
    ];
    for (name, entries) in seeds {
        save(corpus, "oci", name, &[&[1], &entries.concat()[..], &[0; 1024]].concat())?;
    }
    Ok(())
}

/// One entry of an archive, its checksum left out.
fn entry(name: &str, kind: u8, link: &str, content: &[u8]) -> Vec<u8> {
    let mut header = vec![0; 512];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, b"0000755\0");
    put(108, b"0001750\0");
    put(116, b"0001750\0");
    put(124, format!("{:011o}\0", content.len()).as_bytes());
    put(136, b"14500000000\0");
    put(156, &[kind]);
    put(157, link.as_bytes());
    put(257, b"ustar\x0000");
    put(329, b"0000001\0");
    put(337, b"0000003\0");
    header.extend_from_slice(content);
    header.resize(header.len().next_multiple_of(512), 0);
    header
}

fn blobs(corpus: &Path) -> Result<()> {
    let mut builder = BlockListBuilder::new();
    builder.update(&[5; 150_000]);
    let list = builder.finish();
    save(corpus, "blob", "block-list", &list.encode())?;
    let mut hasher = Hasher::new();
    hasher.update(b"blob");
    let digest = hasher.finish();
    let source = |key: &str| Source::Object {
        store: "repository".into(),
        key: key.into(),
    };
    let object = Descriptor::new(
        digest,
        150_000,
        source("layers/1.lsmt"),
        Some((source("layers/1.blocks"), digest)),
        None,
    );
    save(corpus, "blob", "object", &object.encode())?;
    let file = Source::File {
        path: "/tmp/layer".into(),
    };
    save(
        corpus,
        "blob",
        "file",
        &Descriptor::new(digest, 9, file, None, Some(Encryption::Aes256Gcm)).encode(),
    )?;
    let (registry, repository) = ("localhost:5000".into(), "library/base".into());
    let registry = Source::Registry {
        registry,
        repository,
        digest,
    };
    save(
        corpus,
        "blob",
        "registry",
        &Descriptor::new(digest, 9, registry, None, None).encode(),
    )
}
