//! Publishing when nothing goes wrong: what is stored, what is reused, and who of several does it.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test, in helpers too")]

mod support;

use std::time::Duration;

use aenv_storage::{Content, Subject, Target};
use aenv_store::{BlockList, Digest};
use support::{make_layer, names, run, setup};

#[test]
fn a_layer_becomes_an_object_in_parts_with_its_block_list() {
    let setup = setup();
    let published = run(&setup.to_bucket()).unwrap();
    let bytes = std::fs::read(setup.path("layer")).unwrap();
    assert_eq!(published.digest, Digest::of(&bytes));
    assert_eq!(
        (published.digest, published.size_bytes),
        (published.plain_digest, bytes.len() as u64)
    );
    let key = format!("layers/{}", published.digest);
    assert_eq!(setup.s3.object(&format!("{key}.lsmt")).unwrap(), bytes);
    let list = setup.s3.object(&format!("{key}.blocks")).unwrap();
    assert_eq!(Some(Digest::of(&list)), published.blocks_digest);
    let list = BlockList::decode(&list).unwrap();
    for (block, bytes) in (0..).zip(bytes.chunks(65536)) {
        list.verify(block, bytes).unwrap();
    }
    assert_eq!(setup.s3.count("PUT", "partNumber"), 4);
    // The list is there before the object.
    let log = setup.s3.state().log.clone();
    let at = |text: &str| log.iter().position(|line| line.contains(text)).unwrap();
    assert!(at(".blocks") < at("?uploads"), "{log:?}");
    assert!(names(&setup.path("uploads")).is_empty());
    assert!(setup.s3.state().uploads.is_empty());
}

#[test]
fn what_is_there_is_not_sent_again() {
    let setup = setup();
    let first = run(&setup.to_bucket()).unwrap();
    let puts = setup.s3.count("PUT", "") + setup.s3.count("POST", "");
    let second = run(&setup.to_bucket()).unwrap();
    assert!(!first.reused && second.reused);
    assert_eq!(second.digest, first.digest);
    assert_eq!(setup.s3.count("PUT", "") + setup.s3.count("POST", ""), puts);
    // A lost block list comes back, the object stays.
    setup
        .s3
        .state()
        .objects
        .remove(&format!("layers/{}.blocks", first.digest));
    assert!(run(&setup.to_bucket()).unwrap().reused);
    assert!(setup.s3.object(&format!("layers/{}.blocks", first.digest)).is_some());
}

#[test]
fn small_blobs_are_one_put() {
    let setup = setup();
    let file = setup.path("state");
    std::fs::write(&file, b"device state").unwrap();
    let mut publication = setup.publication(Content::File(file), Target::Store("repository".into()));
    (publication.prefix, publication.suffix) = ("states/".into(), ".state".into());
    let published = run(&publication).unwrap();
    assert_eq!(published.digest, Digest::of(b"device state"));
    assert_eq!(published.blocks_digest, None);
    let key = format!("states/{}.state", published.digest);
    assert_eq!(setup.s3.object(&key).unwrap(), &b"device state"[..]);
    assert_eq!((setup.s3.count("PUT", ""), setup.s3.count("POST", "")), (1, 0));
}

#[test]
fn two_at_once_send_a_blob_once() {
    let setup = setup();
    let mut publication = setup.to_bucket();
    publication.patience.deadline = Duration::from_secs(20);
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let workers = [0; 3].map(|_| scope.spawn(|| run(&publication).unwrap()));
        workers.map(|worker| worker.join().unwrap()).into()
    });
    assert_eq!(outcomes.iter().filter(|published| !published.reused).count(), 1);
    assert_eq!(setup.s3.count("PUT", "partNumber"), 4);
}

#[test]
fn a_directory_holds_the_blob_and_nothing_else() {
    let setup = setup();
    let layer = setup.path("layer");
    make_layer(&layer, 350_000);
    let publication = setup.publication(
        Content::Layer(layer.clone()),
        Target::Directory(setup.path("repository")),
    );
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let workers = [0; 4].map(|_| scope.spawn(|| run(&publication).unwrap()));
        workers.map(|worker| worker.join().unwrap()).into()
    });
    assert_eq!(outcomes.iter().filter(|published| !published.reused).count(), 1);
    let folder = setup.path("repository/layers");
    let name = format!("{}.lsmt", outcomes[0].digest);
    assert_eq!(names(&folder), [name.as_str()]);
    assert_eq!(std::fs::read(folder.join(name)).unwrap(), std::fs::read(layer).unwrap());
    assert!(names(&setup.path("uploads")).is_empty());
}

#[test]
fn a_directory_without_encryption_needs_no_configuration() {
    let setup = setup();
    let layer = setup.path("layer");
    make_layer(&layer, 350_000);
    std::fs::remove_file(setup.stores()).unwrap();
    let publication = setup.publication(Content::Layer(layer), Target::Directory(setup.path("repository")));
    let published = run(&publication).unwrap();
    let path = setup
        .path("repository/layers")
        .join(format!("{}.lsmt", published.digest));
    let digest = Some(published.digest);
    setup.verify(Subject::File { path, digest }).unwrap();
}
