//! Which handler answers a path, and whether it needs the access token.

use std::rc::Rc;

use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;

use super::answer::{Answer, json, preflight};
use super::body::Reply;
use crate::auth::has_token;
use crate::daemon::Daemon;
use crate::{files, init, metrics, rpc};

const UNAUTHORIZED: &str = "unauthorized access, please provide a valid access token or method signing if supported";

/// Answers one request. Never fails: every error is an answer.
pub async fn handle(daemon: Rc<Daemon>, connection: u64, request: Request<Incoming>) -> Response<Reply> {
    let (parts, body) = request.into_parts();
    if parts.method == Method::OPTIONS {
        return preflight(parts.headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS)).with_cors();
    }
    let path = parts.uri.path();
    let answer = match (&parts.method, path) {
        (&Method::GET | &Method::HEAD, "/health") => health(),
        (&Method::POST, "/init") => init::handle(&daemon, connection, &parts, body).await,
        // These two check the token or a signature themselves.
        (&Method::GET, "/files") => files::download::handle(&daemon, &parts).await,
        (&Method::POST, "/files") => files::upload::handle(&daemon, &parts, body).await,
        _ if !has_token(&parts.headers, daemon.settings.borrow().token.as_deref()) => {
            Answer::error(StatusCode::UNAUTHORIZED, UNAUTHORIZED)
        }
        _ if rpc::is_rpc(path) => rpc::handle(&daemon, &parts, body).await,
        (&Method::GET, "/metrics") => metrics::handle(&daemon),
        (&Method::GET, "/envs") => envs(&daemon),
        (_, "/health" | "/init" | "/files" | "/metrics" | "/envs") => {
            Answer::error(StatusCode::METHOD_NOT_ALLOWED, "method not allowed")
        }
        _ => Answer::error(StatusCode::NOT_FOUND, &format!("no route {path}")),
    };
    answer.with_cors()
}

fn health() -> Answer {
    let mut answer = Answer::no_content();
    answer
        .0
        .headers_mut()
        .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

fn envs(daemon: &Daemon) -> Answer {
    let body = serde_json::to_vec(&daemon.settings.borrow().defaults.env).unwrap_or_default();
    json(StatusCode::OK, body)
}
