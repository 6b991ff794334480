//! `filesystem.Filesystem`, against a real daemon.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::place::{Place, RAW, url};

#[test]
fn metadata_is_kept_with_the_file_and_replaced_by_the_next_upload() {
    // Attributes of users need a file system that has them; tmpfs has since Linux 6.6.
    let place = Place::new();
    let headers = [RAW, ("X-Metadata-Author", "mish"), ("x-metadata-purpose", "test")];
    let info = place.envd.post(&url(&place.path("f")), &headers, b"x").json();
    let want = json!({ "author": "mish", "purpose": "test" });
    assert_eq!(info[0]["metadata"], want);
    let entry = place.call(
        "Move",
        &json!({ "source": place.path("f"), "destination": place.path("n/g") }),
    );
    assert_eq!(entry["entry"]["metadata"], want);
    let again = place.upload("n/g", b"y");
    assert_eq!(again[0]["metadata"], Value::Null);
    assert_eq!(
        place.call("Stat", &json!({ "path": place.path("n/g") }))["entry"]["metadata"],
        Value::Null
    );
    let bad = place
        .envd
        .post(&url(&place.path("bad")), &[RAW, ("x-metadata-a", "ü")], b"x");
    assert_eq!(bad.status, 400);
    assert!(!std::path::Path::new(&place.path("bad")).exists());
}

#[test]
fn directories_are_made_listed_and_removed() {
    let place = Place::new();
    let path = place.path("d/sub");
    let made = place.call("MakeDir", &json!({ "path": path }));
    assert_eq!(made["entry"]["type"], "FILE_TYPE_DIRECTORY");
    assert_eq!(made["entry"]["permissions"], "drwxr-xr-x");
    assert_eq!(place.error("MakeDir", &json!({ "path": path })), "already_exists");
    place.upload("d/a", b"1234");
    assert_eq!(
        place.error("MakeDir", &json!({ "path": place.path("d/a") })),
        "invalid_argument"
    );
    assert_eq!(
        place.error("MakeDir", &json!({ "path": place.path("d/a/b") })),
        "invalid_argument"
    );
    std::os::unix::fs::symlink("d", place.path("link")).unwrap();
    place.upload("d/sub/deep", b"");
    let names = |path: &str, depth: u32| -> Vec<String> {
        let list = place.call("ListDir", &json!({ "path": path, "depth": depth }));
        let entries = list["entries"].as_array().unwrap();
        entries
            .iter()
            .map(|entry| entry["path"].as_str().unwrap().to_owned())
            .collect()
    };
    let link = place.path("link");
    assert_eq!(names(&link, 0), [format!("{link}/a"), format!("{link}/sub")]);
    assert_eq!(
        names(&link, 2),
        [format!("{link}/a"), format!("{link}/sub"), format!("{link}/sub/deep")]
    );
    assert_eq!(
        place.error("ListDir", &json!({ "path": place.path("d/a") })),
        "invalid_argument"
    );
    assert_eq!(
        place.error("ListDir", &json!({ "path": place.path("nope") })),
        "not_found"
    );
    assert_eq!(place.call("Remove", &json!({ "path": link })), json!({}));
    assert!(std::path::Path::new(&path).exists());
    place.call("Remove", &json!({ "path": place.path("d") }));
    assert!(!std::path::Path::new(&path).exists());
    assert_eq!(place.call("Remove", &json!({ "path": place.path("d") })), json!({}));
}

#[test]
fn an_entry_is_described_with_text_for_large_numbers() {
    let place = Place::new();
    place.upload("f", b"1234");
    let entry = place.call("Stat", &json!({ "path": place.path("f") }))["entry"].clone();
    assert_eq!(
        (entry["size"].as_str(), entry["mode"].as_u64()),
        (Some("4"), Some(0o644))
    );
    assert!(entry["modifiedTime"].as_str().unwrap().ends_with('Z'));
    assert_eq!(entry.get("isSymlink"), None);
    assert_eq!(place.error("Stat", &json!({ "path": place.path("nope") })), "not_found");
    assert_eq!(
        place.error("Move", &json!({ "source": place.path("nope"), "destination": "/x" })),
        "not_found"
    );
}

#[test]
fn watchers_are_told_to_be_missing() {
    let place = Place::new();
    for method in ["CreateWatcher", "GetWatcherEvents", "RemoveWatcher"] {
        assert_eq!(place.error(method, &json!({ "path": "/" })), "unimplemented");
    }
    let stream = place
        .envd
        .stream("filesystem.Filesystem/WatchDir", &[], &json!({ "path": "/" }))
        .finish();
    assert_eq!(stream.error_code(), "unimplemented");
}

#[test]
fn names_that_are_too_long_are_an_error_and_not_a_crash() {
    let place = Place::new();
    let long = place.path(&"n".repeat(300));
    assert_eq!(place.error("Stat", &json!({ "path": long })), "invalid_argument");
    assert_eq!(place.envd.post(&url(&long), &[RAW], b"x").status, 500);
    assert_eq!(place.error("Stat", &json!({ "path": "/a\u{0}b" })), "invalid_argument");
}
