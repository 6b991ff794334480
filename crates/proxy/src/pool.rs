//! Connections to one peer: a port of one sandbox run, or a Unix socket of the server.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};

use crate::generation::{Generation, Over, Owned};
use crate::limits::{
    BUFFER_BYTES_MAX, CONNECT_TIMEOUT, GUEST_IDLE_MAX, GUEST_IDLE_TIMEOUT, HEAD_BYTES_MAX, HEAD_LINES_MAX,
    RETURN_TIMEOUT, SERVER_IDLE_MAX, SERVER_IDLE_TIMEOUT,
};
use crate::socket::{Socket, Stream};
use crate::upload::RequestBody;

/// The stream type under every connection that we open; tunnels get it back from hyper by this name.
pub type PeerStream = Stream<Option<Owned>>;

#[derive(Debug)]
pub enum Peer {
    Guest {
        address: SocketAddr,
        generation: Weak<Generation>,
    },
    Server(PathBuf),
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Somebody is there, but nothing listens.
    #[error("connection refused")]
    Refused,
    #[error("peer cannot be reached")]
    Unreachable(#[source] io::Error),
    #[error("no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    TimedOut,
    /// We ran out of descriptors, ports or memory; the peer has no part in it.
    #[error("no socket for a connection")]
    NoSocket(#[source] io::Error),
    #[error(transparent)]
    Over(#[from] Over),
    #[error("HTTP set-up of a connection failed")]
    Handshake(#[source] hyper::Error),
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        use rustix::io::Errno;
        match Errno::from_io_error(&error) {
            Some(Errno::CONNREFUSED) => Self::Refused,
            Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::ADDRNOTAVAIL | Errno::AGAIN) => {
                Self::NoSocket(error)
            }
            _ => Self::Unreachable(error),
        }
    }
}

/// A connection ready for one request.
#[derive(Debug)]
pub struct Connection {
    pub sender: SendRequest<RequestBody>,
    pub socket: Arc<Socket>,
}

#[derive(Debug)]
struct Idle {
    sender: SendRequest<RequestBody>,
    socket: Arc<Socket>,
    since: Instant,
}

#[derive(Debug)]
pub struct Pool {
    peer: Peer,
    idle: Mutex<Vec<Idle>>,
}

impl Pool {
    pub fn new(peer: Peer) -> Arc<Self> {
        Arc::new(Self {
            peer,
            idle: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn limits(&self) -> (usize, Duration) {
        match self.peer {
            Peer::Guest { .. } => (GUEST_IDLE_MAX, GUEST_IDLE_TIMEOUT),
            Peer::Server(_) => (SERVER_IDLE_MAX, SERVER_IDLE_TIMEOUT),
        }
    }

    /// The most recently used idle connection that is younger than `idle_max` and not closed by the peer.
    pub async fn reuse(&self, idle_max: Duration) -> Option<Connection> {
        loop {
            let Idle { mut sender, socket, .. } = self.take_younger(idle_max)?;
            // Its own task may still have to notice that the last answer has ended.
            let ready = tokio::time::timeout(RETURN_TIMEOUT, sender.ready());
            if matches!(ready.await, Ok(Ok(()))) && socket.is_quiet() {
                return Some(Connection { sender, socket });
            }
        }
    }

    fn take_younger(&self, idle_max: Duration) -> Option<Idle> {
        let idle_max = idle_max.min(self.limits().1);
        let mut idle = self.lock();
        // The last is the youngest.
        if idle.last()?.since.elapsed() > idle_max {
            None
        } else {
            idle.pop()
        }
    }

    /// A new connection.
    pub async fn connect(&self) -> Result<Connection, ConnectError> {
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, self.open());
        let stream = stream.await.map_err(|_| ConnectError::TimedOut)??;
        let socket = Arc::clone(&stream.socket);
        let mut builder = http1::Builder::new();
        builder
            .preserve_header_case(true)
            .max_headers(HEAD_LINES_MAX)
            .max_header_size(HEAD_BYTES_MAX);
        builder.max_buf_size(BUFFER_BYTES_MAX);
        let (sender, driver) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(ConnectError::Handshake)?;
        // Its errors reach whoever waits for an answer; between requests they mean that the peer closed.
        tokio::spawn(async move { drop(driver.with_upgrades().await) });
        Ok(Connection { sender, socket })
    }

    async fn open(&self) -> Result<PeerStream, ConnectError> {
        match &self.peer {
            Peer::Server(path) => {
                let socket = Socket::unix(UnixStream::connect(path).await?);
                Ok(Stream { socket, guard: None })
            }
            Peer::Guest { address, generation } => {
                let generation = generation.upgrade().ok_or(Over)?;
                let socket = Socket::tcp(TcpStream::connect(address).await?)?;
                let owned = generation.own(&socket).inspect_err(|_| socket.abort())?;
                Ok(Stream {
                    socket,
                    guard: Some(owned),
                })
            }
        }
    }

    /// Takes a connection back whose request and answer have both ended.
    pub fn give_back(&self, sender: SendRequest<RequestBody>, socket: Arc<Socket>) {
        let (count_max, _) = self.limits();
        let mut idle = self.lock();
        if idle.len() >= count_max {
            idle.remove(0);
        }
        idle.push(Idle {
            sender,
            socket,
            since: Instant::now(),
        });
    }

    /// Drops idle connections that are too old or closed.
    pub fn sweep(&self) {
        let (_, age_max) = self.limits();
        self.lock()
            .retain(|idle| idle.since.elapsed() <= age_max && !idle.sender.is_closed());
    }

    /// Drops all idle connections.
    pub fn clear(&self) {
        self.lock().clear();
    }
}
