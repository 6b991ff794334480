//! The public listener: accepts, turns away what is too much, sweeps what is too old, and stops.

use std::sync::Arc;
use std::time::Instant;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::answer::{self, Form};
use crate::client::Clients;
use crate::limits::{ACCEPT_BACKOFF, CONNECTIONS_MAX, DESCRIPTORS_RESERVED, SHUTDOWN_GRACE, SWEEP_INTERVAL};
use crate::serve::{Front, connection};
use crate::socket::Socket;

/// Connections that fit: each takes a descriptor for the client and one for the guest.
pub fn connections_max(asked: Option<usize>) -> usize {
    let limit = raise_descriptor_limit();
    let fitting = limit.saturating_sub(DESCRIPTORS_RESERVED) / 2;
    asked.unwrap_or(CONNECTIONS_MAX).min(fitting).max(1)
}

/// Raises the soft limit of open descriptors to the hard one and returns it.
fn raise_descriptor_limit() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    ) {
        say!("proxy: cannot raise the limit of open descriptors: {error}");
    }
    getrlimit(Resource::Nofile)
        .current
        .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Accepts until `shutdown`, then gives answers under way their grace.
pub async fn serve(listener: TcpListener, front: Arc<Front>, clients: Arc<Clients>, shutdown: Arc<Notify>) {
    let sweeper = tokio::spawn(sweep(Arc::clone(&front), Arc::clone(&clients)));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.notified() => break,
        };
        match accepted {
            Ok((stream, peer)) => admit(stream, peer, &front, &clients),
            // Out of descriptors or memory; connections that wait in the backlog get their turn later.
            Err(error) => {
                say!("proxy: accept: {error}");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
    drop(listener);
    sweeper.abort();
    drain(&clients).await;
}

fn admit(stream: TcpStream, peer: std::net::SocketAddr, front: &Arc<Front>, clients: &Arc<Clients>) {
    // A client that is gone before it was accepted cannot be set up, nor does it matter.
    let Ok(socket) = Socket::tcp(stream) else {
        return;
    };
    match clients.admit(&socket, peer) {
        Some((client, admission)) => {
            tokio::spawn(connection(Arc::clone(front), client, admission));
        }
        None => turn_away(&socket),
    }
}

/// Answers 503 without reading a request; what does not fit into the socket's buffer at once is not sent.
fn turn_away(socket: &Socket) {
    let reply = answer::unavailable(Form::Json, "the proxy has no room for another connection");
    let body = r#"{"code":503,"message":"the proxy has no room for another connection"}"#;
    let mut head = format!(
        "HTTP/1.1 {}\r\nconnection: close\r\ncontent-length: {}\r\n",
        reply.status(),
        body.len()
    );
    for (name, value) in reply.headers() {
        head += &format!("{name}: {}\r\n", value.to_str().unwrap_or_default());
    }
    let _ = rustix::net::send(
        socket,
        format!("{head}\r\n{body}").as_bytes(),
        rustix::net::SendFlags::NOSIGNAL,
    );
    socket.close();
}

async fn sweep(front: Arc<Front>, clients: Arc<Clients>) {
    let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        clients.sweep(Instant::now());
        front.directory.sweep();
        front.api.sweep();
    }
}

/// Waits for answers under way, closing connections as they fall idle.
async fn drain(clients: &Clients) {
    let deadline = tokio::time::Instant::now() + SHUTDOWN_GRACE;
    while clients.close_waiting() > 0 && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(ACCEPT_BACKOFF).await;
    }
}
