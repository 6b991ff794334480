//! The answer of `Start` and `Connect`: one client's view of one process.
//!
//! ```text
//! Begin --start event--> Live --end of output--> (end event + end frame) Done
//!                          |--fell out of the ring--> (error frame) Done
//!                          |--deadline of this call--> (error frame) Done
//! ```
//!
//! The body is pulled by the HTTP connection and reads the ring at its own cursor, so a client costs no queue:
//! a slow one simply is not asked for more. The pump pauses before it would overwrite what an attached reader
//! has not taken; a reader that takes nothing for [`STALL_MAX`] is no longer waited for, and if its output has
//! then been overwritten its stream ends with an error that says so. Nothing is skipped silently.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame};
use tokio::time::{Instant, Sleep};

use super::Shared;
use super::ring::{Kind, Read};
use crate::connect::{self, Code, RpcError};
use crate::json::put_base64;

/// How long a process waits for an attached reader that takes nothing. A client may hold a stream it never
/// reads (a background command), and that must not stop the process for good.
pub const STALL_MAX: Duration = Duration::from_secs(10);

/// Keepalive interval when the client names none.
pub const KEEPALIVE_DEFAULT: Duration = Duration::from_secs(90);

/// Output gathered into one HTTP chunk before the connection gets it.
const BATCH_BYTES: usize = 64 << 10;

/// Cursors of the attached clients.
#[derive(Debug, Default)]
pub struct Readers {
    slots: Vec<Slot>,
    next_id: u64,
}

#[derive(Debug)]
struct Slot {
    id: u64,
    cursor: u64,
    waker: Option<Waker>,
    waited_since: Option<Instant>,
}

impl Readers {
    fn attach(&mut self, cursor: u64) -> u64 {
        self.next_id += 1;
        self.slots.push(Slot {
            id: self.next_id,
            cursor,
            waker: None,
            waited_since: None,
        });
        self.next_id
    }

    fn detach(&mut self, id: u64) {
        self.slots.retain(|slot| slot.id != id);
    }

    fn slot(&mut self, id: u64) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.id == id)
    }

    /// Wakes all readers: there is output, or the end.
    pub fn wake(&mut self) {
        for waker in self.slots.iter_mut().filter_map(|slot| slot.waker.take()) {
            waker.wake();
        }
    }

    /// When to look again, if a reader still needs bytes before `safe`; `None` if nobody has to be waited for.
    pub fn blocked_until(&mut self, safe: u64, now: Instant) -> Option<Instant> {
        let behind = self.slots.iter_mut().filter(|slot| slot.cursor < safe);
        behind
            .map(|slot| *slot.waited_since.get_or_insert(now) + STALL_MAX)
            .filter(|until| *until > now)
            .min()
    }
}

enum Phase {
    Begin,
    Live,
    Done,
}

/// What the call asked of its stream.
#[derive(Debug, Default)]
pub struct Options {
    pub keepalive: Option<Duration>,
    /// Ends this stream alone, without touching the process (`Connect`; `Start` gives its deadline to the pump).
    pub deadline: Option<Duration>,
    /// This is the stream of the starting call, which sees a timeout as an error instead of an end event.
    pub starter: bool,
}

/// The body. Dropping it detaches the client and nothing else.
pub struct ProcessStream {
    process: Shared,
    id: u64,
    cursor: u64,
    phase: Phase,
    starter: bool,
    keepalive: Duration,
    keepalive_timer: Option<Pin<Box<Sleep>>>,
    deadline_timer: Option<Pin<Box<Sleep>>>,
}

impl std::fmt::Debug for ProcessStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ProcessStream(pid {}, cursor {})", self.process.pid, self.cursor)
    }
}

impl ProcessStream {
    /// Attaches to a process, from the oldest output that is still held.
    pub fn new(process: Shared, options: &Options) -> Self {
        let cursor = process.ring.borrow().oldest();
        let id = process.readers.borrow_mut().attach(cursor);
        ProcessStream {
            id,
            cursor,
            phase: Phase::Begin,
            starter: options.starter,
            keepalive: options.keepalive.unwrap_or(KEEPALIVE_DEFAULT),
            keepalive_timer: None,
            deadline_timer: options.deadline.map(|after| Box::pin(tokio::time::sleep(after))),
            process,
        }
    }

    /// Moves what is available into `out`.
    fn collect(&mut self, out: &mut BytesMut) {
        if matches!(self.phase, Phase::Begin) {
            let event = format!("{{\"event\":{{\"start\":{{\"pid\":{}}}}}}}", self.process.pid);
            connect::put_message(out, event.as_bytes());
            self.phase = Phase::Live;
        }
        while matches!(self.phase, Phase::Live) && out.len() < BATCH_BYTES {
            match self.process.read(self.cursor) {
                Read::Piece { kind, data, next } => {
                    put_data(out, kind, &data);
                    self.advance(next);
                }
                Read::Empty => match self.process.end.borrow().as_ref() {
                    Some(end) => {
                        put_end(out, end, self.starter);
                        self.phase = Phase::Done;
                    }
                    None => break,
                },
                Read::Dropped { oldest } => {
                    let lost = oldest - self.cursor;
                    let text = format!("this stream was read too slowly: {lost} bytes of output were dropped");
                    RpcError::new(Code::Aborted, text).put_end(out);
                    self.phase = Phase::Done;
                }
            }
        }
    }

    fn advance(&mut self, next: u64) {
        self.cursor = next;
        if let Some(slot) = self.process.readers.borrow_mut().slot(self.id) {
            slot.cursor = next;
            slot.waited_since = None;
        }
        self.process.room.notify_one();
    }

    /// Puts what the timers owe into `out`, or arranges to be woken.
    fn poll_timers(&mut self, cx: &mut Context<'_>, out: &mut BytesMut) {
        if let Some(timer) = &mut self.deadline_timer
            && timer.as_mut().poll(cx).is_ready()
        {
            RpcError::new(Code::DeadlineExceeded, "the deadline of this stream has passed").put_end(out);
            self.phase = Phase::Done;
            return;
        }
        let interval = self.keepalive;
        let timer = self
            .keepalive_timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(interval)));
        while timer.as_mut().poll(cx).is_ready() {
            if out.is_empty() {
                connect::put_message(out, b"{\"event\":{\"keepalive\":{}}}");
            }
            timer.as_mut().reset(Instant::now() + interval);
        }
    }
}

impl Drop for ProcessStream {
    fn drop(&mut self) {
        self.process.readers.borrow_mut().detach(self.id);
        self.process.room.notify_one();
    }
}

impl Body for ProcessStream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if matches!(self.phase, Phase::Done) {
            return Poll::Ready(None);
        }
        let mut out = BytesMut::new();
        self.collect(&mut out);
        if out.is_empty() {
            self.poll_timers(cx, &mut out);
        }
        if !out.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(out.freeze()))));
        }
        let id = self.id;
        if let Some(slot) = self.process.readers.borrow_mut().slot(id) {
            slot.waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }
}

fn put_data(out: &mut BytesMut, kind: Kind, data: &[u8]) {
    let name = match kind {
        Kind::Stdout => "stdout",
        Kind::Stderr => "stderr",
        Kind::Pty => "pty",
    };
    let mut json = Vec::with_capacity(data.len() * 4 / 3 + 48);
    json.extend_from_slice(b"{\"event\":{\"data\":{\"");
    json.extend_from_slice(name.as_bytes());
    json.extend_from_slice(b"\":\"");
    put_base64(&mut json, data);
    json.extend_from_slice(b"\"}}}");
    connect::put_message(out, &json);
}

fn put_end(out: &mut BytesMut, end: &super::End, starter: bool) {
    if end.timed_out && starter {
        RpcError::new(
            Code::DeadlineExceeded,
            "the command ran into its timeout and was killed",
        )
        .put_end(out);
        return;
    }
    let mut event = serde_json::json!({
        "exitCode": end.exit_code, "exited": end.exited, "status": end.status,
    });
    if let (Some(error), Some(fields)) = (&end.error, event.as_object_mut()) {
        fields.insert("error".into(), error.as_str().into());
    }
    connect::put_message(out, serde_json::json!({"event": {"end": event}}).to_string().as_bytes());
    connect::put_end_ok(out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_is_waited_for_while_it_would_lose_output_and_no_longer_than_the_limit() {
        let mut readers = Readers::default();
        let now = Instant::now();
        assert_eq!(readers.blocked_until(100, now), None);
        let slow = readers.attach(0);
        readers.attach(100);
        assert_eq!(readers.blocked_until(0, now), None);
        assert_eq!(readers.blocked_until(100, now), Some(now + STALL_MAX));
        let later = now + STALL_MAX / 2;
        assert_eq!(readers.blocked_until(100, later), Some(now + STALL_MAX));
        assert_eq!(readers.blocked_until(100, now + STALL_MAX), None);
        readers.detach(slow);
        assert_eq!(readers.blocked_until(100, now), None);
    }

    #[test]
    fn progress_starts_the_wait_anew() {
        let mut readers = Readers::default();
        let now = Instant::now();
        let id = readers.attach(0);
        readers.blocked_until(100, now);
        // What `advance` does after a piece.
        let slot = readers.slot(id).unwrap();
        (slot.cursor, slot.waited_since) = (50, None);
        let later = now + STALL_MAX;
        assert_eq!(readers.blocked_until(100, later), Some(later + STALL_MAX));
    }

    #[test]
    fn a_stream_whose_output_was_overwritten_ends_with_an_error_that_says_how_much() {
        let process = super::super::tests::process();
        let mut stream = ProcessStream::new(process.clone(), &Options::default());
        process.push(Kind::Stdout, &vec![0; 3 << 20]);
        let mut out = BytesMut::new();
        stream.collect(&mut out);
        let text = String::from_utf8_lossy(&out).into_owned();
        assert!(
            text.contains("\"code\":\"aborted\"") && text.contains("bytes of output were dropped"),
            "{text}"
        );
        assert!(matches!(stream.phase, Phase::Done));
    }
}
