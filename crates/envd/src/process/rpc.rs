//! The service `process.Process`: JSON in, calls on the registry, JSON out.

use std::rc::Rc;
use std::time::Duration;

use rustix::process::Signal;
use serde::Deserialize;
use tokio::time::Instant;

use super::launch::{self, Order};
use super::registry::Selector;
use super::stdin::{Channel, InputError};
use super::stream::{Options, ProcessStream};
use super::{Config, Shared, SpawnError};
use crate::connect::{Code, RpcError};
use crate::daemon::Daemon;
use crate::json::{Base64, null_default};
use crate::rpc::Call;

/// How long a kill waits for the exit.
const KILL_WAIT_MAX: Duration = Duration::from_secs(1);

#[derive(Default, Deserialize)]
#[serde(default)]
struct SelectorMessage {
    pid: Option<u32>,
    tag: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Size {
    #[serde(deserialize_with = "null_default")]
    cols: u32,
    #[serde(deserialize_with = "null_default")]
    rows: u32,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Pty {
    size: Option<Size>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct InputMessage {
    stdin: Option<Base64>,
    pty: Option<Base64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StartRequest {
    process: Option<Config>,
    pty: Option<Pty>,
    tag: Option<String>,
    stdin: Option<bool>,
}

/// Every unary request of the service fits here: a process and what to do to it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ProcessRequest {
    process: Option<SelectorMessage>,
    pty: Option<Pty>,
    input: Option<InputMessage>,
    signal: serde_json::Value,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamInputRequest {
    start: Option<ProcessRequest>,
    data: Option<ProcessRequest>,
}

impl SpawnError {
    fn code(&self) -> Code {
        match self {
            SpawnError::NoCommand
            | SpawnError::Nul { .. }
            | SpawnError::DirectoryMissing { .. }
            | SpawnError::DirectoryNot { .. } => Code::InvalidArgument,
            SpawnError::UserUnknown { .. } => Code::Unauthenticated,
            SpawnError::TooMany { .. } => Code::ResourceExhausted,
            SpawnError::Pipe(_) | SpawnError::Terminal(_) | SpawnError::Clone(_) => Code::Internal,
        }
    }
}

impl From<SpawnError> for RpcError {
    fn from(error: SpawnError) -> Self {
        let source = std::error::Error::source(&error)
            .map(|source| format!(": {source}"))
            .unwrap_or_default();
        RpcError::new(error.code(), format!("{error}{source}"))
    }
}

impl From<InputError> for RpcError {
    fn from(error: InputError) -> Self {
        match &error {
            InputError::Absent(_) | InputError::Closed => RpcError::new(Code::FailedPrecondition, error.to_string()),
            InputError::Write(source) => RpcError::new(Code::Internal, format!("{error}: {source}")),
        }
    }
}

/// `Start`: the stream of a new process.
pub async fn start(daemon: &Rc<Daemon>, call: &Call, body: &[u8]) -> Result<ProcessStream, RpcError> {
    let request: StartRequest = call.parse(body)?;
    let order = Order {
        config: request.process.unwrap_or_default(),
        terminal: request.pty.map(|pty| terminal_size(&pty)),
        stdin: request.stdin.unwrap_or(true),
        tag: request.tag.filter(|tag| !tag.is_empty()),
        user: call.user.clone(),
        deadline: call.timeout.map(|timeout| Instant::now() + timeout),
    };
    // A task of its own, so that a client that goes away leaves a registered process behind.
    let started = tokio::task::spawn_local(launch::launch(Rc::clone(daemon), order)).await;
    let process = started.map_err(|error| RpcError::new(Code::Internal, error.to_string()))??;
    let options = Options {
        keepalive: call.keepalive,
        starter: true,
        ..Options::default()
    };
    Ok(ProcessStream::new(process, &options))
}

/// `Connect`: the stream of a process that runs or has ended lately.
pub fn connect(daemon: &Daemon, call: &Call, body: &[u8]) -> Result<ProcessStream, RpcError> {
    let request: ProcessRequest = call.parse(body)?;
    let selector = selector(request.process)?;
    let process = daemon
        .processes
        .find_any(&selector)
        .ok_or_else(|| not_found(&selector))?;
    let options = Options {
        keepalive: call.keepalive,
        deadline: call.timeout,
        starter: false,
    };
    Ok(ProcessStream::new(process, &options))
}

/// `List`: the running processes.
pub fn list(daemon: &Daemon) -> serde_json::Value {
    let entries: Vec<serde_json::Value> = daemon
        .processes
        .running()
        .iter()
        .map(|process| {
            let mut entry = serde_json::json!({ "config": process.config, "pid": process.pid });
            if let (Some(tag), Some(fields)) = (&process.tag, entry.as_object_mut()) {
                fields.insert("tag".into(), tag.as_str().into());
            }
            entry
        })
        .collect();
    serde_json::json!({ "processes": entries })
}

/// `Update`: a new terminal size.
pub fn update(daemon: &Daemon, call: &Call, body: &[u8]) -> Result<(), RpcError> {
    let request: ProcessRequest = call.parse(body)?;
    let process = running(daemon, request.process)?;
    if let Some(pty) = request.pty {
        let (cols, rows) = terminal_size(&pty);
        process.input.resize(cols, rows)?;
    }
    Ok(())
}

/// `SendInput`: waits until the process has room for all of it.
pub async fn send_input(daemon: &Daemon, call: &Call, body: &[u8]) -> Result<(), RpcError> {
    let request: ProcessRequest = call.parse(body)?;
    let process = running(daemon, request.process)?;
    write_input(&process, request.input).await
}

/// `CloseStdin`: end of file, after the input sent before.
pub async fn close_stdin(daemon: &Daemon, call: &Call, body: &[u8]) -> Result<(), RpcError> {
    let request: ProcessRequest = call.parse(body)?;
    let process = running(daemon, request.process)?;
    Ok(process.input.close_stdin().await?)
}

/// `SendSignal`: to the whole process group. After SIGKILL the answer waits until the process is gone, so that
/// a client never finds a killed process alive; one that the kernel cannot end yet is not waited for long.
pub async fn send_signal(daemon: &Daemon, call: &Call, body: &[u8]) -> Result<(), RpcError> {
    let request: ProcessRequest = call.parse(body)?;
    let signal = signal_of(&request.signal)?;
    let selector = selector(request.process)?;
    let process = daemon
        .processes
        .find_running(&selector)
        .ok_or_else(|| not_found(&selector))?;
    if !process.signal(signal) {
        return Err(not_found(&selector));
    }
    if signal == Signal::KILL {
        let _ = tokio::time::timeout(KILL_WAIT_MAX, process.wait_gone()).await;
    }
    Ok(())
}

/// State of one `StreamInput` call between its messages.
#[derive(Debug, Default)]
pub struct InputStream {
    process: Option<Shared>,
}

impl InputStream {
    /// One message: `start` chooses the process, `data` writes, `keepalive` does nothing.
    pub async fn message(&mut self, daemon: &Daemon, call: &Call, body: &[u8]) -> Result<(), RpcError> {
        let request: StreamInputRequest = call.parse(body)?;
        if let Some(start) = request.start {
            self.process = Some(running(daemon, start.process)?);
        }
        if let Some(data) = request.data {
            let missing = || RpcError::new(Code::InvalidArgument, "data before the start message");
            write_input(self.process.as_ref().ok_or_else(missing)?, data.input).await?;
        }
        Ok(())
    }
}

async fn write_input(process: &Shared, input: Option<InputMessage>) -> Result<(), RpcError> {
    let input = input.unwrap_or_default();
    if let Some(bytes) = input.stdin {
        process.input.write(Channel::Stdin, &bytes.0).await?;
    }
    if let Some(bytes) = input.pty {
        process.input.write(Channel::Pty, &bytes.0).await?;
    }
    Ok(())
}

fn terminal_size(pty: &Pty) -> (u16, u16) {
    let clamp = |value: u32, default: u16| match value {
        0 => default,
        value => u16::try_from(value).unwrap_or(u16::MAX),
    };
    let size = pty.size.as_ref();
    (
        clamp(size.map_or(0, |size| size.cols), 80),
        clamp(size.map_or(0, |size| size.rows), 24),
    )
}

fn selector(message: Option<SelectorMessage>) -> Result<Selector, RpcError> {
    match message.unwrap_or_default() {
        SelectorMessage { pid: Some(pid), .. } => Ok(Selector::Pid(pid)),
        SelectorMessage { tag: Some(tag), .. } => Ok(Selector::Tag(tag)),
        _ => Err(RpcError::new(Code::InvalidArgument, "process needs a pid or a tag")),
    }
}

fn running(daemon: &Daemon, message: Option<SelectorMessage>) -> Result<Shared, RpcError> {
    let selector = selector(message)?;
    daemon
        .processes
        .find_running(&selector)
        .ok_or_else(|| not_found(&selector))
}

fn not_found(selector: &Selector) -> RpcError {
    let text = match selector {
        Selector::Pid(pid) => format!("process with pid {pid} not found"),
        Selector::Tag(tag) => format!("process with tag {tag} not found"),
    };
    RpcError::new(Code::NotFound, text)
}

/// proto3 JSON writes an enum by name and may be given its number.
fn signal_of(value: &serde_json::Value) -> Result<Signal, RpcError> {
    match (value.as_str(), value.as_i64()) {
        (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => Ok(Signal::KILL),
        (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => Ok(Signal::TERM),
        _ => Err(RpcError::new(Code::InvalidArgument, format!("unknown signal {value}"))),
    }
}
