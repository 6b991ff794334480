//! What the tests of publishing and getting share: a fake bucket and a folder, layers to publish, and short patience.

// Not every test uses all of it.
#![allow(dead_code)]

#[path = "../../../store/tests/fake/mod.rs"]
pub mod fake;

use std::path::{Path, PathBuf};
use std::time::Duration;

use aenv_layers::{LayerWriter, Uuid};
use aenv_storage::{
    Content, Failed, Patience, Progress, Publication, Published, Subject, Target, Verification, publish, verify,
};
use aenv_store::{BlockList, Descriptor, Encryption, Source};

use fake::s3::FakeS3;

pub const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// Smaller than any command line allows, so that a small layer has several parts.
pub const PART_BYTES: u64 = 100_000;

pub struct Setup {
    pub s3: FakeS3,
    pub dir: tempfile::TempDir,
}

pub fn setup() -> Setup {
    let setup = Setup {
        s3: FakeS3::start(),
        dir: tempfile::tempdir().unwrap(),
    };
    std::fs::write(setup.stores(), setup.s3.config(Some(KEY))).unwrap();
    setup
}

impl Setup {
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn stores(&self) -> PathBuf {
        self.path("stores.json")
    }

    pub fn publication(&self, content: Content, target: Target) -> Publication {
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
    pub fn to_bucket(&self) -> Publication {
        let layer = self.path("layer");
        if !layer.exists() {
            make_layer(&layer, 350_000);
        }
        self.publication(Content::Layer(layer), Target::Store("repository".into()))
    }

    /// A descriptor of what was published to the bucket.
    pub fn descriptor(&self, published: &Published) -> PathBuf {
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

    pub fn verify(&self, subject: Subject) -> Result<aenv_storage::Verified, Failed> {
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
pub fn patience() -> Patience {
    Patience {
        pause_first: Duration::from_millis(1),
        pause_max: Duration::from_millis(4),
        deadline: Duration::from_millis(60),
        attempt: Duration::from_secs(10),
    }
}

pub fn silent() -> Progress {
    Progress::new(std::io::sink())
}

pub fn run(publication: &Publication) -> Result<Published, Failed> {
    publish(publication, &silent())
}

pub fn make_layer(path: &Path, data_bytes: usize) {
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
pub fn make_sparse_layer(path: &Path) {
    let upper = aenv_layers::Upper::create(path, 8 << 20, Uuid::NIL).unwrap();
    upper.write_at(&[5; 70_000 / 512 * 512], 4 << 20).unwrap();
    upper.write_at(&[6; 4096], 512).unwrap();
    drop(upper);
    let stack = aenv_layers::Stack::open(&[], Some(path), 8 << 20).unwrap();
    stack.seal_upper(None).unwrap();
}

pub fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// The stored object is whole, or it is not there; so says whoever asks for it.
pub fn assert_nothing_half_made(setup: &Setup, context: &str) {
    let bytes = std::fs::read(setup.path("layer")).unwrap();
    for (key, object) in &setup.s3.state().objects {
        if key.ends_with(".lsmt") {
            assert!(object.bytes == bytes, "{context}: {key}");
        } else {
            assert!(BlockList::decode(&object.bytes).is_ok(), "{context}: {key}");
        }
    }
}
