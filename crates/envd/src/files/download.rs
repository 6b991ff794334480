//! GET /files: the content of one file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::request::Parts;
use http::{HeaderValue, Response, StatusCode, header};
use hyper::body::{Frame, SizeHint};
use tokio::task::JoinHandle;

use crate::daemon::Daemon;
use crate::files::negotiate::{accepts, disposition, header_text, http_date, parse_range};
use crate::files::path::resolve;
use crate::files::query::FileQuery;
use crate::http::answer::Answer;
use crate::http::body::Reply;
use crate::settings::Defaults;
use crate::users::Users;

/// Bytes read from the file at a time.
const CHUNK_BYTES: usize = 256 << 10;

#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    #[error("error looking up user '{name}': unknown user {name}")]
    UserUnknown { name: String },
    #[error("path '{path}' does not exist")]
    Missing { path: String },
    #[error("path '{path}' is a directory")]
    Directory { path: String },
    #[error("path '{path}' is not a regular file")]
    Special { path: String },
    #[error("no acceptable encoding found, supported: [identity, gzip]")]
    Encoding,
    #[error("range is not satisfiable, the file has {size} bytes")]
    Range { size: u64 },
    #[error("cannot read '{path}': {source}")]
    Read { path: String, source: io::Error },
}

impl DownloadError {
    fn status(&self) -> StatusCode {
        match self {
            DownloadError::UserUnknown { .. } => StatusCode::UNAUTHORIZED,
            DownloadError::Missing { .. } => StatusCode::NOT_FOUND,
            DownloadError::Directory { .. } | DownloadError::Special { .. } => StatusCode::BAD_REQUEST,
            DownloadError::Encoding => StatusCode::NOT_ACCEPTABLE,
            DownloadError::Range { .. } => StatusCode::RANGE_NOT_SATISFIABLE,
            DownloadError::Read { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

pub async fn handle(daemon: &Daemon, parts: &Parts) -> Answer {
    let query = FileQuery::parse(parts);
    if let Err(error) = query.check(daemon, &parts.headers, "read") {
        return Answer::error(StatusCode::UNAUTHORIZED, &error.to_string());
    }
    download(daemon, parts, query).await.unwrap_or_else(|error| {
        let mut answer = Answer::error(error.status(), &error.to_string());
        if let DownloadError::Range { size } = error
            && let Ok(value) = HeaderValue::from_str(&format!("bytes */{size}"))
        {
            answer.0.headers_mut().insert(header::CONTENT_RANGE, value);
        }
        answer
    })
}

/// A file that is open and has been read once.
struct Opened {
    file: File,
    path: PathBuf,
    /// What `stat` says; 0 for files whose content is made on reading.
    size: u64,
    modified: std::time::SystemTime,
    /// The first chunk of a file of size 0, to tell an empty file from one in /proc.
    head: Bytes,
}

async fn download(daemon: &Daemon, parts: &Parts, query: FileQuery) -> Result<Answer, DownloadError> {
    let gzip = accepts(&parts.headers)?;
    let defaults = daemon.settings.borrow().defaults.clone();
    let opened = tokio::task::spawn_blocking(move || open(&defaults, &query)).await;
    let opened = opened.map_err(|error| DownloadError::Read {
        path: String::new(),
        source: io::Error::other(error),
    })??;
    let range = match header_text(&parts.headers, header::RANGE) {
        // A generated file has no size to take a range of, and a compressed answer no ranges.
        Some(text) if opened.size > 0 && !gzip => parse_range(text, opened.size)?,
        _ => None,
    };
    let mut response = Response::builder()
        .header(header::CONTENT_TYPE, "application/octet-stream")
        .header(header::CONTENT_DISPOSITION, disposition(&opened.path))
        .header(header::LAST_MODIFIED, http_date(opened.modified))
        .header(header::VARY, "Accept-Encoding");
    if gzip {
        response = response.header(header::CONTENT_ENCODING, "gzip");
    } else if opened.size > 0 {
        response = response.header(header::ACCEPT_RANGES, "bytes");
    }
    let size = opened.size;
    let (start, length) = match range {
        Some((first, last)) => {
            response = response
                .status(StatusCode::PARTIAL_CONTENT)
                .header(header::CONTENT_RANGE, format!("bytes {first}-{last}/{size}"));
            (first, Some(last - first + 1))
        }
        None if size > 0 => (0, Some(size)),
        None => (0, None),
    };
    Ok(Answer(
        response.body(body(opened, start, length, gzip)).unwrap_or_default(),
    ))
}

fn body(opened: Opened, start: u64, length: Option<u64>, gzip: bool) -> Reply {
    if length.is_none() && opened.head.is_empty() && !gzip {
        return Reply::default();
    }
    let encoder = gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast()));
    let (offset, pending) = match length {
        Some(_) => (start, Bytes::new()),
        None => (opened.head.len() as u64, opened.head),
    };
    Reply::File(Box::new(FileBody {
        file: Some(opened.file),
        offset,
        left: length,
        pending,
        encoder,
        reading: None,
    }))
}

fn open(defaults: &Defaults, query: &FileQuery) -> Result<Opened, DownloadError> {
    let user = defaults
        .user(&Users::load(), query.username.as_deref())
        .map_err(|name| DownloadError::UserUnknown { name })?;
    let path = resolve(
        query.path.as_deref().unwrap_or_default(),
        &defaults.base(&user),
        &user.home,
    );
    let text = path.display().to_string();
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => DownloadError::Missing { path: text.clone() },
        _ => DownloadError::Read {
            path: text.clone(),
            source,
        },
    };
    // O_NONBLOCK: opening a FIFO must not wait for a writer.
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&path)
        .map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if meta.is_dir() {
        return Err(DownloadError::Directory { path: text });
    }
    if !meta.is_file() {
        return Err(DownloadError::Special { path: text });
    }
    let head = if meta.size() == 0 {
        read_chunk(&file, 0, CHUNK_BYTES).map_err(failed)?
    } else {
        Bytes::new()
    };
    let modified = meta.modified().unwrap_or(std::time::UNIX_EPOCH);
    Ok(Opened {
        file,
        path,
        size: meta.size(),
        modified,
        head,
    })
}

fn read_chunk(file: &File, offset: u64, limit: usize) -> io::Result<Bytes> {
    let mut buffer = vec![0; limit];
    loop {
        match file.read_at(&mut buffer, offset) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer.into());
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

type ReadTask = JoinHandle<(File, io::Result<Bytes>)>;

/// Streams a file, one chunk ahead of nothing: the next read starts when the connection wants more.
#[derive(Debug)]
pub struct FileBody {
    /// Away while a read is running.
    file: Option<File>,
    offset: u64,
    /// Bytes still to send; `None` means to the end of a file without a size.
    left: Option<u64>,
    pending: Bytes,
    encoder: Option<GzEncoder<Vec<u8>>>,
    reading: Option<ReadTask>,
}

impl FileBody {
    fn is_done(&self) -> bool {
        self.file.is_none() && self.reading.is_none() && self.pending.is_empty() && self.encoder.is_none()
    }

    /// Takes a finished read in. An empty one before the announced end means that the file shrank: an error,
    /// which breaks the connection, since the length is already promised.
    fn accept(&mut self, file: File, chunk: io::Result<Bytes>) -> io::Result<()> {
        let chunk = chunk?;
        match &mut self.left {
            Some(left) if chunk.is_empty() && *left > 0 => {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the file became shorter while read",
                ));
            }
            Some(left) => *left -= chunk.len() as u64,
            None => {}
        }
        self.offset += chunk.len() as u64;
        let more = !chunk.is_empty() && self.left != Some(0);
        self.file = more.then_some(file);
        self.pending = chunk;
        Ok(())
    }

    fn start_read(&mut self, file: File) {
        let limit = self.left.map_or(CHUNK_BYTES, |left| {
            usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK_BYTES)
        });
        let offset = self.offset;
        self.reading = Some(tokio::task::spawn_blocking(move || {
            let chunk = read_chunk(&file, offset, limit);
            (file, chunk)
        }));
    }

    /// What can be sent now; empty when a read is needed first.
    fn take_output(&mut self) -> io::Result<Bytes> {
        let pending = std::mem::take(&mut self.pending);
        let Some(encoder) = &mut self.encoder else {
            return Ok(pending);
        };
        io::Write::write_all(encoder, &pending)?;
        let last = self.file.is_none() && self.reading.is_none();
        if !last {
            return Ok(std::mem::take(encoder.get_mut()).into());
        }
        let encoder = self.encoder.take();
        encoder.map_or(Ok(Bytes::new()), |encoder| encoder.finish().map(Bytes::from))
    }
}

impl FileBody {
    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            if let Some(task) = &mut self.reading {
                let Poll::Ready(joined) = Pin::new(task).poll(cx) else {
                    return Poll::Pending;
                };
                self.reading = None;
                let accepted = joined
                    .map_err(io::Error::other)
                    .and_then(|(file, chunk)| self.accept(file, chunk));
                if let Err(error) = accepted {
                    return Poll::Ready(Some(Err(error)));
                }
            }
            match self.take_output() {
                Ok(bytes) if !bytes.is_empty() => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
            match self.file.take() {
                Some(file) => self.start_read(file),
                None => return Poll::Ready(None),
            }
        }
    }

    pub fn is_end_stream(&self) -> bool {
        self.is_done()
    }

    pub fn size_hint(&self) -> SizeHint {
        match (&self.encoder, self.left) {
            (None, Some(left)) => SizeHint::with_exact(left + self.pending.len() as u64),
            _ => SizeHint::default(),
        }
    }
}
