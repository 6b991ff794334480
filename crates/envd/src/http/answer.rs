//! Answers: the one error body of the REST side, and the headers every answer carries.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde::Serialize;

use super::body::Reply;

/// What a handler returns.
#[derive(Debug)]
pub struct Answer(pub Response<Reply>);

#[derive(Serialize)]
struct ErrorBody<'a> {
    code: u16,
    message: &'a str,
}

impl Answer {
    /// `{"code", "message"}`, as the clients parse it.
    pub fn error(status: StatusCode, message: &str) -> Self {
        let body = ErrorBody {
            code: status.as_u16(),
            message,
        };
        json(status, serde_json::to_vec(&body).unwrap_or_default())
    }

    /// 204 without a body.
    pub fn no_content() -> Self {
        let mut response = Response::new(Reply::default());
        *response.status_mut() = StatusCode::NO_CONTENT;
        Answer(response)
    }

    /// Lets browsers of any origin read the answer: signed URLs are made for them.
    pub fn with_cors(mut self) -> Response<Reply> {
        let headers = self.0.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        self.0
    }
}

const EXPOSED: &str = "Accept-Ranges, Cache-Control, Content-Disposition, Content-Encoding, Content-Length, \
                       Content-Range, Date, Last-Modified, Location, Server";

/// An answer with a JSON body.
pub fn json(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(Reply::full(body));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Answer(response)
}

/// The answer to a preflight request: everything a client of this API sends is allowed.
pub fn preflight(requested: Option<&HeaderValue>) -> Answer {
    let mut answer = Answer::no_content();
    let headers = answer.0.headers_mut();
    let methods = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    // A star would not cover Authorization, so the requested names are given back.
    let allowed = requested.cloned().unwrap_or(HeaderValue::from_static("*"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("7200"));
    answer
}
