//! Getting a file back out of a directory and a bucket: plain, encrypted, damaged, and without the right key.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test, in helpers too")]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use aenv_storage::{Content, Failed, Fetch, Fetched, Publication, Published, Subject, Target, chain, get, publish};
use aenv_store::{Descriptor, Encryption, Source};
use support::fake::s3::FakeS3;
use support::{KEY, PART_BYTES, patience, silent};

const OTHER: &str = "ff112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

struct Setup {
    s3: FakeS3,
    dir: tempfile::TempDir,
    /// Longer than a chunk of the encryption.
    content: Vec<u8>,
}

fn setup() -> Setup {
    let setup = Setup {
        s3: FakeS3::start(),
        dir: tempfile::tempdir().unwrap(),
        content: (0..200_001_u32).map(|at| ((at * 31) >> 3) as u8).collect(),
    };
    setup.configure(Some(KEY));
    std::fs::write(setup.path("state"), &setup.content).unwrap();
    setup
}

impl Setup {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn configure(&self, key: Option<&str>) {
        std::fs::write(self.path("stores.json"), self.s3.config(key)).unwrap();
    }

    /// Publishes the state; also the descriptor of what was published.
    fn put(&self, target: Target, encrypt: bool) -> (Published, PathBuf) {
        let publication = Publication {
            content: Content::File(self.path("state")),
            target: target.clone(),
            stores: Some(self.path("stores.json")),
            prefix: "states/".into(),
            suffix: ".state".into(),
            compress: None,
            encrypt,
            journal_dir: Some(self.path("uploads")),
            part_bytes: PART_BYTES,
            parallel: 2,
            patience: patience(),
        };
        let published = publish(&publication, &silent()).unwrap();
        let key = format!("states/{}.state", published.digest);
        let source = match target {
            Target::Directory(folder) => Source::File { path: folder.join(key) },
            Target::Store(store) => Source::Object { store, key },
        };
        let encryption = published.encryption.map(|_| Encryption::Aes256Gcm);
        let descriptor = Descriptor::new(published.digest, published.size_bytes, source, None, encryption);
        let path = self.path("x.blob");
        std::fs::write(&path, descriptor.encode()).unwrap();
        (published, path)
    }

    fn targets(&self) -> [Target; 2] {
        [
            Target::Directory(self.path("repository")),
            Target::Store("repository".into()),
        ]
    }

    fn get(&self, subject: Subject) -> Result<Fetched, Failed> {
        let fetch = Fetch {
            subject,
            stores: Some(self.path("stores.json")),
            into: self.path("got/state"),
            patience: patience(),
        };
        get(&fetch, &silent())
    }

    /// Names in the folder that things are fetched into.
    fn got(&self) -> usize {
        std::fs::read_dir(self.path("got")).map_or(0, |entries| entries.count())
    }
}

#[test]
fn what_was_put_comes_back_for_its_owner_alone() {
    let setup = setup();
    for target in setup.targets() {
        for encrypt in [false, true] {
            let (published, descriptor) = setup.put(target.clone(), encrypt);
            // Whatever an earlier process left there.
            std::fs::create_dir_all(setup.path("got")).unwrap();
            std::fs::write(setup.path("got/state"), b"torn").unwrap();
            let fetched = setup.get(Subject::Descriptor(descriptor)).unwrap();
            assert_eq!(
                (fetched.digest, fetched.size_bytes),
                (published.digest, published.size_bytes)
            );
            assert_eq!(fetched.plain_digest, published.plain_digest);
            assert_eq!(fetched.plain_size_bytes, setup.content.len() as u64);
            let path = setup.path("got/state");
            assert_eq!(std::fs::read(&path).unwrap(), setup.content);
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(setup.got(), 1);
        }
    }
}

#[test]
fn a_file_says_itself_whether_it_is_encrypted() {
    let setup = setup();
    let folder = setup.path("repository");
    for encrypt in [false, true] {
        let (published, _) = setup.put(Target::Directory(folder.clone()), encrypt);
        let path = folder.join(format!("states/{}.state", published.digest));
        let subject = Subject::File {
            path,
            digest: Some(published.digest),
        };
        setup.get(subject).unwrap();
        assert_eq!(std::fs::read(setup.path("got/state")).unwrap(), setup.content);
    }
}

#[test]
fn without_the_right_key_nothing_is_written_and_the_setting_is_named() {
    let setup = setup();
    for target in setup.targets() {
        let (_, descriptor) = setup.put(target, true);
        for key in [None, Some(OTHER)] {
            setup.configure(key);
            let failed = setup.get(Subject::Descriptor(descriptor.clone())).unwrap_err();
            assert_eq!(failed.kind(), "invalid");
            let text = chain(&failed);
            assert!(text.contains("snapshot.encryption_key_file"), "{text}");
            assert_eq!(setup.got(), 0);
        }
        setup.configure(Some(KEY));
    }
}

#[test]
fn damage_is_found_before_anything_is_written() {
    let setup = setup();
    let folder = setup.path("repository");
    for encrypt in [false, true] {
        let (published, descriptor) = setup.put(Target::Directory(folder.clone()), encrypt);
        let path = folder.join(format!("states/{}.state", published.digest));
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[150_000] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let failed = setup.get(Subject::Descriptor(descriptor)).unwrap_err();
        assert_eq!(failed.kind(), "corrupt", "{failed}");
        // Without a name only the encryption can tell.
        let unnamed = setup.get(Subject::File { path, digest: None });
        assert_eq!(unnamed.is_err(), encrypt);
    }
}

#[test]
fn what_must_be_encrypted_is_not_taken_in_plain() {
    let setup = setup();
    let (published, descriptor) = setup.put(Target::Directory(setup.path("repository")), false);
    let path = setup.path(&format!("repository/states/{}.state", published.digest));
    let source = Source::File { path };
    let claims = Descriptor::new(
        published.digest,
        published.size_bytes,
        source,
        None,
        Some(Encryption::Aes256Gcm),
    );
    std::fs::write(&descriptor, claims.encode()).unwrap();
    let failed = setup.get(Subject::Descriptor(descriptor)).unwrap_err();
    assert_eq!(failed.kind(), "corrupt", "{failed}");
}
