//! The control socket, on which the server speaks to the proxy: withdraw, live, health, shutdown.

use std::convert::Infallible;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aenv_wire::route::{HealthAnswer, LiveRequest, WithdrawAnswer, WithdrawRequest};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;

use crate::client::Clients;
use crate::directory::Directory;
use crate::limits::CONTROL_BODY_BYTES_MAX;

/// What the control socket reaches.
#[derive(Debug)]
pub struct Control {
    pub listen: String,
    pub directory: Arc<Directory>,
    pub clients: Arc<Clients>,
    pub shutdown: Arc<Notify>,
}

/// Why the control socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("another proxy answers on this control socket")]
    Taken,
    #[error("cannot remove the stale control socket")]
    Remove(#[source] io::Error),
    #[error("cannot listen on the control socket")]
    Listen(#[source] io::Error),
}

/// Listens on `path`, in place of a dead predecessor's socket but never of a living one's. Owner only.
pub fn bind(path: &Path) -> Result<UnixListener, BindError> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(BindError::Taken);
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(BindError::Remove(error));
        }
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(BindError::Listen)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(BindError::Listen)?;
    Ok(listener)
}

/// Serves the control socket until the process ends.
pub async fn serve(listener: UnixListener, control: Arc<Control>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(connection(stream, Arc::clone(&control)));
            }
            Err(error) => {
                say!("proxy: control socket: {error}");
                tokio::time::sleep(crate::limits::ACCEPT_BACKOFF).await;
            }
        }
    }
}

async fn connection(stream: UnixStream, control: Arc<Control>) {
    let told_to_stop = AtomicBool::new(false);
    let service = service_fn(|request| {
        let (control, told_to_stop) = (Arc::clone(&control), &told_to_stop);
        async move { Ok::<_, Infallible>(answer(&control, request, told_to_stop).await) }
    });
    // Errors mean that the server went away.
    drop(
        http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service)
            .await,
    );
    // Only now: with nothing else to wait for the process ends at once, and the answer must be out by then.
    if told_to_stop.load(Ordering::Relaxed) {
        control.shutdown.notify_one();
    }
}

/// The answer to one request. `told_to_stop` becomes true when it was the order to stop, which the answer's end carries
/// out: it closes the connection.
async fn answer(control: &Control, request: Request<Incoming>, told_to_stop: &AtomicBool) -> Response<Full<Bytes>> {
    let (parts, body) = request.into_parts();
    match (parts.method, parts.uri.path()) {
        (Method::POST, "/withdraw") => match read::<WithdrawRequest>(body).await {
            Ok(asked) => aborted(control.directory.withdraw(&asked.generations)),
            Err(message) => failure(StatusCode::BAD_REQUEST, &message),
        },
        (Method::PUT, "/live") => match read::<LiveRequest>(body).await {
            Ok(asked) => aborted(control.directory.keep_only(&asked.generations, asked.below)),
            Err(message) => failure(StatusCode::BAD_REQUEST, &message),
        },
        (Method::GET, "/health") => json(StatusCode::OK, &health(control)),
        (Method::POST, "/shutdown") => {
            told_to_stop.store(true, Ordering::Relaxed);
            let mut response = json(StatusCode::OK, &serde_json::json!({}));
            response
                .headers_mut()
                .insert(CONNECTION, HeaderValue::from_static("close"));
            response
        }
        _ => failure(StatusCode::NOT_FOUND, "no such control request"),
    }
}

fn health(control: &Control) -> HealthAnswer {
    HealthAnswer {
        pid: std::process::id(),
        listen: control.listen.clone(),
        connections: control.clients.count(),
        generations: control.directory.generations(),
    }
}

fn aborted(count: usize) -> Response<Full<Bytes>> {
    json(StatusCode::OK, &WithdrawAnswer { aborted: count })
}

async fn read<T: DeserializeOwned>(body: Incoming) -> Result<T, String> {
    let body = Limited::new(body, CONTROL_BODY_BYTES_MAX)
        .collect()
        .await
        .map_err(|error| error.to_string())?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| format!("unreadable body: {error}"))
}

fn failure(status: StatusCode, message: &str) -> Response<Full<Bytes>> {
    json(
        status,
        &serde_json::json!({"code": status.as_u16(), "message": message}),
    )
}

fn json(status: StatusCode, body: &impl Serialize) -> Response<Full<Bytes>> {
    // All bodies are structs or maps with string keys, which always serialise.
    let bytes = serde_json::to_vec(body).unwrap_or_default();
    let mut response = Response::new(Full::new(Bytes::from(bytes)));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
