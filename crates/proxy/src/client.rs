//! The clients' connections: how many there are, and which of them have been silent or slow for too long.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use crate::limits::{CLIENT_IDLE_TIMEOUT, HEAD_TIMEOUT};
use crate::socket::Socket;

/// What a connection is doing. `Serving` counts, because a pipelined request may begin before the last answer is gone.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Between requests, having received so many bytes by the end of the last one.
    Idle {
        since: Instant,
        received_bytes: u64,
    },
    /// Some bytes of a head have come.
    Head {
        since: Instant,
    },
    Serving {
        requests: usize,
    },
}

/// One connection of a client.
#[derive(Debug)]
pub struct Client {
    pub socket: Arc<Socket>,
    pub peer: SocketAddr,
    phase: Mutex<Phase>,
}

impl Client {
    /// Marks a request as being served until the guard is dropped.
    pub fn begin(self: &Arc<Self>) -> Serving {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        *phase = match *phase {
            Phase::Serving { requests } => Phase::Serving { requests: requests + 1 },
            Phase::Idle { .. } | Phase::Head { .. } => Phase::Serving { requests: 1 },
        };
        Serving(Arc::clone(self))
    }

    fn end(&self) {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        *phase = match *phase {
            Phase::Serving { requests } if requests > 1 => Phase::Serving { requests: requests - 1 },
            _ => Phase::Idle {
                since: Instant::now(),
                received_bytes: self.socket.received_bytes(),
            },
        };
    }

    /// Whether no request is being served.
    pub fn is_waiting(&self) -> bool {
        !matches!(
            *self.phase.lock().unwrap_or_else(PoisonError::into_inner),
            Phase::Serving { .. }
        )
    }

    /// Closes the connection when it exceeded its limit.
    fn sweep(&self, now: Instant) {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, limit) = match *phase {
            Phase::Serving { .. } => return,
            Phase::Idle { received_bytes, .. } if self.socket.received_bytes() > received_bytes => {
                *phase = Phase::Head { since: now };
                return;
            }
            Phase::Idle { since, .. } => (since, CLIENT_IDLE_TIMEOUT),
            Phase::Head { since } => (since, HEAD_TIMEOUT),
        };
        if now.saturating_duration_since(since) > limit {
            self.socket.close();
        }
    }
}

/// A request being served.
#[derive(Debug)]
pub struct Serving(Arc<Client>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// All connections of clients, at most `connections_max`.
#[derive(Debug)]
pub struct Clients {
    connections_max: usize,
    next: AtomicU64,
    open: Mutex<HashMap<u64, Weak<Client>>>,
}

impl Clients {
    pub fn new(connections_max: usize) -> Arc<Self> {
        Arc::new(Self {
            connections_max,
            next: AtomicU64::new(0),
            open: Mutex::default(),
        })
    }

    /// Takes a place for a new connection; none when all are taken.
    pub fn admit(self: &Arc<Self>, socket: &Arc<Socket>, peer: SocketAddr) -> Option<(Arc<Client>, Admission)> {
        let phase = Mutex::new(Phase::Idle {
            since: Instant::now(),
            received_bytes: 0,
        });
        let client = Arc::new(Client {
            socket: Arc::clone(socket),
            peer,
            phase,
        });
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.len() >= self.connections_max {
            return None;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        open.insert(number, Arc::downgrade(&client));
        Some((
            client,
            Admission {
                clients: Arc::clone(self),
                number,
            },
        ))
    }

    pub fn count(&self) -> usize {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Closes what has been idle or slow for too long.
    pub fn sweep(&self, now: Instant) {
        self.each(|client| client.sweep(now));
    }

    /// Closes what serves no request, and says how many connections still do.
    pub fn close_waiting(&self) -> usize {
        let mut serving = 0;
        self.each(|client| {
            if client.is_waiting() {
                client.socket.close();
            } else {
                serving += 1;
            }
        });
        serving
    }

    fn each(&self, mut visit: impl FnMut(&Client)) {
        let open: Vec<_> = {
            let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            open.values().filter_map(Weak::upgrade).collect()
        };
        open.iter().for_each(|client| visit(client));
    }
}

/// A place among the connections, given back when the client's stream is dropped.
#[derive(Debug)]
pub struct Admission {
    clients: Arc<Clients>,
    number: u64,
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.clients
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    async fn connected() -> (TcpStream, Arc<Clients>, Arc<Client>, Admission) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let outside = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (inside, peer) = listener.accept().await.unwrap();
        let clients = Clients::new(1);
        let (client, admission) = clients.admit(&Socket::tcp(inside).unwrap(), peer).unwrap();
        (outside, clients, client, admission)
    }

    /// Sends some bytes and has them received.
    async fn send(outside: &mut TcpStream, client: &Client) {
        outside.write_all(b"GET /").await.unwrap();
        let mut bytes = [0; 5];
        let mut buffer = tokio::io::ReadBuf::new(&mut bytes);
        std::future::poll_fn(|cx| client.socket.poll_receive(cx, &mut buffer))
            .await
            .unwrap();
    }

    fn is_open(client: &Client) -> bool {
        client.socket.is_quiet()
    }

    #[tokio::test]
    async fn a_silent_connection_is_closed_after_its_time() {
        let (mut outside, clients, client, _admission) = connected().await;
        let start = Instant::now();
        clients.sweep(start + CLIENT_IDLE_TIMEOUT - Duration::from_secs(1));
        assert!(is_open(&client));
        clients.sweep(start + CLIENT_IDLE_TIMEOUT + Duration::from_secs(1));
        assert_eq!(outside.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_slow_head_is_cut_off() {
        let (mut outside, clients, client, _admission) = connected().await;
        send(&mut outside, &client).await;
        let start = Instant::now();
        clients.sweep(start);
        // More bytes of the same head buy no time.
        send(&mut outside, &client).await;
        clients.sweep(start + HEAD_TIMEOUT);
        assert!(is_open(&client));
        clients.sweep(start + HEAD_TIMEOUT + Duration::from_secs(1));
        assert_eq!(outside.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_request_being_served_has_all_the_time_it_needs() {
        let (mut outside, clients, client, _admission) = connected().await;
        send(&mut outside, &client).await;
        let serving = client.begin();
        clients.sweep(Instant::now() + 2 * CLIENT_IDLE_TIMEOUT);
        assert!(is_open(&client));
        drop(serving);
        clients.sweep(Instant::now() + HEAD_TIMEOUT + Duration::from_secs(1));
        assert!(is_open(&client), "what was received belongs to the request before");
    }
}
