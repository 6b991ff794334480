//! Requests for a port of a sandbox: find it, check what the server wants checked, pass the request on.

use std::sync::Arc;

use hyper::header::HOST;
use hyper::{Method, StatusCode, Uri};

use crate::answer::{self, Form, Reply};
use crate::client::Client;
use crate::directory::{Directory, NoRoute, Route};
use crate::exchange::ExchangeError;
use crate::head::{self, TokenCheck};
use crate::internal;
use crate::limits::{ENVD_PORT, RESOLVE_ATTEMPTS_MAX};
use crate::pass::{Inbound, pass};
use crate::pool::ConnectError;
use crate::route::Place;

/// Answers a request for `place`; `target` replaces the request target where the path named the sandbox.
pub async fn answer(
    directory: &Arc<Directory>,
    client: &Arc<Client>,
    mut inbound: Inbound,
    place: &Place,
    target: Option<String>,
) -> Reply {
    let form = Form::wanted(&inbound.head.headers);
    if inbound.head.method == Method::CONNECT {
        return answer::plain(form, StatusCode::METHOD_NOT_ALLOWED, "CONNECT is not supported");
    }
    if let Some(target) = target {
        match target.parse::<Uri>() {
            Ok(uri) => inbound.head.uri = uri,
            Err(_) => {
                return answer::plain(form, StatusCode::BAD_REQUEST, "the path after the port is invalid");
            }
        }
    }
    if place.port == ENVD_PORT && internal::is_internal(inbound.head.uri.path()) {
        return answer::plain(form, StatusCode::NOT_FOUND, "no such route");
    }
    deliver(directory, client, inbound, place, form).await
}

/// Tries the route, and once more a fresh one when the first leads nowhere: the sandbox may have moved on.
async fn deliver(
    directory: &Arc<Directory>,
    client: &Arc<Client>,
    mut inbound: Inbound,
    place: &Place,
    form: Form,
) -> Reply {
    let mut was_unreachable = false;
    for _ in 0..=RESOLVE_ATTEMPTS_MAX {
        let route = match directory.find(place).await {
            Ok(route) => route,
            // A guest that cannot be reached while the server is away is a closed port, as far as anybody knows.
            Err(NoRoute::Failed(_)) if was_unreachable => return answer::port_closed(form, place),
            Err(error) => return no_route(form, &error),
        };
        if let Some(refused) = check_token(form, place, &route, &inbound) {
            return refused;
        }
        // Registered before the first byte goes out; from here on a withdrawal resets this client.
        let Ok(carried) = route.generation.carry(&client.socket) else {
            continue;
        };
        // Kept, because a second route checks the token and masks the host for itself.
        let original = inbound.head.headers.clone();
        prepare(&mut inbound, place, &route);
        let error = match pass(&route.pool, client, &mut inbound, Some(Arc::new(carried))).await {
            Ok(reply) => return reply,
            Err(error) => error,
        };
        if was_unreachable || !is_unreachable(&error) {
            return failed(form, place, error);
        }
        was_unreachable = true;
        directory.forget(place, &route);
        inbound.head.headers = original;
    }
    no_route(form, &NoRoute::Superseded)
}

/// Makes the head what the guest may see.
fn prepare(inbound: &mut Inbound, place: &Place, route: &Route) {
    head::remove_secrets(&mut inbound.head.headers);
    if let Some(mask) = &route.target.host_mask {
        head::mask_host(&mut inbound.head.headers, mask, place.port);
    }
}

/// Whether the answer may have been about a sandbox that is gone.
fn is_unreachable(error: &ExchangeError) -> bool {
    use ConnectError::{Handshake, TimedOut, Unreachable};
    matches!(error, ExchangeError::Connect(Unreachable(_) | TimedOut | Handshake(_)))
}

fn failed(form: Form, place: &Place, error: ExchangeError) -> Reply {
    match error {
        ExchangeError::Connect(ConnectError::NoSocket(error)) => {
            say!("proxy: no socket for a guest connection: {error}");
            answer::unavailable(form, "the proxy is out of sockets")
        }
        // This client was reset; whatever is answered, it gets nothing, and least of all another resolve.
        ExchangeError::Connect(ConnectError::Over(_)) => no_route(form, &NoRoute::Superseded),
        ExchangeError::Connect(_) => answer::port_closed(form, place),
        ExchangeError::Broken(_) => answer::broke_off(form, place),
    }
}

fn check_token(form: Form, place: &Place, route: &Arc<Route>, inbound: &Inbound) -> Option<Reply> {
    let expected = route
        .target
        .traffic_token
        .as_deref()
        .filter(|_| place.port != ENVD_PORT)?;
    match head::check_token(&inbound.head.headers, expected) {
        TokenCheck::Passed => None,
        TokenCheck::Missing => Some(answer::token_missing(form, place)),
        TokenCheck::Invalid => Some(answer::token_invalid(form, place)),
    }
}

fn no_route(form: Form, error: &NoRoute) -> Reply {
    match error {
        NoRoute::Refused(refusal) => answer::refusal(form, refusal),
        NoRoute::Failed(_) | NoRoute::Superseded | NoRoute::TooMany => answer::unavailable(form, &error.to_string()),
    }
}

/// An error with all its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// The host that a request names: the authority of an absolute target, else the Host header.
pub fn host_of(uri: &Uri, headers: &hyper::HeaderMap) -> String {
    match uri.authority() {
        Some(authority) => authority.as_str().to_owned(),
        None => headers
            .get(HOST)
            .and_then(|host| host.to_str().ok())
            .unwrap_or_default()
            .to_owned(),
    }
}
