//! Every answer that the proxy makes itself.
//!
//! JSON for programs (the SDKs decide by `message` and `code`), a small page for browsers, and readable by scripts of
//! any origin, so that a web page can tell a dead sandbox from a broken network.

use aenv_wire::route::Refusal;
use hyper::header::{ACCESS_CONTROL_ALLOW_ORIGIN, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde::Serialize;

use crate::body::ReplyBody;
use crate::head;
use crate::route::Place;

pub type Reply = Response<ReplyBody>;

const JSON: HeaderValue = HeaderValue::from_static("application/json; charset=utf-8");
const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");

/// How the client wants to read an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Json,
    Html,
}

impl Form {
    pub fn wanted(headers: &HeaderMap) -> Self {
        if head::prefers_html(headers) {
            Self::Html
        } else {
            Self::Json
        }
    }
}

/// The body about one sandbox; the order of fields is the order on the wire.
#[derive(Serialize)]
struct AboutSandbox<'a> {
    #[serde(rename = "sandboxId")]
    sandbox_id: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

/// The body of every other error.
#[derive(Serialize)]
struct Plain<'a> {
    code: u16,
    message: &'a str,
}

/// Nothing listens on the port. The SDKs look for "port is not open".
pub fn port_closed(form: Form, place: &Place) -> Reply {
    about_port(form, place, "The sandbox is running but port is not open")
}

/// Something listens but broke off before it answered.
pub fn broke_off(form: Form, place: &Place) -> Reply {
    about_port(form, place, "The sandbox closed the connection before it answered")
}

fn about_port(form: Form, place: &Place, message: &str) -> Reply {
    let status = StatusCode::BAD_GATEWAY;
    let Place { sandbox_id, port } = place;
    let body = AboutSandbox {
        sandbox_id,
        message,
        port: Some(*port),
        code: status.as_u16(),
    };
    error(form, status, message, &body)
}

pub fn token_missing(form: Form, place: &Place) -> Reply {
    let message = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing";
    forbidden(form, place, message)
}

pub fn token_invalid(form: Form, place: &Place) -> Reply {
    let message =
        "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid";
    forbidden(form, place, message)
}

fn forbidden(form: Form, place: &Place, message: &str) -> Reply {
    let status = StatusCode::FORBIDDEN;
    let body = AboutSandbox {
        sandbox_id: &place.sandbox_id,
        message,
        port: None,
        code: status.as_u16(),
    };
    error(form, status, message, &body)
}

/// An error that is not about a guest: `{"code", "message"}`.
pub fn plain(form: Form, status: StatusCode, message: &str) -> Reply {
    error(
        form,
        status,
        message,
        &Plain {
            code: status.as_u16(),
            message,
        },
    )
}

/// Something is missing that is expected to be back in a second.
pub fn unavailable(form: Form, message: &str) -> Reply {
    let mut reply = plain(form, StatusCode::SERVICE_UNAVAILABLE, message);
    reply.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    reply
}

fn error(form: Form, status: StatusCode, message: &str, body: &impl Serialize) -> Reply {
    let (kind, bytes) = match form {
        // Structs of strings and numbers always serialise.
        Form::Json => (JSON, serde_json::to_vec(body).unwrap_or_default()),
        Form::Html => (HTML, page(status, message).into_bytes()),
    };
    let mut reply = Response::new(ReplyBody::own(bytes));
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, kind);
    reply
        .headers_mut()
        .insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    reply
}

/// A refusal of the server: status, headers and body as given; for a browser its message as a page.
pub fn refusal(form: Form, refusal: &Refusal) -> Reply {
    #[derive(serde::Deserialize)]
    struct Message {
        message: String,
    }
    let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let message = serde_json::from_str::<Message>(refusal.body.get()).ok();
    let (kind, bytes) = match (form, message) {
        (Form::Html, Some(Message { message })) => (HTML, page(status, &message)),
        _ => (JSON, refusal.body.get().to_owned()),
    };
    let mut reply = Response::new(ReplyBody::own(bytes));
    *reply.status_mut() = status;
    let headers = reply.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(CONTENT_TYPE, kind.clone());
    for (name, value) in &refusal.headers {
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(value)) {
            headers.insert(name, value);
        }
    }
    if kind == HTML {
        headers.insert(CONTENT_TYPE, HTML);
    }
    reply
}

fn page(status: StatusCode, message: &str) -> String {
    let title = format!("{} {}", status.as_u16(), status.canonical_reason().unwrap_or_default());
    let message = message.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<!doctype html>\n<meta charset=\"utf-8\">\n<title>{title}</title>\n<h1>{title}</h1>\n<p>{message}</p>\n")
}
