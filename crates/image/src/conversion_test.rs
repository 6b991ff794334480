//! What whole conversions make, read back by our own reader and checked by e2fsck.

use std::fs;
use std::io::Cursor;
use std::path::Path;
use std::process::Command;

use aenv_layers::import_raw;

use crate::apply::{ApplyError, Request, apply_input};
use crate::dump::{materialise, stacked};
use crate::entries::EntryError;
use crate::input::{Compression, Input};
use crate::tar::Kind;
use crate::test_image::{DISK, Image, Item, archive, file, folder, item, link};
use crate::tree::TreeError;

fn paths(image: &Image) -> Vec<String> {
    image.tree().into_keys().collect()
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_of_their_own_layer() {
    let mut image = Image::new(DISK);
    image
        .apply(&archive(&[
            file("a/old", b"1"),
            file("a/keep", b"1"),
            file("b/c/old", b"1"),
            file("d", b"1"),
        ]))
        .unwrap();
    let second = [
        file("b/c/new", b"2"),
        item(Kind::Regular, "a/.wh.old", 0),
        item(Kind::Regular, "b/.wh..wh..opq", 0),
        file("d", b"2"),
        item(Kind::Regular, ".wh.d", 0),
        item(Kind::Regular, "nowhere/.wh.x", 0),
        item(Kind::Regular, ".wh.lost+found", 0),
    ];
    let report = image.apply(&archive(&second)).unwrap();
    assert_eq!((report.files, report.whiteouts), (2, 5));
    assert_eq!(paths(&image), ["a", "a/keep", "b", "b/c", "b/c/new", "d"]);
    assert_eq!(image.tree()["d"].content, b"2");
}

#[test]
fn equal_inputs_give_equal_bytes() {
    let image = Image::new(DISK);
    let items: Vec<Item> = (0..500)
        .map(|n| file(&format!("dir/file {n}"), &vec![n as u8; n * 7]))
        .collect();
    for name in ["one", "other"] {
        image.apply_as(name, &archive(&items)).unwrap();
    }
    let read = |name| std::fs::read(image.folder.path().join(name)).unwrap();
    assert!(read("one") == read("other"), "the layers differ");
}

#[test]
fn a_full_disk_says_how_much_is_missing() {
    let mut image = Image::new(DISK);
    let big = vec![1; 10 << 20];
    let items = archive(&[file("one", &big), file("two", &big), file("three", &big)]);
    let Err(ApplyError::DiskFull { missing, .. }) = image.apply(&items) else {
        panic!("30 MiB fitted in 16");
    };
    // 30 MiB were asked for, and somewhat less than 16 were there.
    assert!((14 << 20..=16 << 20).contains(&missing), "{missing}");
    assert_eq!(std::fs::read_dir(image.folder.path()).unwrap().count(), 0);
}

#[test]
fn a_disk_without_inodes_says_so_too() {
    let mut image = Image::new(DISK);
    let items: Vec<Item> = (0..2000).map(|n| file(&format!("{n}"), b"")).collect();
    assert!(matches!(
        image.apply(&archive(&items)),
        Err(ApplyError::DiskFull { .. })
    ));
}

#[test]
fn a_wrong_digest_leaves_no_layer() {
    let image = Image::new(DISK);
    let expected = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
        .parse()
        .unwrap();
    for wrong in [
        Request {
            expect_diff_id: Some(expected),
            ..image.request("x")
        },
        Request {
            expect_blob: Some(expected),
            ..image.request("x")
        },
    ] {
        let input = Input::start(
            Box::new(Cursor::new(archive(&[file("a", b"1")]))),
            Compression::None,
            1 << 20,
        );
        let error = apply_input(&wrong, input, &mut |_| {}).unwrap_err();
        assert!(matches!(error, ApplyError::DiffId { .. } | ApplyError::Blob { .. }));
    }
    assert_eq!(std::fs::read_dir(image.folder.path()).unwrap().count(), 0);
}

#[test]
fn a_large_directory_gets_an_index_and_loses_it_again() {
    let mut image = Image::new(64 << 20);
    let name = |n: usize| format!("many/a name that takes some room in its block {n}");
    let items: Vec<Item> = (0..3000).map(|n| link(Kind::Symlink, &name(n), "t")).collect();
    image.apply(&archive(&items)).unwrap();
    assert_eq!(paths(&image).len(), 3001);
    image
        .apply(&archive(&[link(Kind::HardLink, "last", &name(2999))]))
        .unwrap();
    assert_eq!(paths(&image).len(), 3002);
    let gone: Vec<Item> = (0..2990)
        .map(|n| file(&name(n).replace("many/", "many/.wh."), b""))
        .collect();
    image.apply(&archive(&gone)).unwrap();
    assert_eq!(paths(&image).len(), 12);
}

#[test]
fn a_file_in_many_pieces_keeps_its_content() {
    let mut image = Image::new(DISK);
    // Every second block is freed, so that the large file must take the holes.
    let small: Vec<Item> = (0..800).map(|n| file(&format!("small/{n}"), &[7; 10_000])).collect();
    image.apply(&archive(&small)).unwrap();
    let gone: Vec<Item> = (0..800)
        .step_by(2)
        .map(|n| file(&format!("small/.wh.{n}"), b""))
        .collect();
    image.apply(&archive(&gone)).unwrap();
    let large: Vec<u8> = (0..9_000_001u32).map(|n| (n % 251) as u8).collect();
    image.apply(&archive(&[file("large", &large)])).unwrap();
    assert!(image.tree()["large"].content == large, "the content differs");
    image.apply(&archive(&[folder("large", 0o755)])).unwrap();
    assert_eq!(image.tree()["large"].kind, Kind::Directory);
}

#[test]
fn hostile_entries_are_refused_by_name() {
    let mut image = Image::new(DISK);
    image
        .apply(&archive(&[
            folder("d", 0o755),
            link(Kind::Symlink, "loop", "loop"),
            file("f", b""),
        ]))
        .unwrap();
    type Expected = fn(&TreeError) -> bool;
    let cases: [(Item, Expected); 5] = [
        (link(Kind::HardLink, "x", "d"), |e| {
            matches!(e, TreeError::LinkToDirectory)
        }),
        (link(Kind::HardLink, "x", "../../etc/none"), |e| {
            matches!(e, TreeError::LinkTargetMissing)
        }),
        (file("loop/x", b""), |e| matches!(e, TreeError::Path(_))),
        (file("lost+found", b""), |e| matches!(e, TreeError::RescueFolder)),
        (link(Kind::Symlink, "x", ""), |e| {
            matches!(e, TreeError::TargetLength { .. })
        }),
    ];
    for (hostile, expected) in cases {
        let error = image.apply(&archive(std::slice::from_ref(&hostile))).unwrap_err();
        let ApplyError::Entry(EntryError::Apply { source, .. }) = &error else {
            panic!("{hostile:?}: {error}");
        };
        assert!(expected(source), "{hostile:?}: {source}");
    }
    assert_eq!(image.layers.len(), 1);
}

/// The disk of an image as a plain file, for tools and damage.
pub fn raw_disk(image: &Image, size: u64) -> std::path::PathBuf {
    let mut device = stacked(&image.layers, size, image.folder.path()).unwrap();
    materialise(&mut device).unwrap();
    let path = image.folder.path().join("disk");
    fs::copy(
        format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(device.scratch())),
        &path,
    )
    .unwrap();
    path
}

#[test]
fn what_only_the_journal_holds_is_in_a_dump() {
    let size = 128 << 20;
    let mut image = Image::new(size);
    image.apply(&archive(&[file("file", &[1; 4096])])).unwrap();
    let disk = raw_disk(&image, size);
    let content = fs::read(&disk).unwrap();
    let block = content.chunks(4096).position(|block| block == [1; 4096]).unwrap();
    drop(content);
    let new = image.folder.path().join("new");
    fs::write(&new, [2; 4096]).unwrap();
    let commands = image.folder.path().join("commands");
    fs::write(
        &commands,
        format!(
            "journal_open\njournal_write -b {block} {}\njournal_close\n",
            new.display()
        ),
    )
    .unwrap();
    let program = ["/sbin/debugfs", "/usr/sbin/debugfs"]
        .into_iter()
        .find(|path| Path::new(path).exists());
    let done = Command::new(program.unwrap())
        .arg("-w")
        .arg("-f")
        .arg(&commands)
        .arg(&disk)
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    image.layers = vec![image.folder.path().join("crashed.lsmt")];
    import_raw(&disk, &image.layers[0]).unwrap();
    assert_eq!(image.tree()["file"].content, [2; 4096]);
}
