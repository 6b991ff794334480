//! One client connection: its requests one after the other, each to where `route` says.

use std::convert::Infallible;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::HOST;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, StatusCode, Version};
use hyper_util::rt::TokioIo;

use crate::answer::{self, Form, Reply};
use crate::api::{self, Api};
use crate::client::{Admission, Client};
use crate::directory::Directory;
use crate::limits::{BUFFER_BYTES_MAX, HEAD_BYTES_MAX, HEAD_LINES_MAX};
use crate::pass::Inbound;
use crate::route::{self, Destination};
use crate::sandbox;
use crate::socket::Stream;

/// What every connection needs.
#[derive(Debug)]
pub struct Front {
    pub domain: Option<String>,
    pub directory: Arc<Directory>,
    pub api: Api,
}

/// Serves a connection to its end. Works under any stream: TLS would wrap it here.
pub async fn connection(front: Arc<Front>, client: Arc<Client>, admission: Admission) {
    let stream = Stream {
        socket: Arc::clone(&client.socket),
        guard: admission,
    };
    let service = service_fn(|request| {
        let (front, client) = (Arc::clone(&front), Arc::clone(&client));
        async move { Ok::<_, Infallible>(request_of(&front, &client, request).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .preserve_header_case(true)
        .max_headers(HEAD_LINES_MAX)
        .max_header_size(HEAD_BYTES_MAX);
    // The answer's own Date, or none: the proxy adds nothing to what guests say.
    builder.max_buf_size(BUFFER_BYTES_MAX).auto_date_header(false);
    // Errors are broken connections and malformed requests; hyper answered the latter where that was possible.
    drop(
        builder
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades()
            .await,
    );
}

async fn request_of(front: &Front, client: &Arc<Client>, request: Request<Incoming>) -> Reply {
    let serving = client.begin();
    let mut reply = answer_to(front, client, request).await;
    reply.body_mut().hold(serving);
    reply
}

async fn answer_to(front: &Front, client: &Arc<Client>, request: Request<Incoming>) -> Reply {
    let form = Form::wanted(request.headers());
    if let Err(message) = check_host(&request) {
        return answer::plain(form, StatusCode::BAD_REQUEST, message);
    }
    let host = sandbox::host_of(request.uri(), request.headers());
    let target = request.uri().path_and_query().map_or("", |target| target.as_str());
    match route::choose(&host, request.headers(), target, front.domain.as_deref()) {
        Ok(Destination::Sandbox(place, target)) => {
            sandbox::answer(&front.directory, client, Inbound::new(request), &place, target).await
        }
        Ok(Destination::Api) => api::answer(&front.api, client, Inbound::new(request)).await,
        Err(error) => answer::plain(form, StatusCode::BAD_REQUEST, &error.to_string()),
    }
}

/// RFC 9112, section 3.2: without exactly one Host a 1.1 request means different things to different servers.
fn check_host(request: &Request<Incoming>) -> Result<(), &'static str> {
    match request.headers().get_all(HOST).iter().count() {
        0 if request.version() == Version::HTTP_11 => Err("header host is missing"),
        0 | 1 => Ok(()),
        _ => Err("header host must appear once"),
    }
}
