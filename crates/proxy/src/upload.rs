//! Request bodies on their way to a guest or the server, frame by frame.
//!
//! A client's body lives outside of hyper's request, so that a request can be sent again when its connection turns out
//! to be closed. What was taken from the client by then is kept for that, within [`KEPT_BYTES_MAX`] and only on reused
//! connections; keeping shares the buffers and copies nothing.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::Sleep;

use crate::generation::Carried;
use crate::limits::{CONTINUE_TIMEOUT, KEPT_BYTES_MAX};

/// A client's request body.
#[derive(Debug)]
pub struct Upload(Mutex<State>);

#[derive(Debug)]
struct State {
    incoming: Incoming,
    progress: Progress,
    /// The guest has not said yet whether it wants the body (`Expect: 100-continue`).
    must_wait: bool,
    reader: Option<Waker>,
    /// Counts the times that the request was sent; only the last may read.
    attempt: u32,
    /// All that was taken from the client; None when that is not known any more.
    kept: Option<Vec<Bytes>>,
    /// To be sent again before more is taken from the client.
    again: VecDeque<Bytes>,
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

impl Upload {
    pub fn new(incoming: Incoming, expects_continue: bool) -> Arc<Self> {
        let progress = if incoming.is_end_stream() {
            Progress::Empty
        } else {
            Progress::NotBegun
        };
        Arc::new(Self(Mutex::new(State {
            incoming,
            progress,
            must_wait: expects_continue,
            reader: None,
            attempt: 0,
            kept: None,
            again: VecDeque::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to send, from the beginning. With `keep` the body stays repeatable while it is small.
    fn start(&self, keep: bool) -> (u32, bool) {
        let mut state = self.lock();
        state.attempt += 1;
        if let Some(kept) = state.kept.take() {
            state.again = kept.into();
        }
        if !state.again.is_empty() {
            state.progress = Progress::Begun;
        }
        let is_whole = matches!(state.progress, Progress::Empty | Progress::NotBegun);
        state.kept = (keep && is_whole).then(Vec::new);
        (state.attempt, state.must_wait)
    }

    /// Whether the whole request can be sent again.
    pub fn is_repeatable(&self) -> bool {
        let state = self.lock();
        state.kept.is_some() || matches!(state.progress, Progress::Empty | Progress::NotBegun)
    }

    /// An answer came: nothing will be sent again.
    pub fn settle(&self) {
        self.lock().kept = None;
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.lock().progress, Progress::Empty | Progress::Ended)
    }

    /// The guest wants the body.
    pub fn proceed(&self) {
        let mut state = self.lock();
        state.must_wait = false;
        state.wake_reader();
    }

    /// The answer has ended; a body that was not begun by now is not wanted.
    pub fn abandon_if_unwanted(&self) {
        let mut state = self.lock();
        if state.progress == Progress::NotBegun {
            state.progress = Progress::Abandoned;
            state.wake_reader();
        }
    }
}

impl State {
    fn wake_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Some(bytes) = self.again.pop_front() {
            self.note_end();
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        let frame = match Pin::new(&mut self.incoming).poll_frame(cx) {
            // Remembered, so that abandoning the body reaches a reader that waits for the client.
            Poll::Pending => {
                self.reader = Some(cx.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(frame) => frame,
        };
        match &frame {
            Some(Ok(frame)) => self.keep(frame.data_ref()),
            Some(Err(_)) => self.kept = None,
            None if self.progress == Progress::Empty => {}
            None => self.progress = Progress::Ended,
        }
        self.note_end();
        Poll::Ready(frame.map(|frame| frame.map_err(io::Error::other)))
    }

    fn keep(&mut self, data: Option<&Bytes>) {
        self.progress = Progress::Begun;
        let Some(kept) = &mut self.kept else { return };
        let kept_bytes: usize = kept.iter().map(Bytes::len).sum();
        match data {
            Some(data) if kept_bytes + data.len() <= KEPT_BYTES_MAX => kept.push(data.clone()),
            // Too much, or trailers.
            _ => self.kept = None,
        }
    }

    /// hyper does not ask for the end of a body whose length it knows.
    fn note_end(&mut self) {
        if self.progress == Progress::Begun && self.again.is_empty() && self.incoming.is_end_stream() {
            self.progress = Progress::Ended;
        }
    }
}

/// The body of one attempt to send a request.
#[derive(Debug)]
pub enum RequestBody {
    /// Made by the proxy.
    Own(Option<Bytes>),
    Passed(Passed),
}

#[derive(Debug)]
pub struct Passed {
    upload: Arc<Upload>,
    attempt: u32,
    /// Ends the waiting for `100 Continue`.
    patience: Option<Pin<Box<Sleep>>>,
    /// Keeps the client's connection registered while only the upload goes on.
    _carried: Option<Arc<Carried>>,
}

impl RequestBody {
    /// Sends `upload` from its beginning, for which it must be repeatable or new.
    pub fn passed(upload: &Arc<Upload>, carried: Option<&Arc<Carried>>, keep: bool) -> Self {
        let (attempt, must_wait) = upload.start(keep);
        let patience = must_wait.then(|| Box::pin(tokio::time::sleep(CONTINUE_TIMEOUT)));
        Self::Passed(Passed {
            upload: Arc::clone(upload),
            attempt,
            patience,
            _carried: carried.cloned(),
        })
    }
}

impl Passed {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let mut state = self.upload.lock();
        if state.progress == Progress::Abandoned || state.attempt != self.attempt {
            return Poll::Ready(Some(Err(io::ErrorKind::Interrupted.into())));
        }
        if state.must_wait {
            state.reader = Some(cx.waker().clone());
            if let Some(sleep) = &mut self.patience {
                ready!(sleep.as_mut().poll(cx));
            }
            state.must_wait = false;
        }
        state.poll_frame(cx)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Self::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Passed(passed) => passed.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(bytes) => bytes.is_none(),
            Self::Passed(Passed { upload, .. }) => {
                let state = upload.lock();
                state.again.is_empty() && state.incoming.is_end_stream()
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Passed(Passed { upload, .. }) => {
                let state = upload.lock();
                let again_bytes: u64 = state.again.iter().map(|bytes| bytes.len() as u64).sum();
                let rest = state.incoming.size_hint();
                let mut hint = SizeHint::new();
                if let Some(upper) = rest.upper() {
                    hint.set_upper(upper + again_bytes);
                }
                hint.set_lower(rest.lower() + again_bytes);
                hint
            }
        }
    }
}
