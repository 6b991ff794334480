//! Reads and writes of an S3 store that misbehaves.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test, in helpers too")]

mod fake;

use std::path::Path;
use std::time::Duration;

use aenv_store::{Failure, Source, StoreError, StoreErrorKind, Stores};
use bytes::Bytes;
use fake::s3::{FakeS3, Fault};

const TIMEOUT: Duration = Duration::from_secs(20);
const KEY: &str = "layers/a.lsmt";

struct Setup {
    s3: FakeS3,
    stores: Stores,
    dir: tempfile::TempDir,
}

fn setup() -> Setup {
    let (s3, dir) = (FakeS3::start(), tempfile::tempdir().unwrap());
    let path = dir.path().join("stores.json");
    std::fs::write(&path, s3.config(None)).unwrap();
    let stores = Stores::open(&path).unwrap();
    Setup { s3, stores, dir }
}

fn source() -> Source {
    Source::Object {
        store: "repository".into(),
        key: KEY.into(),
    }
}

impl Setup {
    /// Reads bytes 100..200 of an object of 1000 bytes with `fault` at that request.
    fn read(&self, fault: Option<Fault>, timeout: Duration) -> Result<Bytes, StoreError> {
        self.s3.set_object(KEY, &content());
        let at = self.s3.state().log.len();
        self.s3.state().faults = fault.into_iter().map(|fault| (at, fault)).collect();
        self.stores.ranged(&source())?.read(100, 100, timeout)
    }
}

fn content() -> Vec<u8> {
    (0..1000).map(|i| (i / 3) as u8).collect()
}

#[test]
fn a_part_is_read_with_one_request() {
    let setup = setup();
    assert_eq!(setup.read(None, TIMEOUT).unwrap(), content()[100..200]);
    assert_eq!(setup.s3.state().log, ["GET layers/a.lsmt"]);
}

#[test]
fn every_fault_of_an_answer_is_an_error_and_never_wrong_bytes() {
    let setup = setup();
    for fault in [
        Fault::Internal,
        Fault::SlowDown,
        Fault::Cut,
        Fault::CutAfter,
        Fault::Truncated,
        Fault::NotPartial,
        Fault::WrongRange,
    ] {
        let error = setup.read(Some(fault), TIMEOUT).expect_err(&format!("{fault:?}"));
        assert_eq!(error.kind(), StoreErrorKind::Transient, "{fault:?}: {error}");
        let text = error.to_string();
        assert!(
            text.starts_with("repository: layers/a.lsmt (bytes 100+100): "),
            "{text}"
        );
    }
    let slow = setup.read(Some(Fault::SlowDown), TIMEOUT).unwrap_err();
    assert!(matches!(slow.failure(), Failure::Status { status: 503, code: Some(code) } if code == "SlowDown"));
    let denied = setup.read(Some(Fault::Denied), TIMEOUT).unwrap_err();
    assert_eq!(denied.kind(), StoreErrorKind::Denied);
    assert_eq!(setup.read(None, TIMEOUT).unwrap().len(), 100);
}

#[test]
fn a_store_that_does_not_answer_costs_the_timeout() {
    let setup = setup();
    let after = Duration::from_millis(80);
    let error = setup.read(Some(Fault::Silence), after).unwrap_err();
    assert_eq!(error.failure(), &Failure::Timeout { after });
    assert_eq!(error.kind(), StoreErrorKind::Transient);
}

#[test]
fn an_object_shorter_than_the_range_is_an_error() {
    let setup = setup();
    setup.s3.set_object(KEY, &content());
    let ranged = setup.stores.ranged(&source()).unwrap();
    let error = ranged.read(950, 100, TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Transient, "{error}");
    assert_eq!(ranged.read(950, 50, TIMEOUT).unwrap(), content()[950..]);
    assert!(ranged.read(0, 0, TIMEOUT).unwrap().is_empty());
}

#[test]
fn the_read_that_meets_a_replaced_object_fails() {
    let setup = setup();
    setup.s3.set_object(KEY, &content());
    let ranged = setup.stores.ranged(&source()).unwrap();
    ranged.read(0, 10, TIMEOUT).unwrap();
    setup.s3.set_object(KEY, &[9; 1000]);
    let error = ranged.read(0, 10, TIMEOUT).unwrap_err();
    assert!(matches!(error.failure(), Failure::Replaced { .. }), "{error}");
    assert_eq!(ranged.read(0, 10, TIMEOUT).unwrap(), [9; 10][..]);
}

#[test]
fn a_whole_object_has_a_limit() {
    let setup = setup();
    setup.s3.set_object(KEY, &content());
    let ranged = setup.stores.ranged(&source()).unwrap();
    assert_eq!(ranged.read_whole(1000, TIMEOUT).unwrap(), content());
    let error = ranged.read_whole(999, TIMEOUT).unwrap_err();
    assert_eq!(
        error.failure(),
        &Failure::TooLarge {
            found: 1000,
            limit: 999
        }
    );
    setup.s3.state().objects.clear();
    assert_eq!(
        ranged.read_whole(1000, TIMEOUT).unwrap_err().kind(),
        StoreErrorKind::NotFound
    );
}

#[test]
fn a_changed_configuration_counts_from_the_next_read_on() {
    let setup = setup();
    setup.s3.set_object(KEY, &content());
    let ranged = setup.stores.ranged(&source()).unwrap();
    ranged.read(0, 10, TIMEOUT).unwrap();
    let path = setup.dir.path().join("stores.json");
    // Broken: what was there stays.
    replace(&path, "{");
    ranged.read(0, 10, TIMEOUT).unwrap();
    let other = FakeS3::start();
    replace(&path, &other.config(None));
    assert_eq!(
        ranged.read(0, 10, TIMEOUT).unwrap_err().kind(),
        StoreErrorKind::NotFound
    );
    replace(&path, r#"{"stores":{}}"#);
    let error = ranged.read(0, 10, TIMEOUT).unwrap_err();
    assert_eq!(error.failure(), &Failure::UnknownStore);
}

fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, path).unwrap();
}

#[test]
fn keys_that_would_leave_the_prefix_are_refused() {
    let setup = setup();
    for key in ["../other", "a//b", "./a", ""] {
        let source = Source::Object {
            store: "repository".into(),
            key: key.into(),
        };
        let outcome = setup
            .stores
            .ranged(&source)
            .and_then(|ranged| ranged.read(0, 1, TIMEOUT));
        let error = outcome.expect_err(key);
        let kinds = [StoreErrorKind::Invalid, StoreErrorKind::NotFound];
        assert!(kinds.contains(&error.kind()), "{key}: {error}");
    }
    let log = setup.s3.state().log.join(" ");
    assert!(!log.contains("other"), "{log}");
}

#[test]
fn an_upload_in_parts_appears_when_it_is_complete() {
    let setup = setup();
    let bucket = setup.stores.bucket("repository").unwrap();
    let upload = bucket.create_upload(KEY, TIMEOUT).unwrap();
    let part = |at: usize, byte: u8| {
        let bytes = Bytes::from(vec![byte; 1000]);
        bucket.put_part(KEY, &upload, at, bytes, TIMEOUT).unwrap()
    };
    let tags = [(1, 2), (0, 1)].map(|(at, byte)| part(at, byte));
    assert_eq!(bucket.head(KEY, TIMEOUT).unwrap_err().kind(), StoreErrorKind::NotFound);
    let [second, first] = tags;
    let etag = bucket.complete(KEY, &upload, vec![first, second], TIMEOUT).unwrap();
    let info = bucket.head(KEY, TIMEOUT).unwrap();
    assert_eq!((info.size_bytes, info.etag), (2000, etag));
    assert_eq!(
        bucket.abort(KEY, &upload, TIMEOUT).unwrap_err().kind(),
        StoreErrorKind::NotFound
    );
}
