//! The program itself: killed in the middle it goes on next time, its output is what the server reads, its status tells.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test, in helpers too")]

#[path = "../../store/tests/fake/mod.rs"]
mod fake;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use aenv_layers::{LayerWriter, Uuid};
use fake::s3::{FakeS3, Fault};
use serde_json::Value;

const MIB: usize = 1 << 20;
const PARTS: usize = 10;
const WAIT_MAX: Duration = Duration::from_secs(60);

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_aenv-storage"))
}

/// A layer of ten parts of 8 MiB, the smallest that the command line allows.
fn make_layer(path: &Path) {
    let mut writer = LayerWriter::create(path, 1 << 30, Uuid::NIL).unwrap();
    let mut chunk = vec![0; MIB];
    for at in 0..PARTS * 8 - 1 {
        chunk
            .iter_mut()
            .enumerate()
            .for_each(|(i, byte)| *byte = ((i / 512) ^ at) as u8);
        writer.append((at * MIB) as u64, &chunk).unwrap();
    }
    writer.finish().unwrap();
}

struct Setup {
    s3: FakeS3,
    dir: tempfile::TempDir,
}

impl Setup {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn publish(&self) -> Command {
        let mut command = program();
        command.arg("publish").arg("--layer").arg(self.path("layer"));
        command.arg("--stores").arg(self.path("stores.json"));
        command.args(["--store", "repository", "--part-bytes", "8388608", "--parallel", "2"]);
        command.arg("--journal-dir").arg(self.path("uploads"));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

/// A child that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < WAIT_MAX, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn json(line: &[u8]) -> Value {
    serde_json::from_slice(line).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(line)))
}

fn last_line(output: &Output) -> Value {
    json(
        output
            .stderr
            .trim_ascii_end()
            .rsplit(|&byte| byte == b'\n')
            .next()
            .unwrap(),
    )
}

#[test]
fn a_killed_upload_goes_on_where_it_was() {
    let setup = Setup {
        s3: FakeS3::start(),
        dir: tempfile::tempdir().unwrap(),
    };
    std::fs::write(setup.path("stores.json"), setup.s3.config(None)).unwrap();
    make_layer(&setup.path("layer"));
    setup.s3.state().always = Some(("partNumber=7".into(), Fault::Silence));
    let child = Killed(setup.publish().spawn().unwrap());
    // Two workers: one hangs on the seventh part, the other one sends the rest and waits for it.
    let lines = |setup: &Setup| {
        let journal = std::fs::read_dir(setup.path("uploads")).ok()?.next()?.ok()?.path();
        Some(std::fs::read_to_string(journal).ok()?.lines().count())
    };
    until("nine parts in the journal", || lines(&setup) == Some(PARTS));
    drop(child);
    assert!(setup.s3.state().objects.keys().all(|key| key.ends_with(".blocks")));

    setup.s3.state().always = None;
    let output = setup.publish().output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result = json(&output.stdout);
    let key = format!("layers/{}.lsmt", result["digest"].as_str().unwrap());
    assert_eq!(
        setup.s3.object(&key).unwrap(),
        std::fs::read(setup.path("layer")).unwrap()
    );
    assert_eq!(result["reused"], false);
    for number in 1..=PARTS {
        let sent = setup.s3.count("PUT", &format!("partNumber={number}&"));
        assert_eq!(sent, if number == 7 { 2 } else { 1 }, "part {number}");
    }
    assert_eq!(setup.s3.count("POST", "?uploads"), 1);
    assert_eq!(std::fs::read_dir(setup.path("uploads")).unwrap().count(), 0);
    let last = last_line(&output);
    assert!(
        last["done_bytes"].as_u64().unwrap() <= last["total_bytes"].as_u64().unwrap(),
        "{last}"
    );
}

#[test]
fn the_status_tells_what_kind_of_end_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let usage = program().arg("publish").output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
    let missing = program()
        .arg("digest")
        .arg("--layer")
        .arg(dir.path().join("none"))
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(1));
    assert!(missing.stdout.is_empty());
    let error = &last_line(&missing)["error"];
    assert_eq!(error["kind"], "not_found");
    assert!(
        error["message"].as_str().unwrap().contains("none: open failed"),
        "{error}"
    );
}

#[test]
fn a_compacted_layer_has_the_digest_of_the_sparse_one() {
    let dir = tempfile::tempdir().unwrap();
    let (sparse, dense) = (dir.path().join("sparse"), dir.path().join("dense"));
    let upper = aenv_layers::Upper::create(&sparse, 8 << 20, Uuid::NIL).unwrap();
    upper.write_at(&[5; 8192], 4 << 20).unwrap();
    drop(upper);
    let stack = aenv_layers::Stack::open(&[], Some(&sparse), 8 << 20).unwrap();
    stack.seal_upper(None).unwrap();
    let digest = |path: &Path| {
        json(
            &program()
                .arg("digest")
                .arg("--layer")
                .arg(path)
                .output()
                .unwrap()
                .stdout,
        )
    };
    let compact = || {
        program()
            .arg("compact")
            .arg("--layer")
            .arg(&sparse)
            .arg("--into")
            .arg(&dense)
            .output()
            .unwrap()
    };
    assert_eq!(json(&compact().stdout)["data_bytes"], 8192);
    let (before, after) = (digest(&sparse), digest(&dense));
    assert_eq!(
        (&before["digest"], &before["sparse"]),
        (&after["digest"], &Value::Bool(true))
    );
    assert_eq!(after["sparse"], false);
    assert_eq!(
        std::fs::metadata(&dense).unwrap().len(),
        after["size_bytes"].as_u64().unwrap()
    );
    assert_eq!(last_line(&compact())["error"]["kind"], "exists");
}
