//! One socket that can be reset from outside the task that uses it.
//!
//! hyper owns the stream that it reads and writes, so the descriptor is shared: `Stream` is hyper's half, and any
//! number of `Arc<Socket>` may call [`Socket::abort`]. An abort sends RST at once, by disconnecting the socket in the
//! kernel, instead of waiting until the owning task is polled and dropped: once `abort` returned, not one more byte
//! (least of all a terminating chunk) can reach the peer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::{RecvFlags, Shutdown, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// The two kinds of peers: clients and guests by TCP, the server by a Unix socket.
#[derive(Debug)]
enum Kind {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connected socket and what must be known of it without owning it.
#[derive(Debug)]
pub struct Socket {
    kind: Kind,
    aborted: AtomicBool,
    received_bytes: AtomicU64,
}

impl Socket {
    /// Wraps a TCP connection and turns Nagle's algorithm off: with delayed ACKs it adds 40 ms to a short exchange.
    pub fn tcp(stream: TcpStream) -> io::Result<Arc<Self>> {
        stream.set_nodelay(true)?;
        Ok(Self::new(Kind::Tcp(stream)))
    }

    /// Wraps a connection on a Unix socket.
    pub fn unix(stream: UnixStream) -> Arc<Self> {
        Self::new(Kind::Unix(stream))
    }

    fn new(kind: Kind) -> Arc<Self> {
        Arc::new(Self {
            kind,
            aborted: AtomicBool::new(false),
            received_bytes: AtomicU64::new(0),
        })
    }

    /// Bytes that the peer has sent us so far.
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes.load(Ordering::Relaxed)
    }

    /// Resets the connection now: the peer sees ECONNRESET, what was queued for it is dropped, and every later read or
    /// write here fails. Repeating it does nothing.
    pub fn abort(&self) {
        if self.aborted.swap(true, Ordering::SeqCst) {
            return;
        }
        // Errors mean that the peer is gone already, which is what was asked for.
        match &self.kind {
            Kind::Tcp(stream) => {
                // Linger 0 makes a later close a reset too, should the disconnect find a state it cannot reset.
                let _ = sockopt::set_socket_linger(stream, Some(Duration::ZERO));
                let _ = rustix::net::connect_unspec(stream);
            }
            Kind::Unix(stream) => {
                let _ = rustix::net::shutdown(stream, Shutdown::Both);
            }
        }
    }

    /// Ends the connection in an orderly way; the owner of the stream sees its end.
    pub fn close(&self) {
        let _ = rustix::net::shutdown(self, Shutdown::Both);
    }

    /// True when the peer has neither closed an idle connection nor sent something nobody asked for.
    pub fn is_quiet(&self) -> bool {
        let mut byte = [0u8; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(rustix::net::recv(self, &mut byte, flags), Err(rustix::io::Errno::AGAIN))
    }

    /// Bytes sent by us that the peer's kernel acknowledged; none where that is not known (Unix sockets).
    pub fn acknowledged_bytes(&self) -> Option<u64> {
        match &self.kind {
            Kind::Tcp(stream) => tcp_acknowledged_bytes(stream.as_fd()),
            Kind::Unix(_) => None,
        }
    }

    fn check(&self) -> io::Result<()> {
        if self.aborted.load(Ordering::SeqCst) {
            Err(io::ErrorKind::ConnectionReset.into())
        } else {
            Ok(())
        }
    }

    /// Reads what is there. Wakes the caller when nothing is.
    pub fn poll_receive(&self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            self.check()?;
            let read = match &self.kind {
                Kind::Tcp(stream) => {
                    ready!(stream.poll_read_ready(cx))?;
                    stream.try_read_buf(buffer)
                }
                Kind::Unix(stream) => {
                    ready!(stream.poll_read_ready(cx))?;
                    stream.try_read_buf(buffer)
                }
            };
            match read {
                Ok(count) => {
                    self.received_bytes.fetch_add(count as u64, Ordering::Relaxed);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Writes what fits. Wakes the caller when nothing does.
    pub fn poll_send(&self, cx: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        loop {
            self.check()?;
            let written = match &self.kind {
                Kind::Tcp(stream) => {
                    ready!(stream.poll_write_ready(cx))?;
                    stream.try_write_vectored(slices)
                }
                Kind::Unix(stream) => {
                    ready!(stream.poll_write_ready(cx))?;
                    stream.try_write_vectored(slices)
                }
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }

    /// Tells the peer that nothing more will come from us.
    pub fn finish_sending(&self) -> io::Result<()> {
        self.check()?;
        match rustix::net::shutdown(self, Shutdown::Write) {
            // The peer closed first; there is nobody left to tell.
            Err(rustix::io::Errno::NOTCONN) => Ok(()),
            other => other.map_err(io::Error::from),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.kind {
            Kind::Tcp(stream) => stream.as_fd(),
            Kind::Unix(stream) => stream.as_fd(),
        }
    }
}

/// `tcpi_bytes_acked` of TCP_INFO, which the kernel still knows after a reset.
fn tcp_acknowledged_bytes(socket: BorrowedFd<'_>) -> Option<u64> {
    use std::os::fd::AsRawFd;
    // Offset of `tcpi_bytes_acked` in the kernel's `struct tcp_info`; libc's copy of the struct ends before it.
    const OFFSET: usize = 120;
    const END: usize = OFFSET + 8;
    let mut info = [0u8; END];
    let mut length = END as libc::socklen_t;
    // SAFETY: the descriptor is borrowed for the call, and the kernel writes at most `length` bytes into `info`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 || (length as usize) < END {
        return None;
    }
    info[OFFSET..END].try_into().ok().map(u64::from_ne_bytes)
}

/// The reading and writing half of a [`Socket`], with whatever must live exactly as long (`G`).
#[derive(Debug)]
pub struct Stream<G> {
    pub socket: Arc<Socket>,
    pub guard: G,
}

impl<G: Unpin> AsyncRead for Stream<G> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_receive(cx, buffer)
    }
}

impl<G: Unpin> AsyncWrite for Stream<G> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.socket.poll_send(cx, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_send(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket.finish_sending())
    }
}
