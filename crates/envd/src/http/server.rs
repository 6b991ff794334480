//! Listening and serving connections.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::route;
use crate::daemon::Daemon;

/// Connections waiting to be accepted while the one thread is busy.
const BACKLOG: u32 = 1024;

/// Bytes hyper may buffer of one connection. Small, since the output ring is the buffer that matters.
const CONNECTION_BUFFER_BYTES: usize = 64 << 10;

/// Sent data that stays unacknowledged for this long means that the peer is gone.
const UNACKNOWLEDGED_MAX_MS: u32 = 60_000;

/// Pause after a failed accept (no descriptors left), instead of spinning.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Opens the listening socket; from then on a client can connect.
pub fn listen(address: Ipv4Addr, port: u16) -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    // A restarted test daemon must not wait for old connections.
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((address, port)))?;
    socket.listen(BACKLOG)
}

/// Accepts connections for the life of the daemon.
pub async fn serve(daemon: Rc<Daemon>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::task::spawn_local(serve_connection(Rc::clone(&daemon), stream));
            }
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn serve_connection(daemon: Rc<Daemon>, stream: TcpStream) {
    // Every event must leave at once; Nagle would hold small frames back for 40 ms.
    let _ = stream.set_nodelay(true);
    notice_dead_peers(&stream);
    let number = daemon.next_serial();
    let mut oldest = daemon.oldest_connection.subscribe();
    let service = service_fn(|request| {
        let daemon = Rc::clone(&daemon);
        async move { Ok::<_, Infallible>(route::handle(daemon, number, request).await) }
    });
    let connection = http1::Builder::new()
        // An idle connection belongs to a proxy's pool: closing it here would race with its next request.
        .header_read_timeout(None)
        .max_buf_size(CONNECTION_BUFFER_BYTES)
        .pipeline_flush(true)
        .serve_connection(TokioIo::new(stream), service);
    // A reset or broken connection concerns nobody but its client.
    tokio::select! {
        _ = connection => {}
        _ = oldest.wait_for(|oldest| *oldest > number) => {}
    }
}

fn notice_dead_peers(stream: &TcpStream) {
    // Best effort: without these a dead peer is noticed later, or never when it owes us nothing.
    let _ = rustix::net::sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED_MAX_MS);
    let _ = rustix::net::sockopt::set_socket_keepalive(stream, true);
}
