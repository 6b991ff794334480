//! `process.Process`: what a process is given to read, through a pipe or at a terminal.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::Write;

use serde_json::json;
use support::{Envd, Events, encode, envelope, send_chunk, send_head};

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
