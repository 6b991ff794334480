//! A daemon of its own for each test, and a client that shows every byte of the protocol.

// Each test binary uses a part of this.
#![allow(dead_code, clippy::unwrap_used)]

pub mod place;

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// Longer than any test has to wait; a hang becomes a failure.
const READ_MAX: Duration = Duration::from_secs(20);

/// `aenv-envd --serve` on a free port; ended when dropped.
#[derive(Debug)]
pub struct Envd {
    child: Child,
    pub port: u16,
}

impl Drop for Envd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }
}

impl Envd {
    /// Started, with the current user as default, so that the tests need no root.
    pub fn start() -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_aenv-envd"))
            .args(["--serve", "--port", "0"])
            .env("ENVD_OWN_VARIABLE", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let port = line.split_whitespace().nth(4).unwrap().parse().unwrap();
        let envd = Envd { child, port };
        envd.init(&json!({ "defaultUser": rustix::process::getuid().as_raw().to_string(), "defaultWorkdir": "/" }));
        envd
    }

    pub fn init(&self, message: &Value) {
        let answer = self.post("/init", &[], message.to_string().as_bytes());
        assert_eq!(answer.status, 204, "{}", String::from_utf8_lossy(&answer.body));
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(READ_MAX)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    pub fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = self.connect();
        send_head(&mut stream, method, path, headers, Some(body.len()));
        // A refused body may be cut off; the answer says why.
        let _ = stream.write_all(body);
        let mut reader = BufReader::new(stream);
        let (status, headers) = read_head(&mut reader);
        let body = if status == 204 {
            Vec::new()
        } else {
            read_body(&mut reader, &headers)
        };
        Answer { status, headers, body }
    }

    pub fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.request("GET", path, headers, b"")
    }

    pub fn post(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.request("POST", path, headers, body)
    }

    /// A unary call that is expected to work.
    pub fn call(&self, method: &str, message: &Value) -> Value {
        let answer = self.try_call(method, message);
        assert_eq!(
            answer.status,
            200,
            "{method}: {}",
            String::from_utf8_lossy(&answer.body)
        );
        answer.json()
    }

    pub fn try_call(&self, method: &str, message: &Value) -> Answer {
        let headers = [("content-type", "application/json")];
        self.post(&format!("/{method}"), &headers, message.to_string().as_bytes())
    }

    /// Code of a unary call that is expected to fail.
    pub fn call_error(&self, method: &str, message: &Value) -> String {
        let answer = self.try_call(method, message);
        assert_ne!(answer.status, 200);
        answer.json()["code"].as_str().unwrap().to_owned()
    }

    pub fn stream(&self, method: &str, headers: &[(&str, &str)], message: &Value) -> Events {
        let mut stream = self.connect();
        let mut all = vec![("content-type", "application/connect+json")];
        all.extend_from_slice(headers);
        let body = envelope(message);
        send_head(&mut stream, "POST", &format!("/{method}"), &all, Some(body.len()));
        stream.write_all(&body).unwrap();
        Events::open(stream)
    }

    pub fn start_process(&self, message: &Value) -> Events {
        self.stream("process.Process/Start", &[], message)
    }

    /// Runs a shell line to its end.
    pub fn shell(&self, line: &str) -> Finished {
        self.start_process(&shell_message(line)).finish()
    }
}

pub fn shell_message(line: &str) -> Value {
    json!({ "process": { "cmd": "/bin/sh", "args": ["-c", line] }, "stdin": false })
}

pub fn envelope(message: &Value) -> Vec<u8> {
    let payload = message.to_string();
    let mut out = vec![0];
    out.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes());
    out.extend_from_slice(payload.as_bytes());
    out
}

pub fn send_head(stream: &mut TcpStream, method: &str, path: &str, headers: &[(&str, &str)], length: Option<usize>) {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    match length {
        Some(length) => head.push_str(&format!("content-length: {length}\r\n\r\n")),
        None => head.push_str("transfer-encoding: chunked\r\n\r\n"),
    }
    stream.write_all(head.as_bytes()).unwrap();
}

pub fn send_chunk(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(format!("{:x}\r\n", bytes.len()).as_bytes()).unwrap();
    stream.write_all(bytes).unwrap();
    stream.write_all(b"\r\n").unwrap();
}

pub fn read_head(reader: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line
        .split(' ')
        .nth(1)
        .unwrap_or_else(|| panic!("no status in {line:?}"))
        .parse()
        .unwrap();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    (status, headers)
}

fn read_body(reader: &mut impl BufRead, headers: &[(String, String)]) -> Vec<u8> {
    let mut body = Vec::new();
    if headers
        .iter()
        .any(|(name, value)| name == "transfer-encoding" && value == "chunked")
    {
        while let Some(chunk) = read_chunk(reader) {
            body.extend(chunk);
        }
    } else if let Some((_, length)) = headers.iter().find(|(name, _)| name == "content-length") {
        body.resize(length.parse().unwrap(), 0);
        reader.read_exact(&mut body).unwrap();
    }
    body
}

fn read_chunk(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let length = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|_| panic!("stream cut: {line:?}"));
    let mut chunk = vec![0; length + 2];
    reader.read_exact(&mut chunk).unwrap();
    chunk.truncate(length);
    (length > 0).then_some(chunk)
}

/// A server stream, message by message.
#[derive(Debug)]
pub struct Events {
    reader: BufReader<TcpStream>,
    buffer: Vec<u8>,
    /// The answer came with a length, so all of it is in the buffer.
    is_whole: bool,
}

/// What a whole stream said.
#[derive(Debug, Default)]
pub struct Finished {
    pub pid: u64,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub pty: Vec<u8>,
    pub keepalives: usize,
    /// The `end` event.
    pub end: Option<Value>,
    /// Payload of the end frame.
    pub frame: Value,
}

impl Finished {
    pub fn exit_code(&self) -> i64 {
        self.end.as_ref().unwrap_or_else(|| panic!("no end: {self:?}"))["exitCode"]
            .as_i64()
            .unwrap()
    }

    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    pub fn error_code(&self) -> &str {
        self.frame["error"]["code"].as_str().unwrap_or_default()
    }
}

impl Events {
    pub fn open(stream: TcpStream) -> Self {
        let mut reader = BufReader::new(stream);
        let (status, headers) = read_head(&mut reader);
        assert_eq!(status, 200);
        assert!(headers.contains(&("content-type".into(), "application/connect+json".into())));
        let is_whole = headers.iter().any(|(name, _)| name == "content-length");
        let buffer = if is_whole {
            read_body(&mut reader, &headers)
        } else {
            Vec::new()
        };
        Events {
            reader,
            buffer,
            is_whole,
        }
    }

    /// Flag and payload of the next envelope.
    pub fn next_frame(&mut self) -> (u8, Value) {
        loop {
            if let [flag, a, b, c, d, ..] = *self.buffer.as_slice() {
                let length = u32::from_be_bytes([a, b, c, d]) as usize;
                if self.buffer.len() >= 5 + length {
                    let rest = self.buffer.split_off(5 + length);
                    let frame = std::mem::replace(&mut self.buffer, rest);
                    return (flag, serde_json::from_slice(&frame[5..]).unwrap());
                }
            }
            assert!(!self.is_whole, "no end frame");
            self.buffer
                .extend(read_chunk(&mut self.reader).expect("the stream ended without an end frame"));
        }
    }

    /// The pid of the start event, which comes first.
    pub fn pid(&mut self) -> u64 {
        let (_, message) = self.next_frame();
        message["event"]["start"]["pid"]
            .as_u64()
            .unwrap_or_else(|| panic!("not a start event: {message}"))
    }

    /// Reads until a piece of output arrives.
    pub fn data(&mut self, kind: &str) -> Vec<u8> {
        loop {
            let (flag, message) = self.next_frame();
            assert_eq!(flag, 0, "{message}");
            if let Some(text) = message["event"]["data"][kind].as_str() {
                return STANDARD.decode(text).unwrap();
            }
        }
    }

    /// Reads output until it holds a text.
    pub fn until(&mut self, kind: &str, text: &str) -> String {
        let mut all = String::new();
        while !all.contains(text) {
            all.push_str(&String::from_utf8_lossy(&self.data(kind)));
        }
        all
    }

    /// Reads to the end frame and checks that the HTTP body ends there.
    pub fn finish(mut self) -> Finished {
        let mut all = Finished::default();
        loop {
            let (flag, message) = self.next_frame();
            if flag == 2 {
                all.frame = message;
                assert!(self.buffer.is_empty());
                assert!(self.is_whole || read_chunk(&mut self.reader).is_none());
                return all;
            }
            let event = &message["event"];
            if let Some(pid) = event["start"]["pid"].as_u64() {
                all.pid = pid;
            }
            for (kind, target) in [
                ("stdout", &mut all.stdout),
                ("stderr", &mut all.stderr),
                ("pty", &mut all.pty),
            ] {
                if let Some(text) = event["data"][kind].as_str() {
                    let bytes = STANDARD.decode(text).unwrap();
                    assert!(bytes.len() <= 32 << 10);
                    target.extend(bytes);
                }
            }
            all.keepalives += usize::from(event["keepalive"].is_object());
            if event["end"].is_object() {
                assert!(all.end.is_none());
                all.end = Some(event["end"].clone());
            }
        }
    }

    /// Breaks the connection off.
    pub fn cut(self) {
        let _ = self.reader.get_ref().shutdown(Shutdown::Both);
    }
}

pub fn encode(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Whether a process still exists and is not a zombie.
pub fn is_alive(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// Waits for something that another process does; a bound on patience, not a measure of time.
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if check() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("never: {what}");
}
