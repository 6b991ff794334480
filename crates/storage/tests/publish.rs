//! Publishing against directories and against a store that misbehaves at each request in turn.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test, in helpers too")]

#[path = "../../store/tests/fake/mod.rs"]
mod fake;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aenv_layers::{Algorithm, Blob, FileBlob, Layer, LayerWriter, Uuid};
use aenv_storage::{
    Content, Failed, Patience, Progress, Publication, Published, Subject, Target, Verification, publish, verify,
};
use aenv_store::{BlockList, Cipher, DecryptedBlob, Descriptor, Digest, Encryption, Source};
use fake::s3::{FakeS3, Fault};

const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const KEY_BYTES: [u8; 32] = *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff\
    \x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff";
/// Smaller than any command line allows, so that a small layer has several parts.
const PART_BYTES: u64 = 100_000;

struct Setup {
    s3: FakeS3,
    dir: tempfile::TempDir,
}

fn setup() -> Setup {
    let setup = Setup {
        s3: FakeS3::start(),
        dir: tempfile::tempdir().unwrap(),
    };
    std::fs::write(setup.stores(), setup.s3.config(Some(KEY))).unwrap();
    setup
}

impl Setup {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn stores(&self) -> PathBuf {
        self.path("stores.json")
    }

    fn publication(&self, content: Content, target: Target) -> Publication {
        Publication {
            content,
            target,
            stores: Some(self.stores()),
            prefix: "layers/".into(),
            suffix: ".lsmt".into(),
            compress: None,
            encrypt: false,
            journal_dir: Some(self.path("uploads")),
            part_bytes: PART_BYTES,
            parallel: 2,
            patience: patience(),
        }
    }

    /// The publication of a layer of four parts to the bucket.
    fn to_bucket(&self) -> Publication {
        let layer = self.path("layer");
        if !layer.exists() {
            make_layer(&layer, 350_000);
        }
        self.publication(Content::Layer(layer), Target::Store("repository".into()))
    }

    /// A descriptor of what was published to the bucket.
    fn descriptor(&self, published: &Published) -> PathBuf {
        let object = |suffix: &str| Source::Object {
            store: "repository".into(),
            key: format!("layers/{}{suffix}", published.digest),
        };
        let blocks = published.blocks_digest.map(|digest| (object(".blocks"), digest));
        let encryption = published.encryption.map(|_| Encryption::Aes256Gcm);
        let descriptor = Descriptor::new(
            published.digest,
            published.size_bytes,
            object(".lsmt"),
            blocks,
            encryption,
        );
        let path = self.path("x.blob");
        std::fs::write(&path, descriptor.encode()).unwrap();
        path
    }

    fn verify(&self, subject: Subject) -> Result<aenv_storage::Verified, Failed> {
        let verification = Verification {
            subject,
            stores: Some(self.stores()),
            is_layer: true,
            patience: patience(),
        };
        verify(&verification, &silent())
    }
}

/// Short pauses, and a deadline that ends what never works.
fn patience() -> Patience {
    Patience {
        pause_first: Duration::from_millis(1),
        pause_max: Duration::from_millis(4),
        deadline: Duration::from_millis(60),
        attempt: Duration::from_secs(10),
    }
}

fn silent() -> Progress {
    Progress::new(std::io::sink())
}

fn run(publication: &Publication) -> Result<Published, Failed> {
    publish(publication, &silent())
}

fn make_layer(path: &Path, data_bytes: usize) {
    let sectors = data_bytes / 512;
    let mut writer = LayerWriter::create(path, 64 << 20, Uuid::NIL).unwrap();
    let data: Vec<u8> = (0..sectors * 512).map(|i| ((i / 97) ^ (i / 4096)) as u8).collect();
    let half = sectors / 2 * 512;
    writer.append(4096, &data[..half]).unwrap();
    writer.append_zero(16 << 20, 1 << 20).unwrap();
    writer.append(32 << 20, &data[half..]).unwrap();
    writer.finish().unwrap();
}

/// A layer that was sealed in place: its file is sparse.
fn make_sparse_layer(path: &Path) {
    let upper = aenv_layers::Upper::create(path, 8 << 20, Uuid::NIL).unwrap();
    upper.write_at(&[5; 70_000 / 512 * 512], 4 << 20).unwrap();
    upper.write_at(&[6; 4096], 512).unwrap();
    drop(upper);
    let stack = aenv_layers::Stack::open(&[], Some(path), 8 << 20).unwrap();
    stack.seal_upper(None).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

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

/// The stored object is whole, or it is not there; so says whoever asks for it.
fn assert_nothing_half_made(setup: &Setup, context: &str) {
    let bytes = std::fs::read(setup.path("layer")).unwrap();
    for (key, object) in &setup.s3.state().objects {
        if key.ends_with(".lsmt") {
            assert!(object.bytes == bytes, "{context}: {key}");
        } else {
            assert!(BlockList::decode(&object.bytes).is_ok(), "{context}: {key}");
        }
    }
}

#[test]
fn any_fault_at_any_request_ends_in_success_or_a_named_error_and_the_next_run_succeeds() {
    let requests = {
        let setup = setup();
        run(&setup.to_bucket()).unwrap();
        setup.s3.state().log.len()
    };
    let faults = [
        Fault::Internal,
        Fault::SlowDown,
        Fault::Cut,
        Fault::CutAfter,
        Fault::Truncated,
        Fault::WrongTag,
        Fault::ErrorInBody,
        Fault::Denied,
    ];
    for fault in faults {
        for at in 0..requests {
            let (setup, context) = (setup(), format!("{fault:?} at request {at}"));
            setup.s3.state().faults.insert(at, fault);
            let outcome = run(&setup.to_bucket());
            assert_nothing_half_made(&setup, &context);
            match outcome {
                Ok(published) => {
                    let key = format!("layers/{}.lsmt", published.digest);
                    assert!(setup.s3.object(&key).is_some(), "{context}");
                }
                Err(failed) => {
                    let kind = match fault {
                        Fault::Denied => "denied",
                        Fault::WrongTag => "corrupt",
                        _ => "none",
                    };
                    assert_eq!(failed.kind(), kind, "{context}: {}", aenv_storage::chain(&failed));
                }
            }
            run(&setup.to_bucket()).expect(&context);
            assert_nothing_half_made(&setup, &context);
            assert!(names(&setup.path("uploads")).is_empty(), "{context}");
        }
    }
}

#[test]
fn a_request_that_is_never_answered_is_given_up_and_sent_again() {
    for at in 0..8 {
        let setup = setup();
        setup.s3.state().faults.insert(at, Fault::Silence);
        let mut publication = setup.to_bucket();
        publication.patience.attempt = Duration::from_millis(300);
        run(&publication).unwrap_or_else(|failed| panic!("{at}: {}", aenv_storage::chain(&failed)));
    }
}

#[test]
fn a_store_that_stays_away_is_an_error_that_names_it_and_the_upload_goes_on_later() {
    let setup = setup();
    setup.s3.state().always = Some(("partNumber=3".into(), Fault::SlowDown));
    let failed = run(&setup.to_bucket()).unwrap_err();
    let text = aenv_storage::chain(&failed);
    assert_eq!(failed.kind(), "transient");
    assert!(
        text.starts_with("repository: layers/") && text.contains("503 SlowDown"),
        "{text}"
    );
    assert!(!setup.s3.state().objects.keys().any(|key| key.ends_with(".lsmt")));
    let sent = |number: usize| setup.s3.count("PUT", &format!("partNumber={number}&"));
    let before = [sent(1), sent(2)];
    setup.s3.state().always = None;
    run(&setup.to_bucket()).unwrap();
    assert_eq!([sent(1), sent(2)], before, "what the store had was sent again");
    assert_nothing_half_made(&setup, "after the outage");
}

#[test]
fn an_object_that_is_not_what_was_stored_is_an_error() {
    let setup = setup();
    setup.s3.state().always = Some(("HEAD".into(), Fault::WrongTag));
    let failed = run(&setup.to_bucket()).unwrap_err();
    assert!(matches!(failed, Failed::NotStored { .. }), "{failed}");
    assert_eq!(failed.kind(), "corrupt");
}

#[test]
fn an_upload_that_the_store_forgot_is_begun_anew() {
    let setup = setup();
    setup.s3.state().always = Some(("partNumber=4".into(), Fault::Denied));
    assert_eq!(run(&setup.to_bucket()).unwrap_err().kind(), "denied");
    let mut state = setup.s3.state();
    state.always = None;
    state.uploads.clear();
    drop(state);
    run(&setup.to_bucket()).unwrap();
    assert_eq!(setup.s3.count("POST", "?uploads"), 2);
    assert_nothing_half_made(&setup, "after the loss");
}

#[test]
fn a_part_that_is_not_what_the_journal_says_is_sent_again() {
    let setup = setup();
    setup.s3.state().always = Some(("partNumber=4".into(), Fault::Denied));
    run(&setup.to_bucket()).unwrap_err();
    let journal = setup.path("uploads").join(&names(&setup.path("uploads"))[0]);
    let text = std::fs::read_to_string(&journal).unwrap();
    let other = Digest::of(b"other").to_string();
    // The first part's digest is another one.
    let lines: Vec<String> = text
        .lines()
        .map(|line| match line.split_once("\"part\":0,") {
            Some((start, rest)) => {
                let (middle, _) = rest.rsplit_once("\"sha256\":").unwrap();
                format!("{start}\"part\":0,{middle}\"sha256\":\"{other}\"}}")
            }
            None => line.to_owned(),
        })
        .collect();
    assert!(lines.iter().any(|line| line.contains(&other)));
    std::fs::write(&journal, lines.join("\n") + "\n").unwrap();
    setup.s3.state().always = None;
    run(&setup.to_bucket()).unwrap();
    assert_eq!(
        (
            setup.s3.count("PUT", "partNumber=1&"),
            setup.s3.count("PUT", "partNumber=2&")
        ),
        (2, 1)
    );
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
fn every_form_of_stored_bytes_reads_back_as_the_layer() {
    for (compress, encrypt) in [
        (None, false),
        (Some(Algorithm::Lz4), false),
        (Some(Algorithm::Zstd), false),
        (None, true),
        (Some(Algorithm::Lz4), true),
    ] {
        for sparse in [false, true] {
            for to_bucket in [false, true] {
                read_back(compress, encrypt, sparse, to_bucket);
            }
        }
    }
}

fn read_back(compress: Option<Algorithm>, encrypt: bool, sparse: bool, to_bucket: bool) {
    let setup = setup();
    let layer = setup.path("layer");
    if sparse {
        make_sparse_layer(&layer)
    } else {
        make_layer(&layer, 350_000)
    }
    let plain = aenv_layers::digest(&layer).unwrap();
    let target = match to_bucket {
        true => Target::Store("repository".into()),
        false => Target::Directory(setup.path("repository")),
    };
    let mut publication = setup.publication(Content::Layer(layer), target);
    (publication.compress, publication.encrypt) = (compress, encrypt);
    let published = run(&publication).unwrap();
    let context = format!("{compress:?} encrypt {encrypt} sparse {sparse} bucket {to_bucket}");
    assert_eq!(published.plain_digest.to_string(), plain.digest, "{context}");
    assert_eq!(published.plain_size_bytes, plain.size_bytes, "{context}");
    assert_eq!(published.encryption.is_some(), encrypt, "{context}");
    assert_eq!(
        compress.is_some(),
        published.size_bytes < plain.size_bytes / 2,
        "{context}"
    );
    // Published again it has the same name: nothing in the stored bytes depends on chance.
    let again = run(&publication).unwrap();
    assert!(again.reused && again.digest == published.digest, "{context}");
    let name = format!("layers/{}.lsmt", published.digest);
    let (stored, subject) = match to_bucket {
        true => {
            let path = setup.path("fetched");
            std::fs::write(&path, setup.s3.object(&name).unwrap()).unwrap();
            (path, Subject::Descriptor(setup.descriptor(&published)))
        }
        false => {
            let path = setup.path("repository").join(name);
            let digest = Some(published.digest);
            (path.clone(), Subject::File { path, digest })
        }
    };
    let mut blob: Arc<dyn Blob> = Arc::new(FileBlob::open(&stored).unwrap());
    if encrypt {
        blob = Arc::new(DecryptedBlob::open(&stored, blob, &Cipher::new(KEY_BYTES)).unwrap());
    }
    let opened = Layer::open_blob(&stored, blob).unwrap();
    assert_eq!(
        aenv_layers::digest_layer(&opened).unwrap().digest,
        plain.digest,
        "{context}"
    );
    let verified = setup.verify(subject).expect(&context);
    assert_eq!(
        (verified.digest, verified.size_bytes),
        (published.digest, published.size_bytes),
        "{context}"
    );
    assert_eq!(verified.blocks.is_some(), to_bucket, "{context}");
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

#[test]
fn damage_is_found_and_named() {
    let setup = setup();
    let published = run(&setup.to_bucket()).unwrap();
    let descriptor = setup.descriptor(&published);
    let check = || setup.verify(Subject::Descriptor(descriptor.clone())).unwrap_err();
    let key = format!("layers/{}.lsmt", published.digest);
    let good = setup.s3.object(&key).unwrap();
    let mut bytes = good.to_vec();
    bytes[200_000] ^= 1;
    setup.s3.set_object(&key, &bytes);
    let text = aenv_storage::chain(&check());
    assert!(text.contains("x.blob") && text.contains("block 3"), "{text}");
    assert_eq!(check().kind(), "corrupt");
    setup.s3.set_object(&key, &good[..200_000]);
    assert_eq!(check().kind(), "transient");
    setup.s3.state().objects.remove(&key);
    assert_eq!(check().kind(), "not_found");
    setup.s3.set_object(&key, &good);
    let list = format!("layers/{}.blocks", published.digest);
    let mut bytes = setup.s3.object(&list).unwrap().to_vec();
    bytes[40] ^= 1;
    setup.s3.set_object(&list, &bytes);
    assert!(matches!(check(), Failed::WrongBlocks { .. }));
}

#[test]
fn damage_of_a_file_is_found_and_named() {
    let setup = setup();
    for (compress, encrypt) in [(None, false), (Some(Algorithm::Zstd), false), (None, true)] {
        let layer = setup.path("layer");
        if !layer.exists() {
            make_layer(&layer, 350_000);
        }
        let mut publication = setup.publication(Content::Layer(layer), Target::Directory(setup.path("repository")));
        (publication.compress, publication.encrypt) = (compress, encrypt);
        let published = run(&publication).unwrap();
        let path = setup
            .path("repository/layers")
            .join(format!("{}.lsmt", published.digest));
        let check = |digest| {
            setup.verify(Subject::File {
                path: path.clone(),
                digest,
            })
        };
        check(Some(published.digest)).unwrap();
        let good = std::fs::read(&path).unwrap();
        let mut bytes = good.clone();
        bytes[5000] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let failed = check(Some(published.digest)).unwrap_err();
        assert_eq!(failed.kind(), "corrupt", "{compress:?} {encrypt}: {failed}");
        // Compression and encryption have checksums of their own; the data of a plain layer has none.
        assert_eq!(
            check(None).is_err(),
            compress.is_some() || encrypt,
            "{compress:?} {encrypt}"
        );
        std::fs::write(&path, &good[..good.len() - 4096]).unwrap();
        assert_eq!(check(None).unwrap_err().kind(), "corrupt", "{compress:?} {encrypt}");
    }
}

#[test]
fn encryption_needs_its_key() {
    let setup = setup();
    let mut publication = setup.to_bucket();
    publication.encrypt = true;
    let published = run(&publication).unwrap();
    let descriptor = setup.descriptor(&published);
    let subject = || Subject::Descriptor(descriptor.clone());
    setup.verify(subject()).unwrap();
    std::fs::write(setup.stores(), setup.s3.config(Some(&KEY.replace("00", "01")))).unwrap();
    let wrong = setup.verify(subject()).unwrap_err();
    assert!(aenv_storage::chain(&wrong).contains("not the one that this was encrypted with"));
    assert_eq!(wrong.kind(), "invalid");
    std::fs::write(setup.stores(), setup.s3.config(None)).unwrap();
    assert!(matches!(setup.verify(subject()), Err(Failed::Encrypted { .. })));
    assert!(matches!(run(&publication), Err(Failed::NoKey)));
}
