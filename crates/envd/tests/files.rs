//! /files, against a real daemon.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;

use serde_json::json;
use support::place::{Place, RAW, url};
use support::send_head;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    flate2::read::GzDecoder::new(bytes).read_to_end(&mut out).unwrap();
    out
}

/// A form whose parts are (filename as on the wire, content).
fn form(parts: &[(&str, &[u8])]) -> (String, Vec<u8>) {
    let mut body = Vec::new();
    for (name, content) in parts {
        body.extend_from_slice(b"--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"");
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(b"\"\r\nContent-Type: application/octet-stream\r\n\r\n");
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"--XX--\r\n");
    ("multipart/form-data; boundary=XX".into(), body)
}

#[test]
fn content_comes_back_as_it_was_sent() {
    let place = Place::new();
    let big: Vec<u8> = (0..1_500_000u32).flat_map(u32::to_le_bytes).collect();
    for (name, content) in [("empty", &b""[..]), ("sub/dir/ü b\nc", b"hello"), ("big", &big)] {
        let info = place.upload(name, content);
        assert_eq!(info[0]["path"], place.path(name));
        assert_eq!(info[0]["type"], "file");
        let answer = place.envd.get(&url(&place.path(name)), &[]);
        assert_eq!((answer.status, answer.body.len()), (200, content.len()));
        assert!(answer.body == content);
        assert_eq!(std::fs::metadata(place.path(name)).unwrap().mode() & 0o777, 0o644);
    }
}

#[test]
fn an_overwritten_file_keeps_its_inode_and_mode() {
    let place = Place::new();
    std::fs::write(place.path("f"), "a long old content").unwrap();
    std::os::unix::fs::symlink("f", place.path("link")).unwrap();
    let before = std::fs::metadata(place.path("f")).unwrap();
    place.upload("link", b"new");
    let after = std::fs::metadata(place.path("f")).unwrap();
    assert_eq!((before.ino(), before.mode()), (after.ino(), after.mode()));
    assert_eq!(std::fs::read(place.path("f")).unwrap(), b"new");
}

#[test]
fn a_form_writes_each_part_to_the_path_in_its_filename() {
    let place = Place::new();
    let names = [
        ("a/b/c.txt", "a/b/c.txt"),
        ("日本 ü.txt", "日本 ü.txt"),
        ("new%0Aline%22", "new\nline\""),
    ];
    let parts: Vec<(String, &[u8])> = names
        .iter()
        .map(|(wire, name)| (place.path(wire), name.as_bytes()))
        .collect();
    let parts: Vec<(&str, &[u8])> = parts.iter().map(|(wire, content)| (wire.as_str(), *content)).collect();
    let (kind, body) = form(&parts);
    let answer = place.envd.post("/files", &[("content-type", &kind)], &body);
    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    for (index, (_, name)) in names.iter().enumerate() {
        assert_eq!(answer.json()[index]["path"], place.path(name));
        assert_eq!(std::fs::read_to_string(place.path(name)).unwrap(), *name);
    }
}

#[test]
fn a_path_in_the_query_names_the_one_file_of_a_form() {
    let place = Place::new();
    let (kind, body) = form(&[("ignored", b"x")]);
    let answer = place
        .envd
        .post(&url(&place.path("there")), &[("content-type", &kind)], &body);
    assert_eq!(answer.json()[0]["path"], place.path("there"));
    let (kind, body) = form(&[("a", b"x"), ("b", b"y")]);
    let answer = place
        .envd
        .post(&url(&place.path("there")), &[("content-type", &kind)], &body);
    assert_eq!(answer.status, 400);
}

#[test]
fn compressed_bodies_are_unpacked_in_both_forms() {
    let place = Place::new();
    let text = b"text ".repeat(100_000);
    let headers = [RAW, ("content-encoding", "gzip")];
    let answer = place.envd.post(&url(&place.path("raw")), &headers, &gzip(&text));
    assert_eq!(answer.status, 200);
    assert!(std::fs::read(place.path("raw")).unwrap() == text);
    let (kind, body) = form(&[(&place.path("form"), &text)]);
    let headers = [("content-type", kind.as_str()), ("content-encoding", "gzip")];
    assert_eq!(place.envd.post("/files", &headers, &gzip(&body)).status, 200);
    assert!(std::fs::read(place.path("form")).unwrap() == text);
    let answer = place.envd.post(
        &url(&place.path("bad")),
        &[RAW, ("content-encoding", "gzip")],
        b"no gzip",
    );
    assert_eq!(answer.status, 400);
    assert!(!std::path::Path::new(&place.path("bad")).exists());
    let answer = place
        .envd
        .post(&url(&place.path("bad")), &[RAW, ("content-encoding", "br")], b"x");
    assert_eq!(answer.status, 400);
}

#[test]
fn a_download_is_compressed_when_gzip_is_asked_for() {
    let place = Place::new();
    let text = b"text ".repeat(200_000);
    place.upload("f", &text);
    let answer = place.envd.get(&url(&place.path("f")), &[("accept-encoding", "gzip")]);
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    assert!(answer.body.len() < text.len() / 10);
    assert!(gunzip(&answer.body) == text);
    place.upload("empty", b"");
    let empty = place
        .envd
        .get(&url(&place.path("empty")), &[("accept-encoding", "gzip")]);
    assert_eq!(gunzip(&empty.body), b"");
    let answer = place
        .envd
        .get(&url(&place.path("f")), &[("accept-encoding", "identity;q=0, br")]);
    assert_eq!((answer.status, answer.json()["code"].as_i64()), (406, Some(406)));
}

#[test]
fn ranges_are_answered_with_their_part() {
    let place = Place::new();
    place.upload("f", b"0123456789");
    let get = |range| place.envd.get(&url(&place.path("f")), &[("range", range)]);
    let part = get("bytes=2-4");
    assert_eq!((part.status, part.body.as_slice()), (206, &b"234"[..]));
    assert_eq!(part.header("content-range"), Some("bytes 2-4/10"));
    assert_eq!(part.header("content-disposition"), Some("inline; filename=\"f\""));
    assert_eq!(get("bytes=-3").body, b"789");
    let beyond = get("bytes=10-");
    assert_eq!(
        (beyond.status, beyond.header("content-range")),
        (416, Some("bytes */10"))
    );
    assert_eq!(get("bytes=0-1,4-5").body, b"0123456789");
}

#[test]
fn files_of_the_kernel_are_read_to_their_end() {
    let place = Place::new();
    let answer = place.envd.get(&url("/proc/self/status"), &[]);
    assert_eq!(answer.status, 200);
    assert!(String::from_utf8(answer.body).unwrap().contains("aenv-envd"));
    let maps = place.envd.get(&url("/proc/self/maps"), &[("accept-encoding", "gzip")]);
    assert!(String::from_utf8(gunzip(&maps.body)).unwrap().contains("[stack]"));
}

#[test]
fn what_cannot_be_downloaded_says_why() {
    let place = Place::new();
    let get = |path: &str| place.envd.get(&url(path), &[]);
    let missing = get(&place.path("nope"));
    assert_eq!(missing.status, 404);
    let text = format!("path '{}' does not exist", place.path("nope"));
    assert_eq!(missing.json(), json!({ "code": 404, "message": text }));
    assert_eq!(get(&place.path("")).status, 400);
    assert_eq!(get("/dev/zero").status, 400);
    let user = place
        .envd
        .get(&format!("{}&username=nobody-here", url("/etc/hostname")), &[]);
    assert_eq!(user.status, 401);
}

#[test]
fn what_cannot_be_uploaded_says_why() {
    let place = Place::new();
    place.upload("file", b"x");
    let post = |path: &str| place.envd.post(&url(path), &[RAW], b"x").status;
    assert_eq!(post(&place.path("")), 400);
    assert_eq!(post(&place.path("file/below")), 500);
    assert_eq!(place.envd.post("/files", &[RAW], b"x").status, 400);
    assert_eq!(
        place
            .envd
            .post(&url("/x"), &[("content-type", "text/plain")], b"x")
            .status,
        400
    );
    let (kind, _) = form(&[]);
    assert_eq!(
        place.envd.post("/files", &[("content-type", &kind)], b"broken").status,
        400
    );
}

#[test]
fn a_disk_that_cannot_hold_the_body_is_507_before_anything_is_lost() {
    let place = Place::new();
    place.upload("f", b"old");
    let mut stream = place.envd.connect();
    send_head(&mut stream, "POST", &url(&place.path("f")), &[RAW], Some(1 << 60));
    let (status, _) = support::read_head(&mut std::io::BufReader::new(stream));
    assert_eq!(status, 507);
    assert_eq!(std::fs::read(place.path("f")).unwrap(), b"old");
}

#[test]
fn an_upload_that_breaks_off_leaves_no_half_new_file() {
    let place = Place::new();
    let mut stream = place.envd.connect();
    send_head(&mut stream, "POST", &url(&place.path("half")), &[RAW], Some(1_000_000));
    stream.write_all(&[0; 600_000]).unwrap();
    let path = place.path("half");
    support::eventually("the file is begun", || std::path::Path::new(&path).exists());
    drop(stream);
    support::eventually("the file is removed", || !std::path::Path::new(&path).exists());
    assert_eq!(place.envd.get("/health", &[]).status, 204);
}

#[test]
fn a_client_that_sends_all_before_it_listens_still_learns_the_reason() {
    let place = Place::new();
    place.upload("file", b"x");
    let body = vec![0; 20_000_000];
    let target = url(&place.path("file/below"));
    for _ in 0..3 {
        let mut stream = place.envd.connect();
        send_head(&mut stream, "POST", &target, &[RAW], Some(body.len()));
        stream.write_all(&body).unwrap();
        let (status, _) = support::read_head(&mut std::io::BufReader::new(stream));
        assert_eq!(status, 500);
    }
}
