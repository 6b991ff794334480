//! The HTTP client of everything in this crate: HTTP/1.1 over TCP or TLS (rustls with ring, the system's root
//! certificates), pooled connections, no redirects followed, no cookies, no proxy, no compression.
//!
//! object_store gets it as its transport, through which this module also sees the status of each answer: object_store's
//! own error does not tell a 503 from a 400, and a caller must.

use std::cell::RefCell;
use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector as StoreConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Shorter than the 20 s after which S3 closes an idle connection, so that a request seldom meets a closed one.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Idle connections kept per host: as many as reads or parts go to one store at a time.
const IDLE_PER_HOST_MAX: usize = 32;
/// Of an answer that is an error, what is looked at to find its code.
const ERROR_BODY_BYTES_MAX: usize = 64 << 10;

/// A pooled client; clones share the pool.
#[derive(Debug, Clone)]
pub(crate) struct Http(Client<HttpsConnector<HttpConnector>, HttpRequestBody>);

impl Http {
    /// Errors: the system's root certificates cannot be read at all.
    pub fn new() -> io::Result<Http> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let tls = HttpsConnectorBuilder::new()
            .with_provider_and_native_roots(rustls::crypto::ring::default_provider())?
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(IDLE_PER_HOST_MAX)
            .build(tls);
        Ok(Http(client))
    }

    /// Sends a request without a body.
    pub async fn send(&self, request: Request<()>) -> Result<Response<Incoming>, HttpError> {
        let request = request.map(|()| HttpRequestBody::empty());
        self.0.request(request).await.map_err(transport_error)
    }
}

/// Reads a body of at most `limit` bytes.
pub(crate) async fn collect(body: Incoming, limit: usize) -> Result<Bytes, Box<dyn StdError + Send + Sync>> {
    Ok(Limited::new(body, limit).collect().await?.to_bytes())
}

tokio::task_local! {
    static SEEN: RefCell<Option<Seen>>;
}

/// The last answer that an operation of object_store got.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub status: StatusCode,
    /// `Code` of S3's error document.
    pub code: Option<String>,
}

/// Runs an operation of object_store and tells which answer it got last; none if no answer came.
pub(crate) async fn observed<F: Future>(operation: F) -> (F::Output, Option<Seen>) {
    let run = async {
        let output = operation.await;
        (output, SEEN.with(RefCell::take))
    };
    SEEN.scope(RefCell::new(None), run).await
}

fn note(status: StatusCode, code: Option<String>) {
    // Outside of `observed` nobody asks.
    let _ = SEEN.try_with(|seen| seen.replace(Some(Seen { status, code })));
}

#[async_trait::async_trait]
impl HttpService for Http {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let _ = SEEN.try_with(RefCell::take);
        let response = self.0.request(request).await.map_err(transport_error)?;
        let (parts, body) = response.into_parts();
        if parts.status.is_success() {
            note(parts.status, None);
            let body = HttpResponseBody::new(body.map_err(body_error));
            return Ok(Response::from_parts(parts, body));
        }
        // An error's body that breaks off or is too long is no reason to lose the status.
        let body = collect(body, ERROR_BODY_BYTES_MAX).await.unwrap_or_default();
        note(parts.status, error_code(&body));
        let body = HttpResponseBody::new(Full::new(body).map_err(|never| match never {}));
        Ok(Response::from_parts(parts, body))
    }
}

/// Hands this client to object_store, whose own options of a client mean nothing then.
#[derive(Debug)]
pub(crate) struct Connector(pub Http);

impl StoreConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.0.clone()))
    }
}

/// The text of `Code` in an error document of S3; a short word or nothing.
fn error_code(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?;
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let word = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    word.then(|| code.to_owned())
}

fn transport_error(error: hyper_util::client::legacy::Error) -> HttpError {
    let kind = if error.is_connect() {
        HttpErrorKind::Connect
    } else {
        HttpErrorKind::Interrupted
    };
    HttpError::new(kind, error)
}

fn body_error(error: hyper::Error) -> HttpError {
    HttpError::new(HttpErrorKind::Interrupted, error)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_code_of_an_error_document_is_found() {
        let body = b"<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>m</Message></Error>";
        assert_eq!(error_code(body).as_deref(), Some("SlowDown"));
        assert_eq!(error_code(b"<Error><Code>two words</Code></Error>"), None);
        assert_eq!(error_code(b"<Code>open"), None);
        assert_eq!(error_code(b"\xff<Code>x</Code>"), None);
    }
}
