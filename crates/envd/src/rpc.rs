//! From an HTTP request to a call of one of the two Connect services, and back.

use std::rc::Rc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http::{HeaderMap, Method, Response, StatusCode, header};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

use crate::auth;
use crate::connect::{self, Code, Decoder, MESSAGE_BYTES_MAX, RpcError};
use crate::daemon::Daemon;
use crate::files;
use crate::http::answer::{Answer, json};
use crate::http::body::{Reader, Reply};
use crate::process;
use crate::process::positive_ms;

const STREAM_TYPE: &str = "application/connect+json";
const UNARY_TYPE: &str = "application/json";

/// What every call carries besides its message.
#[derive(Debug)]
pub struct Call {
    /// From the Basic header; `None` is the default user.
    pub user: Option<String>,
    pub timeout: Option<Duration>,
    pub keepalive: Option<Duration>,
    /// An old generated client fails on fields it does not know.
    pub strict_client: bool,
}

impl Call {
    fn new(headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        Call {
            user: auth::basic_user(headers),
            timeout: positive_ms(text("connect-timeout-ms")),
            keepalive: positive_ms(text("keepalive-ping-interval")).map(|seconds| seconds * 1000),
            strict_client: text("user-agent").is_some_and(|agent| agent.starts_with("connect-python")),
        }
    }

    pub fn parse<T: DeserializeOwned + Default>(&self, body: &[u8]) -> Result<T, RpcError> {
        if body.is_empty() {
            return Ok(T::default());
        }
        serde_json::from_slice(body)
            .map_err(|error| RpcError::new(Code::InvalidArgument, format!("cannot read the message: {error}")))
    }
}

/// Whether a path belongs to a Connect service.
pub fn is_rpc(path: &str) -> bool {
    path.starts_with("/process.Process/") || path.starts_with("/filesystem.Filesystem/")
}

/// Answers one call. The caller has checked the token.
pub async fn handle(daemon: &Rc<Daemon>, parts: &Parts, body: Incoming) -> Answer {
    if parts.method != Method::POST {
        return Answer::error(StatusCode::METHOD_NOT_ALLOWED, "calls are made with POST");
    }
    let kind = parts
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let call = Call::new(&parts.headers);
    let path = parts.uri.path();
    match kind.split(';').next().unwrap_or_default().trim() {
        STREAM_TYPE => stream(daemon, &call, path, body).await,
        UNARY_TYPE => unary(daemon, &call, path, body).await,
        other => {
            let text = format!("content type '{other}' is not supported, use {UNARY_TYPE} or {STREAM_TYPE}");
            Answer::error(StatusCode::UNSUPPORTED_MEDIA_TYPE, &text)
        }
    }
}

async fn unary(daemon: &Rc<Daemon>, call: &Call, path: &str, body: Incoming) -> Answer {
    let work = async {
        let message = Reader::new(body)
            .collect(MESSAGE_BYTES_MAX)
            .await
            .map_err(RpcError::from)?;
        unary_result(daemon, call, path, &message).await
    };
    let result = match call.timeout {
        None => work.await,
        Some(timeout) => tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| {
            Err(RpcError::new(
                Code::DeadlineExceeded,
                "the deadline of this call has passed",
            ))
        }),
    };
    match result {
        Ok(value) => json(StatusCode::OK, value.to_string()),
        Err(error) => {
            let status = StatusCode::from_u16(error.code.wire().1).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            json(status, error.body())
        }
    }
}

async fn unary_result(
    daemon: &Rc<Daemon>,
    call: &Call,
    path: &str,
    message: &[u8],
) -> Result<serde_json::Value, RpcError> {
    let empty = |()| serde_json::json!({});
    match path {
        "/process.Process/List" => Ok(process::rpc::list(daemon)),
        "/process.Process/Update" => process::rpc::update(daemon, call, message).map(empty),
        "/process.Process/SendInput" => process::rpc::send_input(daemon, call, message).await.map(empty),
        "/process.Process/SendSignal" => process::rpc::send_signal(daemon, call, message).await.map(empty),
        "/process.Process/CloseStdin" => process::rpc::close_stdin(daemon, call, message).await.map(empty),
        _ => match path.strip_prefix("/filesystem.Filesystem/") {
            Some(method) => files::rpc::unary(daemon, call, method, message).await,
            None => Err(unknown(path)),
        },
    }
}

fn unknown(path: &str) -> RpcError {
    RpcError::new(Code::Unimplemented, format!("{path} is not implemented"))
}

/// Streams always answer 200; errors go into their end frame.
async fn stream(daemon: &Rc<Daemon>, call: &Call, path: &str, body: Incoming) -> Answer {
    let reply = match path {
        "/process.Process/Start" => match first_message(body).await {
            Ok(message) => process::rpc::start(daemon, call, &message).await.map(Reply::process),
            Err(error) => Err(error),
        },
        "/process.Process/Connect" => first_message(body)
            .await
            .and_then(|message| process::rpc::connect(daemon, call, &message))
            .map(Reply::process),
        "/process.Process/StreamInput" => stream_input(daemon, call, body)
            .await
            .map(|()| Reply::full(one_empty())),
        path => Err(unknown(path)),
    };
    let reply = reply.unwrap_or_else(|error| {
        let mut end = BytesMut::new();
        error.put_end(&mut end);
        Reply::full(end.freeze())
    });
    Answer(
        Response::builder()
            .header(header::CONTENT_TYPE, STREAM_TYPE)
            .body(reply)
            .unwrap_or_default(),
    )
}

fn one_empty() -> Bytes {
    let mut out = BytesMut::new();
    connect::put_message(&mut out, b"{}");
    connect::put_end_ok(&mut out);
    out.freeze()
}

/// The request of a server stream: one envelope. What follows it in the body is not waited for.
async fn first_message(body: Incoming) -> Result<Bytes, RpcError> {
    let mut reader = Reader::new(body);
    let mut decoder = Decoder::default();
    loop {
        if let Some(message) = decoder.next_message()? {
            return Ok(message);
        }
        match reader.next().await? {
            Some(bytes) => decoder.push(&bytes),
            None => {
                return Err(RpcError::new(Code::InvalidArgument, "the request holds no message"));
            }
        }
    }
}

async fn stream_input(daemon: &Rc<Daemon>, call: &Call, body: Incoming) -> Result<(), RpcError> {
    let mut reader = Reader::without_idle_limit(body);
    let mut decoder = Decoder::default();
    let mut input = process::rpc::InputStream::default();
    loop {
        while let Some(message) = decoder.next_message()? {
            input.message(daemon, call, &message).await?;
        }
        match reader.next().await? {
            Some(bytes) => decoder.push(&bytes),
            None if decoder.is_partial() => {
                return Err(RpcError::new(Code::InvalidArgument, "the stream ends inside a message"));
            }
            None => return Ok(()),
        }
    }
}
