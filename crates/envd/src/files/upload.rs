//! POST /files: new content for files, as one raw body or as the parts of a form.
//!
//! A file is written in place, so that it keeps its inode, owner and mode if it exists (watchers, links and
//! open descriptors stay right). A file that this request created is removed again when its body breaks off;
//! an existing one is then left as far as it was written.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http::{StatusCode, header};
use hyper::body::Incoming;
use rustix::fs::{Gid, Uid};
use serde::Serialize;

use super::filename::filename;
use super::metadata::{self, Metadata, MetadataError};
use super::path::{make_dirs, resolve};
use super::query::FileQuery;
use crate::daemon::Daemon;
use crate::http::answer::{Answer, json};
use crate::http::body::{BodyError, Reader};
use crate::settings::Defaults;
use crate::users::{User, Users};

/// Body bytes gathered before a write, so that small chunks do not cost a thread hop each.
const BATCH_BYTES: usize = 256 << 10;

/// Files of one form.
const PARTS_MAX: usize = 10_000;

/// Mode of new files: 0666 less the usual umask.
const NEW_FILE_MODE: u32 = 0o644;

#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error("error looking up user '{name}': unknown user {name}")]
    UserUnknown { name: String },
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    #[error("the path query parameter is required for this content type")]
    PathMissing,
    #[error("content type '{kind}' is not supported, use multipart/form-data or application/octet-stream")]
    ContentType { kind: String },
    #[error("content encoding '{encoding}' is not supported, use gzip or identity")]
    ContentEncoding { encoding: String },
    #[error("path '{path}' is a directory")]
    Directory { path: String },
    #[error("not enough disk space available for '{path}'")]
    NoSpace { path: String },
    #[error("a path override is possible for one file only")]
    ManyFilesOnePath,
    #[error("the form holds more than {PARTS_MAX} files")]
    TooManyParts,
    #[error("a part named 'file' has no filename")]
    FilenameMissing,
    #[error("cannot read the form: {0}")]
    Form(#[source] multer::Error),
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error("cannot write '{path}': {source}")]
    Write { path: String, source: io::Error },
    #[error("'{path}' has {found} bytes after {written} were written")]
    SizeDiffers { path: String, written: u64, found: u64 },
}

impl UploadError {
    fn status(&self) -> StatusCode {
        match self {
            UploadError::UserUnknown { .. } => StatusCode::UNAUTHORIZED,
            UploadError::NoSpace { .. } => StatusCode::INSUFFICIENT_STORAGE,
            UploadError::Body(BodyError::Idle) => StatusCode::REQUEST_TIMEOUT,
            UploadError::Write { .. } | UploadError::SizeDiffers { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    fn io(path: &Path, source: io::Error) -> Self {
        let path = path.display().to_string();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => UploadError::NoSpace { path },
            io::ErrorKind::IsADirectory => UploadError::Directory { path },
            _ => UploadError::Write { path, source },
        }
    }
}

/// What the clients learn about a written file.
#[derive(Debug, Serialize)]
struct Written {
    name: String,
    path: String,
    r#type: &'static str,
    #[serde(skip_serializing_if = "Metadata::is_empty")]
    metadata: Metadata,
}

/// What all files of one request share.
struct Context {
    user: User,
    base: PathBuf,
    metadata: Metadata,
}

pub async fn handle(daemon: &Daemon, parts: &Parts, body: Incoming) -> Answer {
    let query = FileQuery::parse(parts);
    if let Err(error) = query.check(daemon, &parts.headers, "write") {
        return Answer::error(StatusCode::UNAUTHORIZED, &error.to_string());
    }
    match upload(daemon, parts, &query, body).await {
        Ok(written) => json(StatusCode::OK, serde_json::to_vec(&written).unwrap_or_default()),
        Err(error) => Answer::error(error.status(), &error.to_string()),
    }
}

async fn upload(
    daemon: &Daemon,
    parts: &Parts,
    query: &FileQuery,
    body: Incoming,
) -> Result<Vec<Written>, UploadError> {
    let text = |name| {
        parts
            .headers
            .get(name)
            .and_then(|value: &http::HeaderValue| value.to_str().ok())
    };
    let kind = text(header::CONTENT_TYPE).unwrap_or_default();
    let metadata = metadata::from_headers(&parts.headers)?;
    let defaults = daemon.settings.borrow().defaults.clone();
    let name = query.username.clone();
    let context = blocking(Path::new("/etc/passwd"), move || {
        context(&defaults, name.as_deref(), metadata)
    })
    .await?;
    let (reader, length) = match text(header::CONTENT_ENCODING).unwrap_or("identity") {
        "identity" | "" => (
            Reader::new(body),
            text(header::CONTENT_LENGTH).and_then(|length| length.parse().ok()),
        ),
        "gzip" => (Reader::gzip(body), None),
        other => {
            return Err(UploadError::ContentEncoding { encoding: other.into() });
        }
    };
    match kind.split(';').next().unwrap_or_default().trim() {
        "application/octet-stream" => {
            let path = query
                .path
                .as_deref()
                .filter(|path| !path.is_empty())
                .ok_or(UploadError::PathMissing)?;
            let mut reader = reader;
            Ok(vec![write_file(&context, path, length, &mut reader).await?])
        }
        "multipart/form-data" => form(&context, query.path.as_deref(), kind, reader).await,
        other => Err(UploadError::ContentType { kind: other.into() }),
    }
}

fn context(defaults: &Defaults, name: Option<&str>, metadata: Metadata) -> Result<Context, UploadError> {
    let user = defaults
        .user(&Users::load(), name)
        .map_err(|name| UploadError::UserUnknown { name })?;
    Ok(Context {
        base: defaults.base(&user),
        user,
        metadata,
    })
}

/// Writes the files of a form, one after the other as they arrive. On an error the ones before stay written;
/// the message names the one that failed.
async fn form(context: &Context, path: Option<&str>, kind: &str, reader: Reader) -> Result<Vec<Written>, UploadError> {
    let boundary = multer::parse_boundary(kind).map_err(UploadError::Form)?;
    let mut form = multer::Multipart::new(reader, boundary);
    let mut written: Vec<Written> = Vec::new();
    while let Some(mut field) = form.next_field().await.map_err(UploadError::Form)? {
        if field.name() != Some("file") {
            continue;
        }
        if written.len() >= PARTS_MAX {
            return Err(UploadError::TooManyParts);
        }
        let target = match path {
            Some(_) if !written.is_empty() => return Err(UploadError::ManyFilesOnePath),
            Some(path) => path.to_owned(),
            None => filename(field.headers()).ok_or(UploadError::FilenameMissing)?,
        };
        written.push(write_file(context, &target, None, &mut field).await?);
    }
    Ok(written)
}

/// Where the content of one file comes from.
trait Content {
    async fn next_bytes(&mut self) -> Result<Option<Bytes>, UploadError>;
}

impl Content for Reader {
    async fn next_bytes(&mut self) -> Result<Option<Bytes>, UploadError> {
        Ok(self.next().await?)
    }
}

impl Content for multer::Field<'_> {
    async fn next_bytes(&mut self) -> Result<Option<Bytes>, UploadError> {
        self.chunk().await.map_err(UploadError::Form)
    }
}

/// A file being written.
struct Target {
    file: File,
    path: PathBuf,
    created: bool,
    complete: bool,
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.created && !self.complete {
            // Half a new file would look like a whole one.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

async fn write_file(
    context: &Context,
    path: &str,
    length: Option<u64>,
    content: &mut impl Content,
) -> Result<Written, UploadError> {
    let path = resolve(path, &context.base, &context.user.home);
    let (user, at) = (context.user.clone(), path.clone());
    let mut target = blocking(&path, move || open(&at, &user, length)).await?;
    let mut batch = BytesMut::new();
    let mut total = 0u64;
    loop {
        let piece = content.next_bytes().await?;
        let last = piece.is_none();
        if let Some(piece) = piece {
            total += piece.len() as u64;
            batch.extend_from_slice(&piece);
        }
        if batch.len() >= BATCH_BYTES || (last && !batch.is_empty()) {
            let bytes = std::mem::take(&mut batch);
            target = blocking(&path, move || {
                target
                    .file
                    .write_all(&bytes)
                    .map_err(|error| UploadError::io(&target.path, error))?;
                Ok(target)
            })
            .await?;
        }
        if last {
            break;
        }
    }
    let metadata = context.metadata.clone();
    blocking(&path, move || finish(target, total, &metadata)).await?;
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let metadata = context.metadata.clone();
    Ok(Written {
        name,
        path: path.to_string_lossy().into_owned(),
        r#type: "file",
        metadata,
    })
}

/// Opens the file for writing, with its folders; an existing one is emptied.
fn open(path: &Path, user: &User, length: Option<u64>) -> Result<Target, UploadError> {
    let failed = |error| UploadError::io(path, error);
    if std::fs::metadata(path).is_ok_and(|meta| meta.is_dir()) {
        return Err(UploadError::Directory {
            path: path.display().to_string(),
        });
    }
    if let Some(parent) = path.parent() {
        make_dirs(parent, user).map_err(failed)?;
        check_space(path, parent, length)?;
    }
    let mut options = File::options();
    // O_NONBLOCK: writing to a FIFO without a reader must not wait.
    options.write(true).mode(NEW_FILE_MODE).custom_flags(libc::O_NONBLOCK);
    let (file, created) = match options.create_new(true).open(path) {
        Ok(file) => (file, true),
        // A link with a missing target also counts as existing, and its target is then created.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (
            options
                .create_new(false)
                .create(true)
                .truncate(true)
                .open(path)
                .map_err(failed)?,
            false,
        ),
        Err(error) => return Err(failed(error)),
    };
    let target = Target {
        file,
        path: path.to_path_buf(),
        created,
        complete: false,
    };
    if created && rustix::process::geteuid().is_root() {
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        rustix::fs::fchown(&target.file, Some(uid), Some(gid)).map_err(|error| failed(error.into()))?;
    }
    Ok(target)
}

/// Refuses a body that cannot fit before the old content is gone.
fn check_space(path: &Path, parent: &Path, length: Option<u64>) -> Result<(), UploadError> {
    let (Some(length), Ok(fs)) = (length, rustix::fs::statvfs(parent)) else {
        return Ok(());
    };
    let old = std::fs::metadata(path).map_or(0, |meta| meta.blocks() * 512);
    if length > fs.f_bavail.saturating_mul(fs.f_frsize).saturating_add(old) {
        return Err(UploadError::NoSpace {
            path: path.display().to_string(),
        });
    }
    Ok(())
}

/// Checks that all bytes are there and replaces the metadata.
fn finish(mut target: Target, written: u64, metadata: &Metadata) -> Result<(), UploadError> {
    let meta = target
        .file
        .metadata()
        .map_err(|error| UploadError::io(&target.path, error))?;
    if meta.is_file() && meta.len() != written {
        let path = target.path.display().to_string();
        return Err(UploadError::SizeDiffers {
            path,
            written,
            found: meta.len(),
        });
    }
    if meta.is_file() {
        metadata::replace(&target.file, metadata).map_err(|error| UploadError::io(&target.path, error))?;
    }
    target.complete = true;
    Ok(())
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> Result<T, UploadError> + Send + 'static,
) -> Result<T, UploadError> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|error| Err(UploadError::io(path, io::Error::other(error))))
}
