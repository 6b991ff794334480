//! `process.Process` as a client sees it, against a real daemon.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};

use serde_json::json;
use support::{Envd, Events, encode, envelope, eventually, is_alive, send_chunk, send_head, shell_message};

#[test]
fn a_command_tells_its_outputs_apart_and_its_exit_code() {
    let envd = Envd::start();
    let done = envd.shell("echo out; echo err >&2; exit 3");
    assert_eq!(
        (done.out().as_str(), done.err().as_str(), done.exit_code()),
        ("out\n", "err\n", 3)
    );
    assert_eq!(done.end.unwrap()["status"], "exit status 3");
    assert_eq!(done.frame, json!({}));
}

#[test]
fn commands_that_end_at_once_always_have_start_and_end() {
    let envd = Envd::start();
    for _ in 0..100 {
        let done = envd
            .start_process(&json!({ "process": { "cmd": "/bin/false" } }))
            .finish();
        assert_eq!(done.exit_code(), 1);
        assert!(done.pid > 0);
    }
}

#[test]
fn the_last_output_is_never_missing() {
    let envd = Envd::start();
    for round in 0..30 {
        let done = envd.shell("head -c 300000 /dev/zero; printf last; printf more >&2");
        assert_eq!(
            (done.stdout.len(), done.err().as_str()),
            (300_004, "more"),
            "round {round}"
        );
        assert!(done.stdout.ends_with(b"last"));
    }
}

#[test]
fn a_missing_command_is_127_with_its_name() {
    let envd = Envd::start();
    for cmd in ["no-such-command", "/no/such/command"] {
        let done = envd.start_process(&json!({ "process": { "cmd": cmd } })).finish();
        assert_eq!(done.exit_code(), 127);
        assert_eq!(done.err(), format!("{cmd}: command not found\n"));
        assert!(done.end.unwrap()["error"].as_str().unwrap().contains(cmd));
    }
}

#[test]
fn a_file_that_cannot_be_run_is_126() {
    let envd = Envd::start();
    let done = envd
        .start_process(&json!({ "process": { "cmd": "/etc/passwd" } }))
        .finish();
    assert_eq!(done.exit_code(), 126);
    assert_eq!(done.err(), "/etc/passwd: cannot execute: Permission denied\n");
}

#[test]
fn a_wrong_directory_user_or_command_is_an_error_without_a_process() {
    let envd = Envd::start();
    let error = |message| {
        let done = envd.start_process(&message).finish();
        assert_eq!(done.pid, 0);
        (
            done.error_code().to_owned(),
            done.frame["error"]["message"].as_str().unwrap().to_owned(),
        )
    };
    let (code, text) = error(json!({ "process": { "cmd": "true", "cwd": "/no/such" } }));
    assert_eq!(
        (code.as_str(), text.as_str()),
        ("invalid_argument", "cwd '/no/such' does not exist")
    );
    assert_eq!(error(json!({})).0, "invalid_argument");
    assert_eq!(error(json!({ "process": { "cmd": "a\u{0}b" } })).0, "invalid_argument");
    let headers = [("authorization", "Basic bm9ib2R5LWhlcmU6")];
    let done = envd
        .stream("process.Process/Start", &headers, &shell_message("true"))
        .finish();
    assert_eq!(done.error_code(), "unauthenticated");
    assert_eq!(done.frame["error"]["message"], "invalid username: 'nobody-here'");
}

#[test]
fn the_environment_is_the_sandbox_and_the_request_and_nothing_of_the_daemon() {
    let envd = Envd::start();
    envd.init(&json!({ "envVars": { "A": "sandbox", "B": "sandbox" }, "sandboxID": "sbx", "templateID": "tpl" }));
    let message = json!({ "process": { "cmd": "/usr/bin/env", "envs": { "B": "request" } } });
    let out = envd.start_process(&message).finish().out();
    for line in [
        "A=sandbox",
        "B=request",
        "E2B_SANDBOX=true",
        "E2B_SANDBOX_ID=sbx",
        "E2B_TEMPLATE_ID=tpl",
    ] {
        assert!(out.lines().any(|found| found == line), "{line} in {out}");
    }
    assert!(out.contains("PATH=") && out.contains("HOME=") && out.contains("LOGNAME="));
    assert!(!out.contains("ENVD_OWN_VARIABLE"));
}

#[test]
fn a_child_inherits_nothing_but_its_three_descriptors() {
    let envd = Envd::start();
    let line =
        "ls /proc/self/fd; grep SigBlk /proc/self/status; cat /proc/self/oom_score_adj; grep SigIgn /proc/self/status";
    let out = envd.shell(line).out();
    // ls itself opens one more descriptor.
    let (head, ignored) = out.split_once("SigIgn:\t").unwrap();
    assert_eq!(head, "0\n1\n2\n3\nSigBlk:\t0000000000000000\n100\n");
    // Signals that the test's own parents ignore are inherited by all; the daemon's SIGPIPE must not be.
    let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
    assert_eq!(ignored & (1 << (13 - 1)), 0);
}

#[test]
fn a_background_grandchild_that_holds_the_pipe_does_not_hold_the_command() {
    let envd = Envd::start();
    let done = envd.shell("sleep 1000 & echo $!");
    let grandchild: u64 = done.out().trim().parse().unwrap();
    assert_eq!(done.exit_code(), 0);
    assert!(is_alive(grandchild));
    envd.shell(&format!("kill -9 {grandchild}"));
}

#[test]
fn a_background_grandchild_that_writes_for_ever_neither_holds_nor_blocks() {
    let envd = Envd::start();
    let done = envd.shell("(trap '' PIPE; while :; do echo x; done) & echo $!");
    assert_eq!(done.exit_code(), 0);
    let grandchild: u64 = done.out().lines().find(|line| *line != "x").unwrap().parse().unwrap();
    let ticks = |pid: u64| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(' ').nth(38).unwrap().parse::<u64>().unwrap()
    };
    let before = ticks(grandchild);
    eventually("the grandchild goes on writing", || ticks(grandchild) > before + 2);
    envd.shell(&format!("kill -9 {grandchild}"));
}

#[test]
fn output_that_follows_the_exit_of_the_shell_closely_is_delivered() {
    let envd = Envd::start();
    let done = envd.shell("(sleep 0.02; echo late) &");
    assert_eq!((done.out().as_str(), done.exit_code()), ("late\n", 0));
}

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
fn stdin_is_sent_in_order_and_closed() {
    let envd = Envd::start();
    let mut events = envd.start_process(&json!({ "process": { "cmd": "/bin/cat" } }));
    let pid = events.pid();
    let selector = json!({ "pid": pid });
    for text in ["Hello, ", "ünï\n"] {
        let input = json!({ "process": selector, "input": { "stdin": encode(text.as_bytes()) } });
        envd.call("process.Process/SendInput", &input);
    }
    let pty = json!({ "process": selector, "input": { "pty": "eA==" } });
    assert_eq!(
        envd.call_error("process.Process/SendInput", &pty),
        "failed_precondition"
    );
    envd.call("process.Process/CloseStdin", &json!({ "process": selector }));
    let done = events.finish();
    assert_eq!((done.out().as_str(), done.exit_code()), ("Hello, ünï\n", 0));
}

#[test]
fn input_larger_than_a_pipe_waits_for_the_reader() {
    let envd = Envd::start();
    let mut events = envd.start_process(&json!({ "process": { "cmd": "/usr/bin/wc", "args": ["-c"] } }));
    let pid = events.pid();
    let input = json!({ "process": { "pid": pid }, "input": { "stdin": encode(&vec![b'x'; 3_000_000]) } });
    envd.call("process.Process/SendInput", &input);
    envd.call("process.Process/CloseStdin", &json!({ "process": { "pid": pid } }));
    assert_eq!(events.finish().out().trim(), "3000000");
}

#[test]
fn a_writer_is_released_when_the_process_ends() {
    let envd = Envd::start();
    let mut events = envd.start_process(&json!({ "process": { "cmd": "/bin/sleep", "args": ["1000"] } }));
    let pid = events.pid();
    let input = json!({ "process": { "pid": pid }, "input": { "stdin": encode(&vec![b'x'; 300_000]) } });
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| envd.call_error("process.Process/SendInput", &input));
        envd.call(
            "process.Process/SendSignal",
            &json!({ "process": { "pid": pid }, "signal": "SIGNAL_SIGKILL" }),
        );
        let code = writer.join().unwrap();
        assert!(code == "failed_precondition" || code == "not_found", "{code}");
    });
}

#[test]
fn without_stdin_a_process_reads_end_of_file() {
    let envd = Envd::start();
    let message = json!({ "process": { "cmd": "/bin/cat" }, "stdin": false });
    assert_eq!(envd.start_process(&message).finish().exit_code(), 0);
}

#[test]
fn an_input_stream_writes_its_messages() {
    let envd = Envd::start();
    let mut events = envd.start_process(&json!({ "process": { "cmd": "/bin/cat" } }));
    let pid = events.pid();
    let mut stream = envd.connect();
    let headers = [("content-type", "application/connect+json")];
    send_head(&mut stream, "POST", "/process.Process/StreamInput", &headers, None);
    for message in [
        json!({ "start": { "process": { "pid": pid } } }),
        json!({ "keepalive": {} }),
        json!({ "data": { "input": { "stdin": encode(b"one ") } } }),
        json!({ "data": { "input": { "stdin": encode(b"two") } } }),
    ] {
        send_chunk(&mut stream, &envelope(&message));
    }
    stream.write_all(b"0\r\n\r\n").unwrap();
    let mut answer = Events::open(stream);
    assert_eq!(answer.next_frame(), (0, json!({})));
    assert_eq!(answer.next_frame(), (2, json!({})));
    envd.call("process.Process/CloseStdin", &json!({ "process": { "pid": pid } }));
    assert_eq!(events.finish().out(), "one two");
}

#[test]
fn a_terminal_has_a_size_takes_input_and_ends() {
    let envd = Envd::start();
    let message = json!({
        "process": { "cmd": "/bin/sh", "args": ["-i"], "envs": { "PS1": "$ " } },
        "pty": { "size": { "cols": 81, "rows": 25 } },
    });
    let mut events = envd.start_process(&message);
    let pid = events.pid();
    let send = |text: &str| {
        let input = json!({ "process": { "pid": pid }, "input": { "pty": encode(text.as_bytes()) } });
        envd.call("process.Process/SendInput", &input);
    };
    send("stty size; tty; echo $LANG\n");
    let text = events.until("pty", "C.UTF-8");
    assert!(text.contains("25 81") && text.contains("/dev/pts/"), "{text}");
    envd.call(
        "process.Process/Update",
        &json!({ "process": { "pid": pid }, "pty": { "size": { "cols": 100, "rows": 40 } } }),
    );
    send("stty size\n");
    events.until("pty", "40 100");
    let close = json!({ "process": { "pid": pid } });
    assert_eq!(
        envd.call_error("process.Process/CloseStdin", &close),
        "failed_precondition"
    );
    send("exit 5\n");
    assert_eq!(events.finish().exit_code(), 5);
}

#[test]
fn end_of_file_typed_at_a_terminal_ends_the_shell() {
    let envd = Envd::start();
    let message = json!({ "process": { "cmd": "/bin/sh" }, "pty": { "size": { "cols": 80, "rows": 24 } } });
    let mut events = envd.start_process(&message);
    let pid = events.pid();
    let input = json!({ "process": { "pid": pid }, "input": { "pty": encode(b"\x04") } });
    envd.call("process.Process/SendInput", &input);
    assert_eq!(events.finish().exit_code(), 0);
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
fn orphans_and_many_processes_leave_no_zombie() {
    let envd = Envd::start();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..10 {
                    assert_eq!(envd.shell("true & true").exit_code(), 0);
                }
            });
        }
    });
    let out = envd.shell("cat /proc/$PPID/task/*/children").out();
    // The asking shell alone.
    eventually("all are reaped", || out.split_whitespace().count() == 1);
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
