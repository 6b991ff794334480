//! Layers in a tar, as upstream and others write it; tars that lie.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use std::sync::Arc;

use aenv_layers::{
    Damage, Error, ErrorKind, Layer, LayerWriter, TarDamage, TarFrame, Uuid, ZFileOptions, digest_layer,
};
use proptest::prelude::*;
use support::Memory;

fn layer() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let mut writer = LayerWriter::create(&path, 1 << 20, Uuid::NIL).unwrap();
    writer.append(512, &support::mixed(10_240, 1)).unwrap();
    writer.finish().unwrap();
    std::fs::read(path).unwrap()
}

fn open(bytes: Vec<u8>) -> Result<Layer, Error> {
    Layer::open_blob(Path::new("blob"), Arc::new(Memory::new("blob", bytes)))
}

fn damage(bytes: Vec<u8>) -> TarDamage {
    match open(bytes).unwrap_err() {
        Error::Corrupt {
            damage: Damage::Tar(damage),
            ..
        } => damage,
        other => panic!("{other}"),
    }
}

/// A header block, its checksum set.
fn header(name: &str, kind: u8, size: &str) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..124 + size.len()].copy_from_slice(size.as_bytes());
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    // Blanks before, one behind: upstream's way.
    block[148..156].copy_from_slice(format!("{sum:6o} \0").as_bytes());
    block
}

/// PAX header, file header, content, end: upstream's way, the size in the PAX record only.
fn upstream(content: &[u8]) -> Vec<u8> {
    let value = content.len().to_string();
    let record = format!("{} size={value}\n", 9 + value.len());
    let mut bytes = header("overlaybd.pax", b'x', &format!("{:11o} ", record.len()));
    bytes.extend(record.bytes());
    bytes.resize(1024, 0);
    bytes.extend(header("overlaybd.commit", b'0', &format!("{:11o} ", 0)));
    bytes.extend(content);
    bytes.resize(bytes.len().next_multiple_of(512) + 1024, 0);
    bytes
}

#[test]
fn a_tar_of_upstream_and_of_others_is_looked_through() {
    let content = layer();
    let mut zfile = Vec::new();
    aenv_layers::zfile::compress(content.as_slice(), &mut zfile, ZFileOptions::default()).unwrap();
    let expected = digest_layer(&open(content.clone()).unwrap()).unwrap();
    let TarFrame { head, tail } = TarFrame::new(content.len() as u64);
    let ours = [&head, &content[..], &tail].concat();
    assert_eq!(ours.len() % 512, 0);
    let mut binary = header("x", 0, "");
    binary[124] = 0x80;
    binary[128..136].copy_from_slice(&(content.len() as u64).to_be_bytes());
    let plain: u32 = binary
        .iter()
        .enumerate()
        .filter(|(at, _)| !(148..156).contains(at))
        .map(|(_, &b)| u32::from(b))
        .sum();
    binary[148..156].copy_from_slice(format!("{:06o}\0 ", plain + 256).as_bytes());
    binary.extend(&content);
    let mut long_name = header("././@LongLink", b'L', &format!("{:011o}\0", 3));
    long_name.extend(b"abc");
    long_name.resize(1024, 0);
    long_name.extend(&ours);
    for bytes in [upstream(&content), upstream(&zfile), ours, binary, long_name] {
        let opened = open(bytes).unwrap();
        assert_eq!(digest_layer(&opened).unwrap(), expected);
        assert_eq!(opened.blob().len_bytes(), content.len() as u64);
    }
}

#[test]
fn tar_of_the_machine_reads_our_frame() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tar");
    let content = layer();
    let TarFrame { head, tail } = TarFrame::new(content.len() as u64);
    std::fs::write(&path, [&head, &content[..], &tail].concat()).unwrap();
    let run = |flags: &str| {
        std::process::Command::new("tar")
            .arg(flags)
            .arg(&path)
            .output()
            .unwrap()
    };
    let listed = run("-tvf");
    let text = String::from_utf8(listed.stdout).unwrap();
    assert!(
        listed.status.success() && text.starts_with("-r--r--r-- 0/0") && text.contains("overlaybd.commit"),
        "{text}"
    );
    assert!(run("-xOf").stdout == content);
    // From 8 GiB on the size stands in a PAX record. Only the list is asked for, of a file with a hole.
    let huge = 10_000_000_000u64;
    let TarFrame { head, tail } = TarFrame::new(huge);
    std::fs::write(&path, &head).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(head.len() as u64 + huge + tail.len() as u64).unwrap();
    let text = String::from_utf8(run("-tvf").stdout).unwrap();
    assert!(
        text.contains("10000000000") && text.contains("overlaybd.commit"),
        "{text}"
    );
    let error = Layer::open(&path).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Corrupt {
                damage: Damage::NotLsmt { .. },
                ..
            }
        ),
        "looked into: {error}"
    );
}

#[test]
fn each_lie_of_a_tar_has_its_error() {
    let content = layer();
    let good = upstream(&content);
    let changed = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        damage(bytes)
    };
    assert_eq!(changed(0, b'x'), TarDamage::Checksum { header: 0 });
    assert_eq!(changed(1024, b'x'), TarDamage::Checksum { header: 1 });
    assert_eq!(changed(148, 0xff), TarDamage::Checksum { header: 0 });
    assert_eq!(changed(512, b'x'), TarDamage::Pax);
    assert_eq!(changed(513, b'9'), TarDamage::Pax, "the record ends elsewhere");
    assert_eq!(damage(header("a", b'0', "zz")), TarDamage::Size { header: 0 });
    assert_eq!(damage(header("a", b'5', "0")), TarDamage::NoFile);
    assert_eq!(damage(header("a", b'g', "0")), TarDamage::NoFile);
    let outside = |size| TarDamage::Outside { offset: 512, size };
    assert_eq!(damage(header("a", b'0', "1000")), outside(512));
    assert_eq!(damage(header("a", b'0', "77777777777")), outside((1 << 33) - 1));
    let cut = good[..good.len() - 2048].to_vec();
    assert!(matches!(damage(cut), TarDamage::Outside { .. }));
    let many = header("a", b'L', "0").repeat(100);
    assert_eq!(damage(many), TarDamage::NoFile);
    // A size of PAX beyond 64 bits is no number.
    let mut huge = header("p", b'x', &format!("{:11o} ", 34));
    huge.extend(b"34 size=9999999999999999999999999\n");
    huge.resize(1024, 0);
    assert_eq!(damage(huge), TarDamage::Pax);
}

#[test]
fn a_tar_in_a_tar_is_not_looked_through() {
    let once = upstream(&layer());
    let error = open(upstream(&once)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Corrupt {
                damage: Damage::NotLsmt { .. },
                ..
            }
        ),
        "{error}"
    );
}

proptest! {
    #[test]
    fn a_changed_byte_of_a_compressed_layer_is_an_error_or_harmless(
        place in any::<prop::sample::Index>(),
        change in 1..=255u8,
        tar in any::<bool>(),
    ) {
        let content = layer();
        let mut bytes = Vec::new();
        aenv_layers::zfile::compress(content.as_slice(), &mut bytes, ZFileOptions { block_bytes: 4096, ..ZFileOptions::default() }).unwrap();
        if tar {
            bytes = upstream(&bytes);
        }
        let at = place.index(bytes.len());
        bytes[at] ^= change;
        match open(bytes).and_then(|layer| support::content(layer.blob().as_ref())) {
            Ok(found) => prop_assert!(found == content, "byte {}", at),
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
    }

    #[test]
    fn noise_behind_a_tar_header_never_panics(noise in prop::collection::vec(any::<u8>(), 0..3000), size in 0..4000u64, kind in prop::sample::select(b"0xgL\0".to_vec())) {
        let mut bytes = header("a", kind, &format!("{size:011o}\0"));
        bytes.extend(noise);
        prop_assert!(open(bytes).is_err());
    }
}
