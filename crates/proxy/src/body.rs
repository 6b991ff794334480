//! Bodies on their way through, in both directions, frame by frame and never collected.
//!
//! They also hold what must live as long as the bytes flow: the registration of the client's connection with its
//! generation, and the connection to the peer, which goes back to its pool when the answer has ended.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::SendRequest;
use tokio::time::Sleep;

use crate::client::Serving;
use crate::generation::Carried;
use crate::limits::CONTINUE_TIMEOUT;
use crate::pool::Pool;
use crate::socket::Socket;

/// A client's request body. Lives outside of hyper's request, so that a request whose body was not begun can be sent
/// again on another connection.
#[derive(Debug)]
pub struct Upload(Mutex<UploadState>);

#[derive(Debug)]
struct UploadState {
    incoming: Incoming,
    progress: Progress,
    /// The guest has not said yet whether it wants the body (`Expect: 100-continue`).
    must_wait: bool,
    reader: Option<Waker>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// There is no body.
    Empty,
    NotBegun,
    Begun,
    Ended,
    /// The answer came without the body having been wanted; it is never sent.
    Abandoned,
}

impl UploadState {
    fn wake_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

impl Upload {
    pub fn new(incoming: Incoming, expects_continue: bool) -> Arc<Self> {
        let progress = if incoming.is_end_stream() { Progress::Empty } else { Progress::NotBegun };
        Arc::new(Self(Mutex::new(UploadState { incoming, progress, must_wait: expects_continue, reader: None })))
    }

    fn lock(&self) -> MutexGuard<'_, UploadState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the whole request can be sent again: nothing of the body was taken from the client yet.
    pub fn is_repeatable(&self) -> bool {
        matches!(self.lock().progress, Progress::Empty | Progress::NotBegun)
    }

    fn has_ended(&self) -> bool {
        matches!(self.lock().progress, Progress::Empty | Progress::Ended)
    }

    /// The guest wants the body.
    pub fn proceed(&self) {
        let mut state = self.lock();
        state.must_wait = false;
        state.wake_reader();
    }

    /// The answer has ended; a body that was not begun by now is not wanted.
    fn abandon_if_unwanted(&self) {
        let mut state = self.lock();
        if state.progress == Progress::NotBegun {
            state.progress = Progress::Abandoned;
            state.wake_reader();
        }
    }
}

/// The body of one attempt to send a request.
#[derive(Debug)]
pub enum RequestBody {
    /// Made by the proxy.
    Own(Option<Bytes>),
    Passed {
        upload: Arc<Upload>,
        /// Ends the waiting for `100 Continue`.
        patience: Option<Pin<Box<Sleep>>>,
        /// Keeps the client's connection registered while only the upload goes on.
        carried: Option<Arc<Carried>>,
    },
}

impl RequestBody {
    pub fn passed(upload: &Arc<Upload>, carried: Option<&Arc<Carried>>) -> Self {
        let must_wait = upload.lock().must_wait;
        let patience = must_wait.then(|| Box::pin(tokio::time::sleep(CONTINUE_TIMEOUT)));
        Self::Passed { upload: Arc::clone(upload), patience, carried: carried.cloned() }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Self::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Passed { upload, patience, .. } => poll_upload(&mut upload.lock(), patience.as_mut(), cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(bytes) => bytes.is_none(),
            Self::Passed { upload, .. } => upload.lock().incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Passed { upload, .. } => upload.lock().incoming.size_hint(),
        }
    }
}

fn poll_upload(
    state: &mut UploadState,
    patience: Option<&mut Pin<Box<Sleep>>>,
    cx: &mut Context<'_>,
) -> Poll<Option<io::Result<Frame<Bytes>>>> {
    if state.progress == Progress::Abandoned {
        return Poll::Ready(Some(Err(io::ErrorKind::Interrupted.into())));
    }
    if state.must_wait {
        let is_over = patience.is_none_or(|sleep| sleep.as_mut().poll(cx).is_ready());
        if !is_over {
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        state.must_wait = false;
    }
    let frame = Pin::new(&mut state.incoming).poll_frame(cx);
    match &frame {
        Poll::Ready(Some(_)) => state.progress = Progress::Begun,
        Poll::Ready(None) if state.progress == Progress::Empty => {}
        Poll::Ready(None) => state.progress = Progress::Ended,
        // Remembered, so that abandoning the body reaches a reader that waits for the client.
        Poll::Pending => state.reader = Some(cx.waker().clone()),
    }
    if state.progress == Progress::Begun && state.incoming.is_end_stream() {
        state.progress = Progress::Ended;
    }
    frame.map_err(io::Error::other)
}

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
    Own { bytes: Option<Bytes>, serving: Option<Serving> },
    Passed { download: Download, serving: Option<Serving> },
}

impl ReplyBody {
    pub fn own(bytes: impl Into<Bytes>) -> Self {
        let bytes = Some(bytes.into()).filter(|bytes: &Bytes| !bytes.is_empty());
        Self::Own { bytes, serving: None }
    }

    pub fn passed(download: Download) -> Self {
        Self::Passed { download, serving: None }
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
