//! `process.Process`: what runs, with which surroundings, and what is told of its output and end, against a real daemon.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::json;
use support::{Envd, eventually, is_alive, shell_message};

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
