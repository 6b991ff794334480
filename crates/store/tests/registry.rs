//! Reads of registries' blobs: tokens, redirects, and answers that are not what was asked for.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test, in helpers too")]

mod fake;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use aenv_store::{Digest, Failure, Source, StoreErrorKind, Stores};
use bytes::Bytes;
use fake::{Reply, Server, status};
use hyper::{Request, Response};

const TIMEOUT: Duration = Duration::from_secs(20);

/// What a test looks at: the requests of all servers, as `host path authorization`.
type Log = Arc<Mutex<Vec<String>>>;

fn note(log: &Log, who: &str, request: &Request<Bytes>) -> Option<String> {
    let header = request
        .headers()
        .get("authorization")
        .map(|value| value.to_str().unwrap().to_owned());
    let line = format!("{who} {} {}", request.uri(), header.as_deref().unwrap_or("-"));
    log.lock().unwrap().push(line);
    header
}

fn blob() -> Vec<u8> {
    (0..1000).map(|i| (i / 3) as u8).collect()
}

/// The part that a request asks for.
fn partial(request: &Request<Bytes>) -> Response<Bytes> {
    let text = request.headers()["range"]
        .to_str()
        .unwrap()
        .trim_start_matches("bytes=")
        .to_owned();
    let (first, last) = text.split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    let header = format!("bytes {first}-{last}/1000");
    let builder = Response::builder().status(206).header("content-range", header);
    builder.body(Bytes::copy_from_slice(&blob()[first..=last])).unwrap()
}

fn challenge(text: String) -> Response<Bytes> {
    Response::builder()
        .status(401)
        .header("www-authenticate", text)
        .body(Bytes::new())
        .unwrap()
}

fn open(registry: &str, user: &str) -> (Arc<dyn aenv_store::Ranged>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stores.json");
    let config =
        format!(r#"{{"stores":{{}},"registries":{{"r:5000":{{"url":"{registry}"{user}}}}},"encryption_key":null}}"#);
    std::fs::write(&path, config).unwrap();
    let source = Source::Registry {
        registry: "r:5000".into(),
        repository: "team/app".into(),
        digest: Digest::of(b""),
    };
    (Stores::open(&path).unwrap().ranged(&source).unwrap(), dir)
}

#[test]
fn a_token_is_asked_for_once_and_does_not_follow_a_redirect() {
    let log = Log::default();
    let cdn_log = log.clone();
    let cdn = Server::start(move |request| {
        note(&cdn_log, "cdn", &request);
        Reply::Answer(partial(&request))
    });
    let auth_log = log.clone();
    let auth = Server::start(move |request| {
        note(&auth_log, "auth", &request);
        Reply::Answer(Response::new(r#"{"token":"secret","expires_in":300}"#.into()))
    });
    let (registry_log, realm, target) = (log.clone(), auth.url(), cdn.url());
    let registry = Server::start(
        move |request| match note(&registry_log, "registry", &request).as_deref() {
            Some("Bearer secret") => {
                let builder = Response::builder()
                    .status(307)
                    .header("location", format!("{target}/signed"));
                Reply::Answer(builder.body(Bytes::new()).unwrap())
            }
            _ => Reply::Answer(challenge(format!(r#"Bearer realm="{realm}/token",service="s s""#))),
        },
    );
    let (ranged, _dir) = open(&registry.url(), r#","username":"u","password":"p""#);
    assert_eq!(ranged.read(10, 20, TIMEOUT).unwrap(), blob()[10..30]);
    assert_eq!(ranged.read(500, 500, TIMEOUT).unwrap(), blob()[500..]);
    let path = format!("/v2/team/app/blobs/sha256:{}", Digest::of(b""));
    let expected = [
        format!("registry {path} -"),
        "auth /token?service=s+s&scope=repository%3Ateam%2Fapp%3Apull Basic dTpw".into(),
        format!("registry {path} Bearer secret"),
        "cdn /signed -".into(),
        // The second read goes where the first one ended.
        "cdn /signed -".into(),
    ];
    assert_eq!(*log.lock().unwrap(), expected);
}

#[test]
fn a_password_is_sent_where_the_registry_asks_for_it() {
    let server = Server::start(|request| {
        let header = request
            .headers()
            .get("authorization")
            .map(|value| value.as_bytes().to_vec());
        match header.as_deref() {
            Some(b"Basic dTpw") => Reply::Answer(partial(&request)),
            _ => Reply::Answer(challenge("Basic realm=\"r\"".into())),
        }
    });
    let (ranged, _dir) = open(&server.url(), r#","username":"u","password":"p""#);
    assert_eq!(ranged.read(0, 5, TIMEOUT).unwrap(), blob()[..5]);
    let (ranged, _dir) = open(&server.url(), "");
    assert_eq!(ranged.read(0, 5, TIMEOUT).unwrap_err().kind(), StoreErrorKind::Denied);
}

#[test]
fn a_signed_target_that_expired_is_asked_for_again() {
    let expired = Arc::new(Mutex::new(false));
    let seen = expired.clone();
    let cdn = Server::start(move |request| match std::mem::take(&mut *seen.lock().unwrap()) {
        true => Reply::Answer(status(403)),
        false => Reply::Answer(partial(&request)),
    });
    let target = cdn.url();
    let registry = Server::start(move |_| {
        let builder = Response::builder()
            .status(302)
            .header("location", format!("{target}/x"));
        Reply::Answer(builder.body(Bytes::new()).unwrap())
    });
    let (ranged, _dir) = open(&registry.url(), "");
    ranged.read(0, 5, TIMEOUT).unwrap();
    *expired.lock().unwrap() = true;
    assert_eq!(ranged.read(5, 5, TIMEOUT).unwrap(), blob()[5..10]);
}

#[test]
fn answers_that_are_not_the_part_are_errors() {
    let whole = |_: &Request<Bytes>| Reply::Answer(Response::new(blob().into()));
    let shifted = |request: &Request<Bytes>| {
        let mut answer = partial(request);
        answer
            .headers_mut()
            .insert("content-range", "bytes 11-30/1000".parse().unwrap());
        Reply::Answer(answer)
    };
    let short = |request: &Request<Bytes>| Reply::Answer(partial(request).map(|body| body.slice(..19)));
    let long = |request: &Request<Bytes>| Reply::Answer(partial(request).map(|_| vec![0; 21].into()));
    let packed = |request: &Request<Bytes>| {
        let mut answer = partial(request);
        answer.headers_mut().insert("content-encoding", "gzip".parse().unwrap());
        Reply::Answer(answer)
    };
    let truncated = |request: &Request<Bytes>| Reply::Truncated(partial(request));
    let lost = |_: &Request<Bytes>| Reply::Answer(status(404));
    let in_circles = |_: &Request<Bytes>| {
        Reply::Answer(
            Response::builder()
                .status(302)
                .header("location", "/again")
                .body(Bytes::new())
                .unwrap(),
        )
    };
    type Case = fn(&Request<Bytes>) -> Reply;
    let cases: [(Case, StoreErrorKind); 8] = [
        (whole, StoreErrorKind::Transient),
        (shifted, StoreErrorKind::Transient),
        (short, StoreErrorKind::Transient),
        (long, StoreErrorKind::Transient),
        (packed, StoreErrorKind::Transient),
        (truncated, StoreErrorKind::Transient),
        (lost, StoreErrorKind::NotFound),
        (in_circles, StoreErrorKind::Transient),
    ];
    for (number, (case, kind)) in cases.into_iter().enumerate() {
        let server = Server::start(move |request| case(&request));
        let (ranged, _dir) = open(&server.url(), "");
        let error = ranged.read(10, 20, TIMEOUT).expect_err(&format!("case {number}"));
        assert_eq!(error.kind(), kind, "case {number}: {error}");
    }
}

#[test]
fn a_registry_that_does_not_answer_costs_the_timeout() {
    let server = Server::start(|_| Reply::Silence);
    let (ranged, _dir) = open(&server.url(), "");
    let after = Duration::from_millis(80);
    assert_eq!(
        ranged.read(0, 1, after).unwrap_err().failure(),
        &Failure::Timeout { after }
    );
}
