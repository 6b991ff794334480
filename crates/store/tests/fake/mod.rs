//! HTTP servers in this process that answer what a test wants: an S3 store with faults, or anything by a closure. Shared
//! with the tests of crates/storage.

#![allow(dead_code)] // Each test binary uses a part of it.

pub mod s3;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// What to do with a request.
pub enum Reply {
    Answer(Response<Bytes>),
    /// The head and half of the body, then the connection is cut.
    Truncated(Response<Bytes>),
    /// No answer, and the connection is cut.
    Cut,
    /// No answer at all, for longer than any test waits.
    Silence,
    /// An answer that takes its time.
    Late(Duration, Response<Bytes>),
}

type Handler = dyn Fn(Request<Bytes>) -> Reply + Send + Sync;

/// A server on a free port of the loopback address; gone when dropped.
pub struct Server {
    pub address: SocketAddr,
    _runtime: Runtime,
}

impl Server {
    pub fn start(handler: impl Fn(Request<Bytes>) -> Reply + Send + Sync + 'static) -> Server {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(accept(listener, Arc::new(handler)));
        Server {
            address,
            _runtime: runtime,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

async fn accept(listener: TcpListener, handler: Arc<Handler>) {
    while let Ok((connection, _)) = listener.accept().await {
        let handler = handler.clone();
        let service = service_fn(move |request| answer(request, handler.clone()));
        // A connection that a test cuts ends with an error.
        let serve = http1::Builder::new().serve_connection(TokioIo::new(connection), service);
        tokio::spawn(async move { drop(serve.await) });
    }
}

type Body = BoxBody<Bytes, io::Error>;

async fn answer(request: Request<Incoming>, handler: Arc<Handler>) -> io::Result<Response<Body>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let whole = |body: Bytes| Full::new(body).map_err(|never: Infallible| match never {}).boxed();
    match handler(Request::from_parts(parts, body)) {
        Reply::Answer(response) => Ok(response.map(whole)),
        Reply::Late(after, response) => {
            tokio::time::sleep(after).await;
            Ok(response.map(whole))
        }
        Reply::Cut => Err(io::Error::other("cut")),
        Reply::Silence => std::future::pending().await,
        Reply::Truncated(response) => {
            let (mut parts, body) = response.into_parts();
            parts.headers.insert("content-length", body.len().into());
            let pieces = [
                Ok(Frame::data(body.slice(..body.len() / 2))),
                Err(io::Error::other("cut")),
            ];
            Ok(Response::from_parts(
                parts,
                StreamBody::new(stream::iter(pieces)).boxed(),
            ))
        }
    }
}

/// An answer of a status alone.
pub fn status(status: u16) -> Response<Bytes> {
    Response::builder().status(status).body(Bytes::new()).unwrap()
}
