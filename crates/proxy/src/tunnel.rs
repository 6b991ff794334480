//! A connection that switched protocols: bytes both ways until both ends are done.
//!
//! An idle tunnel holds no buffer. Bytes are read into one buffer per thread and only what the other side did not take
//! at once is kept, so thousands of silent WebSockets cost little more than their sockets.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use tokio::io::ReadBuf;

use crate::limits::TUNNEL_CHUNK_BYTES;
use crate::socket::Socket;

thread_local! {
    static CHUNK: RefCell<Vec<u8>> = RefCell::new(vec![0; TUNNEL_CHUNK_BYTES]);
}

/// Chunks moved by one direction before other tasks get their turn.
const CHUNKS_PER_TURN: usize = 16;

/// One direction.
#[derive(Debug)]
struct Direction {
    from: Arc<Socket>,
    to: Arc<Socket>,
    /// Read but not yet written.
    pending: Bytes,
    has_ended: bool,
}

/// Runs a tunnel; `from_client` and `from_guest` were read ahead during the HTTP exchange. When one end breaks, the other
/// is reset.
pub async fn run(client: &Arc<Socket>, from_client: Bytes, guest: &Arc<Socket>, from_guest: Bytes) {
    let mut up = Direction::new(client, guest, from_client);
    let mut down = Direction::new(guest, client, from_guest);
    let both = std::future::poll_fn(|cx| {
        let up = up.poll(cx)?;
        let down = down.poll(cx)?;
        if up.is_ready() && down.is_ready() {
            Poll::Ready(Ok::<(), io::Error>(()))
        } else {
            Poll::Pending
        }
    });
    if both.await.is_err() {
        client.abort();
        guest.abort();
    }
}

impl Direction {
    fn new(from: &Arc<Socket>, to: &Arc<Socket>, read_ahead: Bytes) -> Self {
        // Even an empty slice of hyper's read buffer would keep all of it.
        let pending = if read_ahead.is_empty() {
            Bytes::new()
        } else {
            read_ahead
        };
        Self {
            from: Arc::clone(from),
            to: Arc::clone(to),
            pending,
            has_ended: false,
        }
    }

    /// Ready when this direction has ended and the receiver was told so.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        for _ in 0..CHUNKS_PER_TURN {
            if self.has_ended {
                return Poll::Ready(Ok(()));
            }
            let step = if self.pending.is_empty() {
                CHUNK.with_borrow_mut(|chunk| self.poll_fresh(cx, chunk))
            } else {
                self.poll_pending(cx)
            };
            match step {
                Poll::Ready(Ok(())) => {}
                other => return other,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn poll_fresh(&mut self, cx: &mut Context<'_>, chunk: &mut [u8]) -> Poll<io::Result<()>> {
        let mut buffer = ReadBuf::new(chunk);
        std::task::ready!(self.from.poll_receive(cx, &mut buffer))?;
        let bytes = buffer.filled();
        if bytes.is_empty() {
            self.has_ended = true;
            return Poll::Ready(self.to.finish_sending());
        }
        match self.to.poll_send(cx, &[io::IoSlice::new(bytes)]) {
            Poll::Ready(Ok(sent)) if sent == bytes.len() => Poll::Ready(Ok(())),
            Poll::Ready(Ok(sent)) => {
                self.pending = Bytes::copy_from_slice(&bytes[sent..]);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                self.pending = Bytes::copy_from_slice(bytes);
                Poll::Pending
            }
        }
    }

    fn poll_pending(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = std::task::ready!(self.to.poll_send(cx, &[io::IoSlice::new(&self.pending)]))?;
        self.pending.advance(sent);
        if self.pending.is_empty() {
            // Lets go of what was read ahead.
            self.pending = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}
