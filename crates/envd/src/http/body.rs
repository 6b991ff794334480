//! Bodies in both directions: reading a request with limits, and the three kinds of reply.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use flate2::write::MultiGzDecoder;
use futures_core::Stream;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use crate::connect::{Code, RpcError};
use crate::files::download::FileBody;
use crate::process::stream::ProcessStream;

/// A request body that sends nothing for this long is given up.
const IDLE_MAX: Duration = Duration::from_secs(120);

/// What a request sends after its answer is decided is read and thrown away up to this size. Most clients
/// look at the answer only when they have sent everything, and would see a reset instead of the reason.
const UNWANTED_BYTES_MAX: usize = 2 << 30;
const UNWANTED_IDLE_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    #[error("the request body ended early")]
    Broken(#[source] hyper::Error),
    #[error("the request body stood still for {} s", IDLE_MAX.as_secs())]
    Idle,
    #[error("the request body is over the limit of {limit} bytes")]
    TooLong { limit: usize },
    #[error("the request body is not valid gzip")]
    Gzip(#[source] io::Error),
}

impl From<BodyError> for RpcError {
    fn from(error: BodyError) -> Self {
        let code = match error {
            BodyError::TooLong { .. } => Code::ResourceExhausted,
            BodyError::Idle => Code::DeadlineExceeded,
            BodyError::Broken(_) | BodyError::Gzip(_) => Code::InvalidArgument,
        };
        RpcError::new(code, error.to_string())
    }
}

/// Reads a request body piece by piece, decoding gzip where asked.
pub struct Reader {
    /// Taken only when the reader is dropped.
    body: Option<Incoming>,
    gzip: Option<MultiGzDecoder<Vec<u8>>>,
    idle: Option<Duration>,
    finished: bool,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reader(gzip: {}, finished: {})", self.gzip.is_some(), self.finished)
    }
}

impl Reader {
    pub fn new(body: Incoming) -> Self {
        Reader {
            body: Some(body),
            gzip: None,
            idle: Some(IDLE_MAX),
            finished: false,
        }
    }

    pub fn gzip(body: Incoming) -> Self {
        let mut reader = Reader::new(body);
        reader.gzip = Some(MultiGzDecoder::new(Vec::new()));
        reader
    }

    /// For an input stream, which may rest as long as its user does.
    pub fn without_idle_limit(body: Incoming) -> Self {
        let mut reader = Reader::new(body);
        reader.idle = None;
        reader
    }

    /// The next bytes, `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, BodyError> {
        let idle = self.idle;
        let piece = std::future::poll_fn(|cx| self.poll_piece(cx));
        let piece = match idle {
            Some(idle) => tokio::time::timeout(idle, piece).await.map_err(|_| BodyError::Idle)?,
            None => piece.await,
        };
        piece.transpose()
    }

    /// Everything, up to a limit in bytes.
    pub async fn collect(mut self, limit: usize) -> Result<Bytes, BodyError> {
        let mut all = BytesMut::new();
        while let Some(piece) = self.next().await? {
            if all.len() + piece.len() > limit {
                return Err(BodyError::TooLong { limit });
            }
            if all.is_empty() && self.gzip.is_none() && self.is_complete() {
                return Ok(piece);
            }
            all.extend_from_slice(&piece);
        }
        Ok(all.freeze())
    }

    fn is_complete(&self) -> bool {
        self.finished || self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BodyError>>> {
        loop {
            if self.finished {
                return Poll::Ready(None);
            }
            let Some(body) = &mut self.body else {
                return Poll::Ready(None);
            };
            let frame = match Pin::new(body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(frame) => frame,
            };
            let raw = match frame {
                None => {
                    self.finished = true;
                    return Poll::Ready(self.gzip_rest().transpose());
                }
                Some(Err(error)) => {
                    self.finished = true;
                    return Poll::Ready(Some(Err(BodyError::Broken(error))));
                }
                // Trailers carry nothing for us.
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
            };
            match self.decode(raw) {
                Ok(bytes) if bytes.is_empty() => {}
                Ok(bytes) => return Poll::Ready(Some(Ok(bytes))),
                Err(error) => {
                    self.finished = true;
                    return Poll::Ready(Some(Err(BodyError::Gzip(error))));
                }
            }
        }
    }

    fn decode(&mut self, raw: Bytes) -> io::Result<Bytes> {
        let Some(decoder) = &mut self.gzip else {
            return Ok(raw);
        };
        io::Write::write_all(decoder, &raw)?;
        Ok(std::mem::take(decoder.get_mut()).into())
    }

    fn gzip_rest(&mut self) -> Result<Option<Bytes>, BodyError> {
        let Some(decoder) = &mut self.gzip else {
            return Ok(None);
        };
        decoder.try_finish().map_err(BodyError::Gzip)?;
        let rest = std::mem::take(decoder.get_mut());
        Ok((!rest.is_empty()).then(|| rest.into()))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.is_complete() {
            return;
        }
        if let (Some(body), Ok(runtime)) = (self.body.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(discard(body));
        }
    }
}

/// Reads the rest of a body, beside the answer that is already on its way.
async fn discard(mut body: Incoming) {
    let mut left = UNWANTED_BYTES_MAX;
    loop {
        let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
        let Ok(Some(Ok(frame))) = tokio::time::timeout(UNWANTED_IDLE_MAX, frame).await else {
            return;
        };
        let length = frame.data_ref().map_or(0, Bytes::len);
        let Some(rest) = left.checked_sub(length) else {
            return;
        };
        left = rest;
    }
}

impl Stream for Reader {
    type Item = Result<Bytes, BodyError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_piece(cx)
    }
}

/// The body of an answer.
#[derive(Debug)]
pub enum Reply {
    Full(Option<Bytes>),
    // Boxed, since most answers are small.
    Process(Box<ProcessStream>),
    File(Box<FileBody>),
}

impl Default for Reply {
    fn default() -> Self {
        Reply::Full(None)
    }
}

impl Reply {
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        Reply::Full(Some(bytes.into()).filter(|bytes| !bytes.is_empty()))
    }

    pub fn process(stream: ProcessStream) -> Self {
        Reply::Process(Box::new(stream))
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match &mut *self {
            Reply::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Reply::Process(stream) => Pin::new(stream.as_mut()).poll_frame(cx),
            Reply::File(file) => Pin::new(file.as_mut()).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Reply::Full(bytes) => bytes.is_none(),
            Reply::Process(stream) => stream.is_end_stream(),
            Reply::File(file) => file.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Reply::Process(_) => SizeHint::default(),
            Reply::File(file) => file.size_hint(),
        }
    }
}
