//! Single promises of the interface, one test each.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use aenv_layers::{
    Error, ErrorKind, Extent, ExtentKind, Layer, LayerWriter, MAX_SEGMENT_SECTORS, Registry, Stack, Upper, Uuid,
    import_raw, merge, remove_upper,
};

const SECTOR: u64 = 512;
const MIB: u64 = 1 << 20;

fn layer(path: &Path, size: u64, data: &[(u64, u8)]) -> PathBuf {
    let mut writer = LayerWriter::create(path, size, Uuid::NIL).unwrap();
    for &(sector, value) in data {
        writer.append(sector * SECTOR, &[value; SECTOR as usize]).unwrap();
    }
    writer.finish().unwrap();
    path.to_owned()
}

#[test]
fn an_empty_stack_reads_zeros_and_refuses_writes() {
    let stack = Stack::open(&[], None, MIB).unwrap();
    let mut buf = [7; 4096];
    stack.read_at(&mut buf, MIB - 4096).unwrap();
    assert_eq!(buf, [0; 4096]);
    assert!(stack.is_zero(0, MIB));
    assert!(matches!(stack.write_at(&[0; 512], 0), Err(Error::ReadOnly)));
    assert!(matches!(stack.seal_upper(None), Err(Error::ReadOnly)));
}

#[test]
fn ranges_are_checked_without_overflow() {
    let folder = tempfile::tempdir().unwrap();
    let stack = Stack::open(&[], Some(&folder.path().join("u")), MIB).unwrap();
    let mut buf = [0; 1024];
    assert!(matches!(
        stack.read_at(&mut buf[..100], 0),
        Err(Error::Unaligned { .. })
    ));
    assert!(matches!(stack.read_at(&mut buf, 1), Err(Error::Unaligned { .. })));
    assert!(matches!(
        stack.read_at(&mut buf, MIB - 512),
        Err(Error::OutOfRange { .. })
    ));
    assert!(matches!(
        stack.write_at(&buf, u64::MAX - 511),
        Err(Error::OutOfRange { .. })
    ));
    assert!(matches!(
        stack.discard(512, u64::MAX - 511),
        Err(Error::OutOfRange { .. })
    ));
    assert_eq!(stack.write_at(&buf[..1], 0).unwrap_err().kind(), ErrorKind::Invalid);
    assert!(!stack.is_zero(0, 2 * MIB));
    stack.write_at(&[], 0).unwrap();
    stack.discard(MIB, 0).unwrap();
}

#[test]
fn rewriting_and_discarding_do_not_grow_the_upper() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("u");
    let upper = Upper::create(&path, 4 * MIB, Uuid::NIL).unwrap();
    let blocks = || std::fs::metadata(&path).unwrap().blocks();
    upper.write_at(&vec![1; MIB as usize], 0).unwrap();
    let once = blocks();
    for value in 2..10 {
        upper.write_at(&vec![value; MIB as usize], 0).unwrap();
    }
    assert_eq!(blocks(), once);
    upper.discard(0, MIB).unwrap();
    assert!(blocks() < once / 4, "{} of {once} blocks left", blocks());
}

#[test]
fn a_discard_hides_the_layer_below_also_after_a_seal_and_a_merge() {
    let folder = tempfile::tempdir().unwrap();
    let name = |name: &str| folder.path().join(name);
    let base = layer(&name("base"), MIB, &[(0, 9), (1, 9), (2, 9)]);
    let stack = Stack::open(std::slice::from_ref(&base), Some(&name("a")), MIB).unwrap();
    stack.discard(SECTOR, SECTOR).unwrap();
    stack.seal_upper(Some(&name("b"))).unwrap();
    stack.write_at(&[8; 512], 2 * SECTOR).unwrap();
    stack.seal_upper(None).unwrap();
    assert_eq!(stack.upper_path(), None);
    assert_eq!(stack.layers(), [name("base"), name("a"), name("b")]);
    // The merged pair is still a difference: over the base it hides sector 1 and leaves sector 0 alone.
    merge(&[name("a"), name("b")], &name("merged")).unwrap();
    for layers in [
        vec![base.clone(), name("a"), name("b")],
        vec![base.clone(), name("merged")],
    ] {
        let mut buf = [7; 3 * 512];
        Stack::open(&layers, None, MIB).unwrap().read_at(&mut buf, 0).unwrap();
        assert_eq!((buf[0], buf[512], buf[1024]), (9, 0, 8));
    }
    assert!(matches!(Layer::open(&name("merged")).unwrap().segments(), [a, b] if a.is_zero() && !b.is_zero()));
}

#[test]
fn a_lower_may_be_smaller_than_the_stack_but_not_larger() {
    let folder = tempfile::tempdir().unwrap();
    let base = layer(&folder.path().join("base"), 2 * SECTOR, &[(1, 5)]);
    let stack = Stack::open(std::slice::from_ref(&base), None, 4 * SECTOR).unwrap();
    let mut buf = [7; 3 * 512];
    stack.read_at(&mut buf, SECTOR).unwrap();
    assert_eq!((buf[0], buf[512], buf[1535]), (5, 0, 0));
    assert!(matches!(
        Stack::open(&[base], None, SECTOR),
        Err(Error::SizeMismatch {
            found: 1024,
            stack: 512,
            ..
        })
    ));
}

#[test]
fn an_upper_of_another_size_or_a_sealed_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("u");
    drop(Upper::create(&path, MIB, Uuid::NIL).unwrap());
    assert!(matches!(
        Stack::open(&[], Some(&path), 2 * MIB),
        Err(Error::SizeMismatch { .. })
    ));
    let upper = Upper::open(&path).unwrap();
    upper.seal().unwrap();
    assert!(matches!(upper.write_at(&[0; 512], 0), Err(Error::Sealed { .. })));
    assert!(matches!(upper.seal(), Err(Error::Sealed { .. })));
    assert!(matches!(Stack::open(&[], Some(&path), MIB), Err(Error::Sealed { .. })));
}

#[test]
fn at_most_255_layers_make_a_stack() {
    let folder = tempfile::tempdir().unwrap();
    let layers: Vec<_> = (0..255u64)
        .map(|number| {
            layer(
                &folder.path().join(number.to_string()),
                MIB,
                &[(number, number as u8 + 1)],
            )
        })
        .collect();
    let upper = folder.path().join("upper");
    let stack = Stack::open(&layers, Some(&upper), MIB).unwrap();
    let mut buf = vec![0; 256 * 512];
    stack.read_at(&mut buf, 0).unwrap();
    assert!((0..255).all(|number| buf[number * 512 + 511] == number as u8 + 1));
    let next = folder.path().join("next");
    let error = stack.seal_upper(Some(&next)).unwrap_err();
    assert!(matches!(error, Error::TooManyLayers { count: 256, limit: 255 }));
    assert!(!next.exists());
    stack.write_at(&[1; 512], 0).unwrap();
    let too_many: Vec<_> = layers.iter().chain(&layers[..1]).cloned().collect();
    assert!(matches!(
        Stack::open(&too_many, None, MIB),
        Err(Error::TooManyLayers { .. })
    ));
}

#[test]
fn a_seal_that_cannot_make_its_successor_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("u");
    let stack = Stack::open(&[], Some(&path), MIB).unwrap();
    stack.write_at(&[3; 512], 0).unwrap();
    let taken = folder.path().join("taken");
    std::fs::write(&taken, b"something else").unwrap();
    assert!(matches!(stack.seal_upper(Some(&taken)), Err(Error::Exists { .. })));
    assert_eq!(std::fs::read(&taken).unwrap(), b"something else");
    stack.write_at(&[4; 512], 0).unwrap();
    assert_eq!(stack.upper_path(), Some(path));
    assert!(stack.layers().is_empty());
}

#[test]
fn stacks_of_one_registry_share_files_and_indexes() {
    let folder = tempfile::tempdir().unwrap();
    let base = layer(&folder.path().join("base"), MIB, &[(0, 1)]);
    let top = layer(&folder.path().join("top"), MIB, &[(1, 2)]);
    let descriptors = || {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
            .filter(|target| target.starts_with(folder.path()))
            .count()
    };
    let registry = Registry::new();
    let layers = [base.clone(), top];
    let stacks: Vec<_> = (0..50)
        .map(|_| Stack::open_with(&registry, &layers, None, MIB).unwrap())
        .collect();
    // Each layer's own and, where the file system has them, one for direct reads.
    let of_two_layers = descriptors();
    assert!(of_two_layers == 2 || of_two_layers == 4, "{of_two_layers}");
    // Another name of the same file is the same layer.
    let alias = folder.path().join("alias");
    std::fs::hard_link(&base, &alias).unwrap();
    let other = Stack::open_with(&registry, &[alias], None, MIB).unwrap();
    assert_eq!(descriptors(), of_two_layers);
    drop((stacks, other));
    assert_eq!(descriptors(), 0);
}

#[test]
fn extents_join_neighbours_of_one_kind() {
    let folder = tempfile::tempdir().unwrap();
    let base = layer(&folder.path().join("base"), MIB, &[(0, 1), (1, 1), (9, 1)]);
    let stack = Stack::open(&[base], Some(&folder.path().join("u")), MIB).unwrap();
    stack.write_at(&[0; 512], 2 * SECTOR).unwrap();
    stack.discard(9 * SECTOR, SECTOR).unwrap();
    let extent = |offset, length, kind| Extent {
        offset: offset * SECTOR,
        length: length * SECTOR,
        kind,
    };
    let expected = [extent(0, 3, ExtentKind::Data), extent(3, 2045, ExtentKind::Zero)];
    assert_eq!(stack.extents(0, MIB).unwrap(), expected);
    assert!(stack.is_zero(3 * SECTOR, MIB - 3 * SECTOR));
    assert!(!stack.is_zero(2 * SECTOR, SECTOR), "data of zeros is not surely zero");
}

#[test]
fn a_writer_joins_adjacent_runs_and_splits_long_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let size = 64 * MIB;
    let mut writer = LayerWriter::create(&path, size, Uuid::NIL).unwrap();
    writer.append(0, &[1; 512]).unwrap();
    writer.append(512, &vec![2; 3 * MIB as usize]).unwrap();
    writer.append_zero(4 * MIB, 40 * MIB).unwrap();
    assert!(matches!(
        writer.append(43 * MIB, &[1; 512]),
        Err(Error::OutOfOrder { .. })
    ));
    assert!(matches!(writer.append(size, &[1; 512]), Err(Error::OutOfRange { .. })));
    let layer = writer.finish().unwrap();
    let lengths: Vec<_> = layer.segments().iter().map(|s| s.sectors()).collect();
    let rest = 40 * MIB / SECTOR - 5 * MAX_SEGMENT_SECTORS;
    assert_eq!(lengths[0], 3 * MIB / SECTOR + 1);
    assert_eq!(lengths[1..6], [MAX_SEGMENT_SECTORS; 5]);
    assert_eq!(lengths[6..], [rest]);
}

#[test]
fn a_writer_that_is_dropped_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let mut writer = LayerWriter::create(&path, MIB, Uuid::NIL).unwrap();
    assert!(matches!(
        LayerWriter::create(&path, MIB, Uuid::NIL),
        Err(Error::Exists { .. })
    ));
    writer.reserve(MIB, 1).unwrap();
    writer.append(0, &[1; 512]).unwrap();
    assert_eq!(Layer::open(&path).unwrap_err().kind(), ErrorKind::Corrupt);
    drop(writer);
    assert!(!path.exists());
}

#[test]
fn finishing_gives_unused_reserved_space_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let mut writer = LayerWriter::create(&path, 64 * MIB, Uuid::NIL).unwrap();
    writer.reserve(32 * MIB, 8192).unwrap();
    assert_eq!(writer.reserve(u64::MAX, 1).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(writer.reserve(1 << 50, 1).unwrap_err().kind(), ErrorKind::NoSpace);
    writer.append(0, &[1; 4096]).unwrap();
    writer.finish().unwrap();
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < MIB);
}

#[test]
fn an_import_leaves_zeros_out_and_keeps_an_odd_tail() {
    let folder = tempfile::tempdir().unwrap();
    let (raw, into) = (folder.path().join("raw"), folder.path().join("layer"));
    let mut image = vec![0u8; 3 * MIB as usize + 700];
    image[MIB as usize + 5000] = 1;
    image[3 * MIB as usize + 699] = 2;
    std::fs::write(&raw, &image).unwrap();
    // A hole, too.
    let file = std::fs::OpenOptions::new().write(true).open(&raw).unwrap();
    file.set_len(8 * MIB + 1).unwrap();
    image.resize(8 * MIB as usize + 512, 0);
    let report = import_raw(&raw, &into).unwrap();
    assert_eq!((report.size_bytes, report.data_bytes), (8 * MIB + 512, 8192));
    let mut found = vec![7; image.len()];
    Stack::open(std::slice::from_ref(&into), None, image.len() as u64)
        .unwrap()
        .read_at(&mut found, 0)
        .unwrap();
    assert!(found == image);
    assert!(matches!(import_raw(&raw, &into), Err(Error::Exists { .. })));
    assert!(matches!(
        import_raw(folder.path(), &folder.path().join("x")),
        Err(Error::NotAFile { .. })
    ));
    assert_eq!(
        import_raw(&folder.path().join("no"), &into).unwrap_err().kind(),
        ErrorKind::NotFound
    );
}

#[test]
fn the_chain_of_parents_follows_seals_and_merges() {
    let folder = tempfile::tempdir().unwrap();
    let name = |name: &str| folder.path().join(name);
    let base = layer(&name("base"), MIB, &[(0, 9)]);
    let stack = Stack::open(std::slice::from_ref(&base), Some(&name("a")), MIB).unwrap();
    stack.seal_upper(Some(&name("b"))).unwrap();
    stack.seal_upper(None).unwrap();
    let [base, a, b] = [base, name("a"), name("b")].map(|path| Layer::open(&path).unwrap());
    assert_eq!((a.parent(), b.parent()), (base.uuid(), a.uuid()));
    let merged = merge(&[name("a"), name("b")], &name("merged")).unwrap().layer;
    assert_eq!((merged.parent(), merged.uuid()), (base.uuid(), b.uuid()));
}

#[test]
fn removing_an_upper_takes_all_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("u");
    Upper::create(&path, MIB, Uuid::NIL).unwrap();
    remove_upper(&path).unwrap();
    remove_upper(&path).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
