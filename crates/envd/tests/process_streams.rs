//! `process.Process`: streams of events that are dropped, resumed, late or slow, and finding the process again.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};

use serde_json::json;
use support::{Envd, envelope, eventually, is_alive, send_head, shell_message};

#[test]
fn a_dropped_stream_leaves_the_process_and_its_output() {
    let envd = Envd::start();
    let dir = tempfile::tempdir().unwrap();
    let gate = dir.path().join("gate");
    let line = format!(
        "echo before; while [ ! -e {} ]; do sleep 0.01; done; echo after",
        gate.display()
    );
    let mut events = envd.start_process(&shell_message(&line));
    let pid = events.pid();
    assert_eq!(events.data("stdout"), b"before\n");
    events.cut();
    std::fs::write(&gate, "").unwrap();
    let connect = json!({ "process": { "pid": pid } });
    let done = envd.stream("process.Process/Connect", &[], &connect).finish();
    assert_eq!(
        (done.pid, done.out().as_str(), done.exit_code()),
        (pid, "before\nafter\n", 0)
    );
    let again = envd.stream("process.Process/Connect", &[], &connect).finish();
    assert_eq!((again.out().as_str(), again.exit_code()), ("before\nafter\n", 0));
}

#[test]
fn a_reset_right_after_the_request_leaves_a_known_process() {
    let envd = Envd::start();
    let message = json!({ "process": { "cmd": "/bin/sleep", "args": ["1000"] }, "tag": "orphan" });
    let body = envelope(&message);
    let mut stream = envd.connect();
    let headers = [("content-type", "application/connect+json")];
    send_head(
        &mut stream,
        "POST",
        "/process.Process/Start",
        &headers,
        Some(body.len()),
    );
    stream.write_all(&body).unwrap();
    drop(stream);
    let kill = json!({ "process": { "tag": "orphan" }, "signal": "SIGNAL_SIGKILL" });
    eventually("the process is found by its tag", || {
        envd.try_call("process.Process/SendSignal", &kill).status == 200
    });
}

#[test]
fn a_process_is_listed_signalled_and_then_not_found() {
    let envd = Envd::start();
    let message = json!({ "process": { "cmd": "/bin/sleep", "args": ["1000"] }, "tag": "t" });
    let mut events = envd.start_process(&message);
    let pid = events.pid();
    let list = envd.call("process.Process/List", &json!({}));
    let entry = &list["processes"][0];
    assert_eq!((entry["pid"].as_u64(), entry["tag"].as_str()), (Some(pid), Some("t")));
    assert_eq!(entry["config"]["args"], json!(["1000"]));
    envd.call(
        "process.Process/SendSignal",
        &json!({ "process": { "tag": "t" }, "signal": "SIGNAL_SIGTERM" }),
    );
    let done = events.finish();
    let end = done.end.clone().unwrap();
    assert_eq!(
        (done.exit_code(), end["status"].as_str()),
        (-1, Some("signal: terminated"))
    );
    assert_eq!(end["exited"], false);
    for method in ["SendSignal", "SendInput", "Update", "CloseStdin"] {
        let message = json!({ "process": { "pid": pid }, "signal": "SIGNAL_SIGKILL" });
        assert_eq!(
            envd.call_error(&format!("process.Process/{method}"), &message),
            "not_found"
        );
    }
    let wrong = json!({ "process": { "pid": pid }, "signal": "SIGNAL_SIGHUP" });
    assert_eq!(
        envd.call_error("process.Process/SendSignal", &wrong),
        "invalid_argument"
    );
    assert_eq!(
        envd.call("process.Process/List", &json!({})),
        json!({ "processes": [] })
    );
}

#[test]
fn a_timeout_kills_the_whole_group_and_keeps_the_partial_output() {
    let envd = Envd::start();
    let message = shell_message("sleep 1000 & echo $!; wait");
    let done = envd
        .stream("process.Process/Start", &[("connect-timeout-ms", "200")], &message)
        .finish();
    assert_eq!(done.error_code(), "deadline_exceeded");
    assert!(done.end.is_none());
    let grandchild: u64 = done.out().trim().parse().unwrap();
    eventually("the grandchild is gone", || !is_alive(grandchild));
    let late = envd
        .stream(
            "process.Process/Connect",
            &[],
            &json!({ "process": { "pid": done.pid } }),
        )
        .finish();
    assert_eq!(
        (late.exit_code(), late.end.unwrap()["status"].as_str()),
        (-1, Some("signal: killed"))
    );
}

#[test]
fn a_timeout_of_zero_or_less_means_none() {
    let envd = Envd::start();
    for timeout in ["0", "-5", ""] {
        let headers = [("connect-timeout-ms", timeout)];
        let done = envd
            .stream("process.Process/Start", &headers, &shell_message("sleep 0.05"))
            .finish();
        assert_eq!(done.exit_code(), 0);
    }
}

#[test]
fn the_deadline_of_connect_ends_the_stream_and_not_the_process() {
    let envd = Envd::start();
    let mut events = envd.start_process(&json!({ "process": { "cmd": "/bin/sleep", "args": ["1000"] } }));
    let pid = events.pid();
    let connect = json!({ "process": { "pid": pid } });
    let done = envd
        .stream("process.Process/Connect", &[("connect-timeout-ms", "50")], &connect)
        .finish();
    assert_eq!(done.error_code(), "deadline_exceeded");
    assert!(is_alive(pid));
    envd.call(
        "process.Process/SendSignal",
        &json!({ "process": { "pid": pid }, "signal": 9 }),
    );
    assert_eq!(events.finish().end.unwrap()["status"], "signal: killed");
}

#[test]
fn connect_to_an_unknown_process_is_not_found() {
    let envd = Envd::start();
    let error = |selector| {
        envd.stream("process.Process/Connect", &[], &json!({ "process": selector }))
            .finish()
            .error_code()
            .to_owned()
    };
    assert_eq!(error(json!({ "pid": 999_999_999 })), "not_found");
    assert_eq!(error(json!({ "tag": "nobody" })), "not_found");
    assert_eq!(error(json!({})), "invalid_argument");
}

#[test]
fn a_reader_that_pauses_gets_every_byte() {
    let envd = Envd::start();
    let size = 20_000_000;
    let mut events = envd.start_process(&shell_message(&format!("head -c {size} /dev/zero")));
    let pid = events.pid();
    // The process fills ring and sockets and is then held; it must not end before it is read.
    eventually("the writer is held", || {
        let wchan = std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        wchan.contains("pipe") || stat.contains(") S ")
    });
    assert_eq!(events.finish().stdout.len(), size);
}

#[test]
fn output_beyond_the_ring_is_replayed_from_where_it_is_still_held() {
    let envd = Envd::start();
    let events = envd.start_process(&shell_message("head -c 5000000 /dev/zero; echo end"));
    let done = events.finish();
    assert_eq!(done.stdout.len(), 5_000_004);
    let late = envd
        .stream(
            "process.Process/Connect",
            &[],
            &json!({ "process": { "pid": done.pid } }),
        )
        .finish();
    assert!(late.stdout.len() > 900_000 && late.stdout.len() <= 1 << 20);
    assert!(late.stdout.ends_with(b"end\n"));
}

#[test]
fn keepalives_come_at_the_interval_of_the_client() {
    let envd = Envd::start();
    let headers = [("keepalive-ping-interval", "1")];
    let done = envd
        .stream("process.Process/Start", &headers, &shell_message("sleep 1.2"))
        .finish();
    assert_eq!((done.keepalives, done.exit_code()), (1, 0));
}

#[test]
fn a_new_life_drops_the_connections_of_the_old_one_and_keeps_the_processes() {
    let envd = Envd::start();
    envd.init(&json!({ "lifecycleID": "one" }));
    let mut events = envd.start_process(&json!({ "process": { "cmd": "/bin/sleep", "args": ["1000"] } }));
    let pid = events.pid();
    envd.init(&json!({ "lifecycleID": "one" }));
    assert!(is_alive(pid));
    envd.init(&json!({ "lifecycleID": "two" }));
    let mut rest = Vec::new();
    let cut = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rest.push(events.next_frame())));
    assert!(cut.is_err(), "{rest:?}");
    let mut again = envd.stream("process.Process/Connect", &[], &json!({ "process": { "pid": pid } }));
    assert_eq!(again.pid(), pid);
    envd.call(
        "process.Process/SendSignal",
        &json!({ "process": { "pid": pid }, "signal": 9 }),
    );
    assert_eq!(again.finish().exit_code(), -1);
}

#[test]
fn what_is_not_understood_is_refused_in_the_right_form() {
    let envd = Envd::start();
    let unary = |path, kind, body: &[u8]| envd.post(path, &[("content-type", kind)], body);
    let unknown = unary("/process.Process/Nope", "application/json", b"{}");
    assert_eq!(
        (unknown.status, unknown.json()["code"].as_str()),
        (501, Some("unimplemented"))
    );
    let broken = unary("/process.Process/List2", "application/proto", b"");
    assert_eq!((broken.status, broken.json()["code"].as_i64()), (415, Some(415)));
    let bad = unary("/process.Process/SendInput", "application/json", b"{");
    assert_eq!(
        (bad.status, bad.json()["code"].as_str()),
        (400, Some("invalid_argument"))
    );
    let stream = envd.stream("process.Process/Nope", &[], &json!({})).finish();
    assert_eq!(stream.error_code(), "unimplemented");
    assert_eq!(envd.get("/process.Process/List", &[]).status, 405);
    assert_eq!(envd.get("/nope", &[]).json()["code"], 404);
    let mut raw = envd.connect();
    raw.write_all(b"\x00garbage\r\n\r\n").unwrap();
    let mut text = Vec::new();
    let _ = raw.read_to_end(&mut text);
    assert_eq!(envd.get("/health", &[]).status, 204);
}
