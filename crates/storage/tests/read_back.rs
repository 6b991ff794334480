//! What was published reads back as what it was made of, damage to it is found and named, and encryption needs its key.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test, in helpers too")]

mod support;

use std::sync::Arc;

use aenv_layers::{Algorithm, Blob, FileBlob, Layer};
use aenv_storage::{Content, Failed, Subject, Target};
use aenv_store::{Cipher, DecryptedBlob};
use support::{KEY, make_layer, make_sparse_layer, run, setup};

const KEY_BYTES: [u8; 32] = *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff\
    \x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff";

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
