//! One request to a peer and the head of its answer, over an idle connection where that is safe.
//!
//! A peer may close an idle connection at the moment when we reuse it. Such a request is sent once more on a new
//! connection, but only if no byte of an answer came, what was taken of the body is still there, and running it twice is
//! harmless or impossible: the method is idempotent, or the peer's kernel acknowledged none of it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::http::request::Parts;
use hyper::{Method, Request, Response};

use crate::body::Lease;
use crate::generation::Carried;
use crate::limits::UNREPEATABLE_IDLE_MAX;
use crate::pool::{ConnectError, Connection, Pool};
use crate::socket::Socket;
use crate::upload::{RequestBody, Upload};

/// A request that can be built again for another attempt.
#[derive(Debug)]
pub struct Outgoing {
    pub head: Parts,
    pub source: Source,
    /// The peer may get it twice without harm.
    pub is_idempotent: bool,
}

/// Where the body comes from.
#[derive(Debug)]
pub enum Source {
    Client {
        upload: Arc<Upload>,
        carried: Option<Arc<Carried>>,
    },
    Own(Bytes),
}

impl Outgoing {
    /// For a reused connection the body is kept while it is small.
    fn request(&self, is_reused: bool) -> Request<RequestBody> {
        let body = match &self.source {
            Source::Client { upload, carried } => RequestBody::passed(upload, carried.as_ref(), is_reused),
            Source::Own(bytes) => RequestBody::Own(Some(bytes.clone())),
        };
        Request::from_parts(self.head.clone(), body)
    }

    fn settle(&self) {
        if let Source::Client { upload, .. } = &self.source {
            upload.settle();
        }
    }

    fn is_repeatable(&self) -> bool {
        match &self.source {
            Source::Client { upload, .. } => upload.is_repeatable(),
            Source::Own(_) => true,
        }
    }
}

/// Methods that RFC 9110 defines as idempotent.
pub fn is_idempotent(method: &Method) -> bool {
    [
        Method::GET,
        Method::HEAD,
        Method::OPTIONS,
        Method::TRACE,
        Method::PUT,
        Method::DELETE,
    ]
    .contains(method)
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the connection broke before an answer came")]
    Broken(#[source] hyper::Error),
}

/// Sends the request and waits, without limit, for the head of the answer. Dropping the future ends the exchange.
pub async fn exchange(pool: &Arc<Pool>, outgoing: &Outgoing) -> Result<(Response<Incoming>, Lease), ExchangeError> {
    let idle_max = if outgoing.is_idempotent {
        Duration::MAX
    } else {
        UNREPEATABLE_IDLE_MAX
    };
    if let Some(connection) = pool.reuse(idle_max).await {
        match attempt(connection, outgoing, true).await {
            Ok((response, sender, socket)) => {
                return Ok((
                    response,
                    Lease {
                        pool: Arc::clone(pool),
                        sender,
                        socket,
                    },
                ));
            }
            Err(failure) if failure.may_repeat => {}
            Err(failure) => return Err(ExchangeError::Broken(failure.error)),
        }
    }
    let connection = pool.connect().await?;
    match attempt(connection, outgoing, false).await {
        Ok((response, sender, socket)) => Ok((
            response,
            Lease {
                pool: Arc::clone(pool),
                sender,
                socket,
            },
        )),
        Err(failure) => Err(ExchangeError::Broken(failure.error)),
    }
}

struct Failure {
    error: hyper::Error,
    may_repeat: bool,
}

type Answered = (Response<Incoming>, SendRequest<RequestBody>, Arc<Socket>);

async fn attempt(connection: Connection, outgoing: &Outgoing, is_reused: bool) -> Result<Answered, Failure> {
    let Connection { mut sender, socket } = connection;
    let received_bytes = socket.received_bytes();
    let acknowledged_bytes = socket.acknowledged_bytes();
    match sender.try_send_request(outgoing.request(is_reused)).await {
        Ok(response) => {
            outgoing.settle();
            Ok((response, sender, socket))
        }
        Err(mut refused) => {
            let was_not_sent = refused.take_message().is_some();
            let is_untouched = acknowledged_bytes.is_some() && socket.acknowledged_bytes() == acknowledged_bytes;
            let may_repeat = socket.received_bytes() == received_bytes
                && outgoing.is_repeatable()
                && (was_not_sent || outgoing.is_idempotent || is_untouched);
            Err(Failure {
                error: refused.into_error(),
                may_repeat,
            })
        }
    }
}
