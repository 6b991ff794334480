//! An S3 store in memory: objects, uploads in parts, ranges, and faults at chosen requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use aenv_store::Digest;
use bytes::Bytes;
use hyper::{Method, Request, Response};

use super::{Reply, Server, status};

pub const BUCKET: &str = "bucket";

/// What goes wrong with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// 500, nothing done.
    Internal,
    /// 503 with the code SlowDown, nothing done.
    SlowDown,
    /// 403, nothing done.
    Denied,
    /// The connection is cut, nothing done.
    Cut,
    /// It is done, and the connection is cut.
    CutAfter,
    /// No answer for ever.
    Silence,
    /// It is done, and the tag that is told is not the right one.
    WrongTag,
    /// Half of the answer's body.
    Truncated,
    /// The whole object where a part was asked for.
    NotPartial,
    /// The part before the one that was asked for.
    WrongRange,
    /// 200 with an error in the body, as S3 may end the completion of an upload.
    ErrorInBody,
}

#[derive(Debug, Clone)]
pub struct Object {
    pub bytes: Bytes,
    pub tag: String,
}

#[derive(Debug, Default)]
pub struct State {
    pub objects: BTreeMap<String, Object>,
    pub uploads: BTreeMap<String, Upload>,
    /// `METHOD key?query` of each request.
    pub log: Vec<String>,
    /// What goes wrong at the n-th request.
    pub faults: BTreeMap<usize, Fault>,
    /// What goes wrong at each request whose log line holds a text.
    pub always: Option<(String, Fault)>,
    uploads_made: usize,
}

#[derive(Debug)]
pub struct Upload {
    pub key: String,
    pub parts: BTreeMap<usize, Object>,
}

pub struct FakeS3 {
    pub server: Server,
    state: Arc<Mutex<State>>,
}

impl FakeS3 {
    pub fn start() -> FakeS3 {
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        let server = Server::start(move |request| shared.lock().unwrap().handle(&request));
        FakeS3 { server, state }
    }

    pub fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn object(&self, key: &str) -> Option<Bytes> {
        self.state().objects.get(key).map(|object| object.bytes.clone())
    }

    pub fn set_object(&self, key: &str, bytes: &[u8]) {
        let object = Object::new(Bytes::copy_from_slice(bytes));
        self.state().objects.insert(key.into(), object);
    }

    /// Requests whose log line begins with `prefix` and holds `part`.
    pub fn count(&self, prefix: &str, part: &str) -> usize {
        let state = self.state();
        let lines = state.log.iter();
        lines
            .filter(|line| line.starts_with(prefix) && line.contains(part))
            .count()
    }

    /// The configuration file of a node that has this store under the name `repository`.
    pub fn config(&self, encryption_key: Option<&str>) -> String {
        let key = encryption_key.map_or("null".into(), |key| format!("\"{key}\""));
        format!(
            r#"{{"stores":{{"repository":{{"kind":"s3","bucket":"{BUCKET}","region":"eu-test-1","endpoint":"{}",
            "addressing":"path","prefix":"p","access_key_id":"id","secret_access_key":"secret","session_token":null,
            "allow_http":true}}}},"registries":{{}},"encryption_key":{key}}}"#,
            self.server.url()
        )
    }
}

impl Object {
    fn new(bytes: Bytes) -> Object {
        let tag = format!("\"{}\"", &Digest::of(&bytes).to_string()[..32]);
        Object { bytes, tag }
    }
}

impl State {
    fn handle(&mut self, request: &Request<Bytes>) -> Reply {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let path = request.uri().path().strip_prefix(&format!("/{BUCKET}/p/"));
        let Some(key) = path.map(str::to_owned) else {
            return Reply::Answer(status(400));
        };
        let mark = if query.is_empty() { "" } else { "?" };
        self.log.push(format!("{} {key}{mark}{query}", request.method()));
        match self.fault() {
            Some(Fault::Internal) => Reply::Answer(error(500, "InternalError")),
            Some(Fault::SlowDown) => Reply::Answer(error(503, "SlowDown")),
            Some(Fault::Denied) => Reply::Answer(error(403, "AccessDenied")),
            Some(Fault::Cut) => Reply::Cut,
            Some(Fault::Silence) => Reply::Silence,
            fault => self.act(request, &key, &query, fault),
        }
    }

    fn fault(&self) -> Option<Fault> {
        let line = self.log.last().map_or("", |line| line);
        let always = self.always.as_ref().filter(|(text, _)| line.contains(text));
        let once = self.faults.get(&(self.log.len() - 1)).copied();
        once.or(always.map(|(_, fault)| *fault))
    }

    fn act(&mut self, request: &Request<Bytes>, key: &str, query: &str, fault: Option<Fault>) -> Reply {
        let mut answer = self.serve(request, key, query, fault);
        match fault {
            Some(Fault::CutAfter) => Reply::Cut,
            Some(Fault::Truncated) => Reply::Truncated(answer),
            Some(Fault::ErrorInBody) if answer.status().is_success() => Reply::Answer(error(200, "InternalError")),
            Some(Fault::WrongTag) => {
                let wrong = "\"00000000000000000000000000000000\"";
                if answer.headers().contains_key("etag") {
                    answer.headers_mut().insert("etag", wrong.parse().unwrap());
                }
                Reply::Answer(answer)
            }
            _ => Reply::Answer(answer),
        }
    }

    fn serve(&mut self, request: &Request<Bytes>, key: &str, query: &str, fault: Option<Fault>) -> Response<Bytes> {
        let body = request.body().clone();
        let signed = request
            .headers()
            .get("x-amz-content-sha256")
            .and_then(|v| v.to_str().ok());
        if signed.is_none_or(|sum| sum != "UNSIGNED-PAYLOAD" && sum != Digest::of(&body).to_string()) {
            return error(400, "XAmzContentSHA256Mismatch");
        }
        let parameter = |name: &str| {
            let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs
                .filter(|(found, _)| *found == name)
                .map(|(_, value)| value.to_owned())
                .next()
        };
        match (request.method(), parameter("uploadId"), parameter("partNumber")) {
            (&Method::PUT, Some(id), Some(number)) => self.put_part(&id, number.parse().unwrap(), body),
            (&Method::POST, Some(id), _) => self.complete(&id, key, &body),
            (&Method::DELETE, Some(id), _) => match self.uploads.remove(&id) {
                Some(_) => status(204),
                None => error(404, "NoSuchUpload"),
            },
            (&Method::POST, None, _) if query.starts_with("uploads") => self.create(key),
            (&Method::PUT, None, _) => {
                let object = Object::new(body);
                let answer = tagged(&object);
                self.objects.insert(key.into(), object);
                answer
            }
            (&Method::GET | &Method::HEAD, ..) => self.get(request, key, fault),
            _ => error(405, "MethodNotAllowed"),
        }
    }

    fn create(&mut self, key: &str) -> Response<Bytes> {
        self.uploads_made += 1;
        let id = format!("upload{}", self.uploads_made);
        let upload = Upload {
            key: key.into(),
            parts: BTreeMap::new(),
        };
        self.uploads.insert(id.clone(), upload);
        let body = format!("<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>");
        Response::new(body.into())
    }

    fn put_part(&mut self, id: &str, number: usize, body: Bytes) -> Response<Bytes> {
        let Some(upload) = self.uploads.get_mut(id) else {
            return error(404, "NoSuchUpload");
        };
        let part = Object::new(body);
        let answer = tagged(&part);
        upload.parts.insert(number, part);
        answer
    }

    fn complete(&mut self, id: &str, key: &str, body: &Bytes) -> Response<Bytes> {
        let Some(upload) = self.uploads.get(id) else {
            return error(404, "NoSuchUpload");
        };
        let text = std::str::from_utf8(body).unwrap();
        let named: Vec<&str> = text
            .split("<ETag>")
            .skip(1)
            .map(|rest| rest.split("</ETag>").next().unwrap())
            .collect();
        let known = |tag: &str, part: Option<&Object>| part.is_some_and(|part| part.tag == tag.replace("&quot;", "\""));
        if !named
            .iter()
            .enumerate()
            .all(|(at, tag)| known(tag, upload.parts.get(&(at + 1))))
        {
            return error(400, "InvalidPart");
        }
        let parts = (1..=named.len()).flat_map(|number| upload.parts[&number].bytes.to_vec());
        let mut object = Object::new(parts.collect());
        object.tag = format!("\"{}-{}\"", &object.tag[1..33], named.len());
        let body = format!(
            "<CompleteMultipartUploadResult><ETag>{}</ETag></CompleteMultipartUploadResult>",
            object.tag.replace('"', "&quot;")
        );
        self.objects.insert(key.into(), object);
        self.uploads.remove(id);
        Response::new(body.into())
    }

    fn get(&self, request: &Request<Bytes>, key: &str, fault: Option<Fault>) -> Response<Bytes> {
        let Some(object) = self.objects.get(key) else {
            return error(404, "NoSuchKey");
        };
        let range = request
            .headers()
            .get("range")
            .and_then(|value| value.to_str().ok())
            .and_then(parse_range);
        let mut answer = tagged(object);
        answer
            .headers_mut()
            .insert("last-modified", "Sun, 29 Nov 2026 18:00:00 GMT".parse().unwrap());
        let size = object.bytes.len();
        match range {
            Some((first, last)) if fault != Some(Fault::NotPartial) => {
                let shift = if fault == Some(Fault::WrongRange) { 1 } else { 0 };
                let (first, end) = (first - shift, (last + 1 - shift).min(size));
                let header = format!("bytes {first}-{}/{size}", end - 1);
                answer.headers_mut().insert("content-range", header.parse().unwrap());
                *answer.status_mut() = hyper::StatusCode::PARTIAL_CONTENT;
                *answer.body_mut() = object.bytes.slice(first..end);
            }
            _ if *request.method() == Method::HEAD => {
                answer.headers_mut().insert("content-length", size.into());
            }
            _ => *answer.body_mut() = object.bytes.clone(),
        }
        answer
    }
}

fn parse_range(text: &str) -> Option<(usize, usize)> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    Some((first.parse().ok()?, last.parse().ok()?))
}

fn tagged(object: &Object) -> Response<Bytes> {
    let mut answer = status(200);
    answer.headers_mut().insert("etag", object.tag.parse().unwrap());
    answer
}

fn error(status: u16, code: &str) -> Response<Bytes> {
    let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>m</Message></Error>");
    Response::builder().status(status).body(body.into()).unwrap()
}
