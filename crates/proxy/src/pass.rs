//! Passes one request to a peer and its answer back, including the switch to a tunnel.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{CONNECTION, EXPECT, HeaderValue, UPGRADE};
use hyper::http::request::Parts;
use hyper::upgrade::{OnUpgrade, Parts as UpgradedParts, Upgraded};
use hyper::{Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::TokioIo;

use crate::answer::Reply;
use crate::body::{Download, Lease, ReplyBody};
use crate::client::{Admission, Client, Serving};
use crate::exchange::{ExchangeError, Outgoing, Source, exchange, is_idempotent};
use crate::generation::Carried;
use crate::head;
use crate::limits::UPGRADE_TIMEOUT;
use crate::pool::{PeerStream, Pool};
use crate::socket::Stream;
use crate::tunnel;
use crate::upload::Upload;

/// The stream type under every client's connection.
pub type ClientStream = Stream<Admission>;

/// A client's request, taken apart so that it can be sent more than once.
#[derive(Debug)]
pub struct Inbound {
    pub head: Parts,
    pub upload: Arc<Upload>,
    on_upgrade: Option<OnUpgrade>,
}

impl Inbound {
    /// Takes hop-by-hop headers off and makes the target relative: the next hop is an origin server.
    pub fn new(mut request: Request<Incoming>) -> Self {
        let wants_upgrade = head::wanted_upgrade(request.headers()).is_some();
        let on_upgrade = wants_upgrade.then(|| hyper::upgrade::on(&mut request));
        let (mut parts, body) = request.into_parts();
        let expects_continue = parts.headers.contains_key(EXPECT);
        let upload = Upload::new(body, expects_continue);
        if expects_continue {
            let waiting = Arc::downgrade(&upload);
            let mut carrier = Request::from_parts(parts, ());
            hyper::ext::on_informational(&mut carrier, move |answer| {
                if let Some(upload) = waiting.upgrade().filter(|_| answer.status() == StatusCode::CONTINUE) {
                    upload.proceed();
                }
            });
            parts = carrier.into_parts().0;
        }
        head::prepare_request(&mut parts.headers);
        head::complete_host(
            &mut parts.headers,
            parts.uri.authority().map(|authority| authority.as_str()),
        );
        parts.version = Version::HTTP_11;
        if let Some(target) = parts.uri.path_and_query().cloned() {
            parts.uri = Uri::from(target);
        }
        Self {
            head: parts,
            upload,
            on_upgrade,
        }
    }
}

/// Sends the request through `pool`. May be called again with the same request when it failed to connect.
pub async fn pass(
    pool: &Arc<Pool>,
    client: &Arc<Client>,
    inbound: &mut Inbound,
    carried: Option<Arc<Carried>>,
) -> Result<Reply, ExchangeError> {
    let outgoing = Outgoing {
        head: inbound.head.clone(),
        source: Source::Client {
            upload: Arc::clone(&inbound.upload),
            carried: carried.clone(),
        },
        is_idempotent: is_idempotent(&inbound.head.method),
    };
    let (response, lease) = exchange(pool, &outgoing).await?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(switch(client, inbound.on_upgrade.take(), response, lease, carried));
    }
    let (mut parts, incoming) = response.into_parts();
    head::strip_hop_by_hop(&mut parts.headers);
    // hyper writes the version of the client's request itself.
    parts.version = Version::HTTP_11;
    let download = Download {
        incoming,
        lease: Some(lease),
        upload: Arc::clone(&inbound.upload),
        client: Arc::clone(&client.socket),
        carried,
        has_ended: false,
    };
    Ok(Response::from_parts(parts, ReplyBody::passed(download)))
}

/// The peer agreed to another protocol: answers the client the same and starts the tunnel.
fn switch(
    client: &Arc<Client>,
    on_client: Option<OnUpgrade>,
    mut response: Response<Incoming>,
    lease: Lease,
    carried: Option<Arc<Carried>>,
) -> Reply {
    let on_peer = hyper::upgrade::on(&mut response);
    let (mut parts, _) = response.into_parts();
    let protocol = parts.headers.get(UPGRADE).cloned();
    head::strip_hop_by_hop(&mut parts.headers);
    parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol {
        parts.headers.insert(UPGRADE, protocol);
    }
    let ends = Ends {
        client: Arc::clone(client),
        peer: lease,
        _carried: carried,
        _serving: client.begin(),
    };
    tokio::spawn(join(ends, on_client, on_peer));
    Response::from_parts(parts, ReplyBody::own(""))
}

/// What a tunnel keeps alive and registered.
struct Ends {
    client: Arc<Client>,
    peer: Lease,
    _carried: Option<Arc<Carried>>,
    _serving: Serving,
}

async fn join(ends: Ends, on_client: Option<OnUpgrade>, on_peer: OnUpgrade) {
    let both = async { tokio::try_join!(on_client?, on_peer).ok() };
    let upgraded = tokio::time::timeout(UPGRADE_TIMEOUT, both).await.ok().flatten();
    let streams = upgraded
        .and_then(|(client, peer)| Some((take_stream::<ClientStream>(client)?, take_stream::<PeerStream>(peer)?)));
    match streams {
        // The streams keep both connections registered and are closed when the tunnel has ended.
        Some((client, peer)) => tunnel::run(&client.0.socket, client.1, &peer.0.socket, peer.1).await,
        // A 101 nobody asked for, or an end that broke meanwhile.
        None => {
            ends.client.socket.abort();
            ends.peer.socket.abort();
        }
    }
}

fn take_stream<S>(upgraded: Upgraded) -> Option<(S, bytes::Bytes)>
where
    TokioIo<S>: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let UpgradedParts { io, read_buf, .. } = upgraded.downcast::<TokioIo<S>>().ok()?;
    Some((io.into_inner(), read_buf))
}
