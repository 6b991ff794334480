//! Answers on their way to the client, frame by frame and never collected.
//!
//! They also hold what must live as long as the bytes flow: the registration of the client's connection with its
//! generation, and the connection to the peer, which goes back to its pool when the answer has ended.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::SendRequest;

use crate::client::Serving;
use crate::generation::Carried;
use crate::pool::Pool;
use crate::socket::Socket;
use crate::upload::{RequestBody, Upload};

/// The connection that an answer comes from.
#[derive(Debug)]
pub struct Lease {
    pub pool: Arc<Pool>,
    pub sender: SendRequest<RequestBody>,
    pub socket: Arc<Socket>,
}

/// An answer from a guest or the server, being passed on.
#[derive(Debug)]
pub struct Download {
    pub incoming: Incoming,
    pub lease: Option<Lease>,
    pub upload: Arc<Upload>,
    pub client: Arc<Socket>,
    pub carried: Option<Arc<Carried>>,
    pub has_ended: bool,
}

impl Download {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let frame = Pin::new(&mut self.incoming).poll_frame(cx);
        match &frame {
            Poll::Ready(None) => self.has_ended = true,
            // The peer broke off. The client must not take what it has for the whole, so it sees a reset as well.
            Poll::Ready(Some(Err(_))) => self.client.abort(),
            _ => {}
        }
        frame.map_err(io::Error::other)
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        let has_ended = self.has_ended || self.incoming.is_end_stream();
        self.upload.abandon_if_unwanted();
        if let Some(Lease { pool, sender, socket }) = self.lease.take()
            && has_ended
            && self.upload.has_ended()
        {
            pool.give_back(sender, socket);
        }
    }
}

/// The body of every answer to a client.
#[derive(Debug)]
pub enum ReplyBody {
    /// Made by the proxy.
    Own {
        bytes: Option<Bytes>,
        serving: Option<Serving>,
    },
    Passed {
        download: Download,
        serving: Option<Serving>,
    },
}

impl ReplyBody {
    pub fn own(bytes: impl Into<Bytes>) -> Self {
        let bytes = Some(bytes.into()).filter(|bytes: &Bytes| !bytes.is_empty());
        Self::Own { bytes, serving: None }
    }

    pub fn passed(download: Download) -> Self {
        Self::Passed {
            download,
            serving: None,
        }
    }

    /// Keeps the client's connection marked as busy until the body is sent.
    pub fn hold(&mut self, guard: Serving) {
        match self {
            Self::Own { serving, .. } | Self::Passed { serving, .. } => *serving = Some(guard),
        }
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Self::Own { bytes, .. } => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Passed { download, .. } => download.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own { bytes, .. } => bytes.is_none(),
            Self::Passed { download, .. } => download.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own { bytes, .. } => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Passed { download, .. } => download.incoming.size_hint(),
        }
    }
}
