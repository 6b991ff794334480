//! Asks the server where a (sandbox, port) is. No cache, no retries of policy: that is `directory`.

use std::path::PathBuf;
use std::sync::Arc;

use aenv_wire::route::{InvalidAnswer, ResolveAnswer, ResolveRequest};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode};

use crate::exchange::{ExchangeError, Outgoing, Source, exchange};
use crate::limits::{RESOLVE_ANSWER_BYTES_MAX, RESOLVE_TIMEOUT};
use crate::outage::Outage;
use crate::pool::{ConnectError, Peer, Pool};
use crate::route::Place;
use crate::sandbox::chain;

/// Why the server gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    #[error("the API server cannot be reached")]
    Unreachable(#[source] ConnectError),
    #[error("the API server broke off")]
    Broken(#[source] hyper::Error),
    #[error("the API server did not say within {} s where the sandbox is", RESOLVE_TIMEOUT.as_secs())]
    TimedOut,
    #[error("the API server answered {0} to a resolve")]
    Status(StatusCode),
    #[error("the API server's answer to a resolve is unreadable")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the API server's answer to a resolve is invalid")]
    Invalid(#[source] InvalidAnswer),
}

#[derive(Debug)]
pub struct Resolver {
    pool: Arc<Pool>,
    outage: Outage,
}

impl Resolver {
    pub fn new(socket: PathBuf) -> Self {
        Self {
            pool: Pool::new(Peer::Server(socket)),
            outage: Outage::of("the resolver"),
        }
    }

    /// One question, one answer, within the deadline.
    pub async fn ask(&self, place: &Place) -> Result<ResolveAnswer, ResolveError> {
        let answer = tokio::time::timeout(RESOLVE_TIMEOUT, self.ask_patiently(place)).await;
        let answer = answer.unwrap_or(Err(ResolveError::TimedOut));
        match &answer {
            Ok(_) => self.outage.end(),
            Err(ResolveError::Unreachable(error)) => self.outage.begin(error),
            Err(error) => say!("proxy: resolve failed: {}", chain(error)),
        }
        answer
    }

    async fn ask_patiently(&self, place: &Place) -> Result<ResolveAnswer, ResolveError> {
        let outgoing = outgoing(place);
        let (response, lease) = exchange(&self.pool, &outgoing).await.map_err(|error| match error {
            ExchangeError::Connect(error) => ResolveError::Unreachable(error),
            ExchangeError::Broken(error) => ResolveError::Broken(error),
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), RESOLVE_ANSWER_BYTES_MAX);
        let body = body.collect().await.map_err(ResolveError::Body)?.to_bytes();
        self.pool.give_back(lease.sender, lease.socket);
        if status != StatusCode::OK {
            return Err(ResolveError::Status(status));
        }
        ResolveAnswer::parse(&body).map_err(ResolveError::Invalid)
    }

    /// Drops idle connections that are too old.
    pub fn sweep(&self) {
        self.pool.sweep();
    }
}

fn outgoing(place: &Place) -> Outgoing {
    let question = ResolveRequest {
        sandbox_id: place.sandbox_id.clone(),
        port: place.port,
    };
    // A struct of a string and a number always serialises.
    let body = Bytes::from(serde_json::to_vec(&question).unwrap_or_default());
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = hyper::Uri::from_static("/resolve");
    request.headers_mut().insert(HOST, HeaderValue::from_static("aenv"));
    request
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    // Asking twice is harmless, so a connection that the server just closed costs a second attempt only.
    Outgoing {
        head: request.into_parts().0,
        source: Source::Own(body),
        is_idempotent: true,
    }
}
