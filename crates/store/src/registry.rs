//! A blob of an OCI registry, read by ranges: authentication, redirects to where the registry keeps its bytes, and the
//! check that what comes is what was asked for.
//!
//! ```text
//! GET /v2/<repository>/blobs/sha256:<digest>, Range     401 -> token service -> again, once
//!                                                       30x -> another host, without our Authorization
//!                                                       206 -> the bytes
//! ```

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_RANGE, LOCATION, RANGE, WWW_AUTHENTICATE,
};
use http::{Request, Response, StatusCode};
use hyper::body::{Body, Incoming};
use url::Url;

use crate::Digest;
use crate::challenge::{Challenge, Token};
use crate::config::RegistryConfig;
use crate::error::{Failure, Place, StoreError, of_status};
use crate::http::{Http, collect};
use crate::ranged::Ranged;
use crate::stores::Shared;

/// Redirects followed for one read.
const REDIRECTS_MAX: usize = 5;
/// How long a redirect's target is used without asking the registry again. Signed targets live for minutes at least, and
/// one that is refused is asked for anew at once.
const TARGET_LIFE: Duration = Duration::from_secs(60);
/// Longest answer of a token service.
const TOKEN_ANSWER_BYTES_MAX: usize = 64 << 10;

type Failed = (Failure, Option<Box<dyn std::error::Error + Send + Sync>>);

/// One blob of one repository.
#[derive(Debug)]
pub(crate) struct RangedBlob {
    shared: Arc<Shared>,
    registry: String,
    repository: String,
    digest: Digest,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    token: Option<Token>,
    /// Where the registry sent us last, and until when it is used.
    target: Option<(Url, Instant)>,
    /// The registry wants the password itself.
    basic: bool,
}

impl RangedBlob {
    pub fn new(shared: Arc<Shared>, registry: &str, repository: &str, digest: Digest) -> RangedBlob {
        RangedBlob {
            shared,
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            digest,
            state: Mutex::default(),
        }
    }

    fn fail(&self, range: Option<(u64, u64)>, (failure, source): Failed) -> StoreError {
        let place = Place {
            store: self.registry.clone(),
            key: format!("{}@sha256:{}", self.repository, self.digest),
            range,
        };
        let error = StoreError::new(place, failure);
        match source {
            Some(source) => error.caused_by(source),
            None => error,
        }
    }

    fn get(&self, range: Option<(u64, u64)>, limit: u64, timeout: Duration) -> Result<Bytes, StoreError> {
        let config = self.shared.registry(&self.registry);
        let http = self.shared.http()?;
        let attempt = Attempt {
            blob: self,
            config: &config,
            http: &http,
            range,
            limit,
        };
        let limited = async { tokio::time::timeout(timeout, attempt.run()).await };
        match self.shared.runtime().block_on(limited) {
            Ok(outcome) => outcome.map_err(|failed| self.fail(range, failed)),
            Err(_) => Err(self.fail(range, (Failure::Timeout { after: timeout }, None))),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ranged for RangedBlob {
    fn read(&self, offset: u64, length: u64, timeout: Duration) -> Result<Bytes, StoreError> {
        match length {
            0 => Ok(Bytes::new()),
            _ => self.get(Some((offset, length)), length, timeout),
        }
    }

    fn read_whole(&self, limit_bytes: u64, timeout: Duration) -> Result<Bytes, StoreError> {
        self.get(None, limit_bytes, timeout)
    }
}

/// One read: one answer of the bytes' host, with what has to go before it.
struct Attempt<'a> {
    blob: &'a RangedBlob,
    config: &'a RegistryConfig,
    http: &'a Http,
    range: Option<(u64, u64)>,
    limit: u64,
}

impl Attempt<'_> {
    async fn run(&self) -> Result<Bytes, Failed> {
        if let Some(target) = self.target() {
            let response = self.send(&target, None).await?;
            if response.status().is_success() {
                return self.take(response).await;
            }
            // Signed targets expire; the registry knows a fresh one.
            self.blob.state().target = None;
        }
        let start = self.start()?;
        let mut response = self.send(&start, self.authorization()).await?;
        if response.status() == StatusCode::UNAUTHORIZED {
            self.answer(&response).await?;
            response = self.send(&start, self.authorization()).await?;
        }
        let mut at = start.clone();
        for _ in 0..REDIRECTS_MAX {
            let Some(next) = redirect(&at, &response)? else {
                return self.take(response).await;
            };
            let own = next.origin() == start.origin();
            response = self.send(&next, if own { self.authorization() } else { None }).await?;
            if !own && response.status().is_success() {
                self.blob.state().target = Some((next.clone(), Instant::now() + TARGET_LIFE));
            }
            at = next;
        }
        Err((Failure::BadAnswer, None))
    }

    fn target(&self) -> Option<Url> {
        let state = self.blob.state();
        let (url, until) = state.target.as_ref()?;
        (Instant::now() < *until).then(|| url.clone())
    }

    fn start(&self) -> Result<Url, Failed> {
        let (url, repository, digest) = (&self.config.url, &self.blob.repository, self.blob.digest);
        let what = || Failure::Config {
            what: "the url of the registry or the repository's name is wrong".into(),
        };
        // A name with other characters could leave the path that it belongs into.
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-/".contains(&byte);
        if !repository.bytes().all(plain)
            || repository
                .split('/')
                .any(|part| part.is_empty() || part.starts_with('.'))
        {
            return Err((what(), None));
        }
        let text = format!("{}/v2/{repository}/blobs/sha256:{digest}", url.trim_end_matches('/'));
        Url::parse(&text).map_err(|e| (what(), Some(e.into())))
    }

    fn authorization(&self) -> Option<String> {
        let state = self.blob.state();
        if state.basic {
            return self.password();
        }
        let token = state.token.as_ref().filter(|token| Instant::now() < token.until)?;
        Some(format!("Bearer {}", token.bearer))
    }

    /// The header that carries name and password.
    fn password(&self) -> Option<String> {
        let (name, password) = (self.config.username.as_ref()?, self.config.password.as_ref()?);
        let pair = base64::engine::general_purpose::STANDARD.encode(format!("{name}:{password}"));
        Some(format!("Basic {pair}"))
    }

    async fn send(&self, url: &Url, authorization: Option<String>) -> Result<Response<Incoming>, Failed> {
        let mut request = Request::get(url.as_str()).header(ACCEPT_ENCODING, "identity");
        if let Some((offset, length)) = self.range {
            let last = offset.saturating_add(length - 1);
            request = request.header(RANGE, format!("bytes={offset}-{last}"));
        }
        if let Some(value) = authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let request = request.body(()).map_err(|e| (Failure::BadAnswer, Some(e.into())))?;
        let sent = self.http.send(request).await;
        sent.map_err(|e| (Failure::Unreachable, Some(e.into())))
    }

    /// Gets what a 401 asks for.
    async fn answer(&self, response: &Response<Incoming>) -> Result<(), Failed> {
        let denied = || (of_status(401, None), None);
        let headers = response.headers().get_all(WWW_AUTHENTICATE);
        let texts = headers.iter().filter_map(|header| header.to_str().ok());
        match texts.filter_map(Challenge::parse).next().ok_or_else(denied)? {
            Challenge::Basic => {
                self.password().ok_or_else(denied)?;
                self.blob.state().basic = true;
            }
            Challenge::Bearer { realm, service, scope } => {
                let url = self.token_url(&realm, service, scope)?;
                let token = self.token(&url).await?;
                self.blob.state().token = Some(token);
            }
        }
        Ok(())
    }

    fn token_url(&self, realm: &str, service: Option<String>, scope: Option<String>) -> Result<Url, Failed> {
        let mut url = Url::parse(realm).map_err(|e| (Failure::BadAnswer, Some(e.into())))?;
        // A registry that we reach by TLS must not make us send the password in the clear.
        if url.scheme() != "https" && !(url.scheme() == "http" && self.config.url.starts_with("http://")) {
            return Err((Failure::BadAnswer, None));
        }
        let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", self.blob.repository));
        let mut query = url.query_pairs_mut();
        if let Some(service) = service {
            query.append_pair("service", &service);
        }
        query.append_pair("scope", &scope);
        drop(query);
        Ok(url)
    }

    async fn token(&self, url: &Url) -> Result<Token, Failed> {
        let asked = Instant::now();
        let mut request = Request::get(url.as_str());
        if let Some(value) = self.password() {
            request = request.header(AUTHORIZATION, value);
        }
        let request = request.body(()).map_err(|e| (Failure::BadAnswer, Some(e.into())))?;
        let sent = self.http.send(request).await;
        let response = sent.map_err(|e| (Failure::Unreachable, Some(e.into())))?;
        let status = response.status();
        if !status.is_success() {
            return Err((of_status(status.as_u16(), None), None));
        }
        let body = collect(response.into_body(), TOKEN_ANSWER_BYTES_MAX).await;
        let body = body.map_err(|e| (Failure::BadAnswer, Some(e)))?;
        Token::parse(&body, asked).ok_or((Failure::BadAnswer, None))
    }

    /// Takes the bytes of an answer that must be the blob or exactly the part of it that was asked for.
    async fn take(&self, response: Response<Incoming>) -> Result<Bytes, Failed> {
        let status = response.status();
        if !status.is_success() {
            return Err((of_status(status.as_u16(), None), None));
        }
        if response
            .headers()
            .get(CONTENT_ENCODING)
            .is_some_and(|coding| coding != "identity")
        {
            return Err((Failure::BadAnswer, None));
        }
        if let Some((offset, length)) = self.range {
            let range = response
                .headers()
                .get(CONTENT_RANGE)
                .and_then(|value| value.to_str().ok());
            if status != StatusCode::PARTIAL_CONTENT || !is_range(range, offset, length) {
                return Err((Failure::WrongRange, None));
            }
        }
        let announced = response.body().size_hint().lower();
        if announced > self.limit {
            let (found, limit) = (announced, self.limit);
            return Err(match self.range {
                Some(_) => (Failure::WrongRange, None),
                None => (Failure::TooLarge { found, limit }, None),
            });
        }
        let body = collect(response.into_body(), self.limit as usize).await;
        let body = body.map_err(|e| (Failure::BadAnswer, Some(e)))?;
        match self.range {
            Some((_, expected)) if expected != body.len() as u64 => {
                let found = body.len() as u64;
                Err((Failure::Truncated { expected, found }, None))
            }
            _ => Ok(body),
        }
    }
}

/// Whether `Content-Range` names exactly these bytes.
fn is_range(header: Option<&str>, offset: u64, length: u64) -> bool {
    let parse = || {
        let (range, _size) = header?.trim().strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?))
    };
    parse() == Some((offset, offset.saturating_add(length - 1)))
}

/// Where an answer sends us; none if it does not. TLS is never left.
fn redirect(at: &Url, response: &Response<Incoming>) -> Result<Option<Url>, Failed> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    let next = location.and_then(|text| at.join(text).ok());
    let kept = |url: &Url| url.scheme() == "https" || (url.scheme() == "http" && at.scheme() == "http");
    next.filter(kept).map(Some).ok_or((Failure::BadAnswer, None))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_the_range_itself_is_the_range() {
        assert!(is_range(Some("bytes 10-19/100"), 10, 10));
        assert!(is_range(Some("bytes 10-19/*"), 10, 10));
        for header in [
            "bytes 10-18/100",
            "bytes 0-9/100",
            "10-19/100",
            "bytes 10-19",
            "bytes */100",
        ] {
            assert!(!is_range(Some(header), 10, 10), "{header}");
        }
        assert!(!is_range(None, 10, 10));
    }
}
