//! One S3 store: single requests, each one attempt with a timeout. Retries, journals and the order of requests are the
//! caller's.
//!
//! object_store signs requests and finds credentials; the transport and the judgement of answers are ours (`http.rs`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, PutMode, PutOptions, RetryConfig};
use tokio::runtime::Handle;

use crate::config::{Addressing, S3Config};
use crate::error::{Failure, Place, StoreError, of_status};
use crate::http::{Connector, Http, Seen, observed};

/// What a store says of an object without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    pub size_bytes: u64,
    pub etag: Option<String>,
}

/// A store by its name. Cheap to clone; blocking and thread-safe, not to be called on a thread of an async runtime.
#[derive(Debug, Clone)]
pub struct Bucket {
    name: String,
    prefix: String,
    pub(crate) s3: Arc<AmazonS3>,
    runtime: Handle,
}

/// An upload in parts: its key and what the store calls it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadId(pub String);

impl Bucket {
    pub(crate) fn new(name: &str, config: &S3Config, http: Http, runtime: Handle) -> Result<Bucket, StoreError> {
        let place = Place {
            store: name.to_owned(),
            key: config.bucket.clone(),
            range: None,
        };
        let what = || "object_store refuses it".to_owned();
        let s3 =
            build(config, http).map_err(|e| StoreError::new(place, Failure::Config { what: what() }).caused_by(e))?;
        Ok(Bucket {
            name: name.to_owned(),
            prefix: config.prefix.trim_matches('/').to_owned(),
            s3: Arc::new(s3),
            runtime,
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size and tag of an object. Errors: kind `NotFound` if there is none.
    pub fn head(&self, key: &str, timeout: Duration) -> Result<ObjectInfo, StoreError> {
        let options = GetOptions {
            head: true,
            ..GetOptions::default()
        };
        let path = self.path(key)?;
        let found = self.run(key, None, timeout, self.s3.get_opts(&path, options))?;
        Ok(ObjectInfo {
            size_bytes: found.meta.size,
            etag: found.meta.e_tag,
        })
    }

    /// Writes a whole object; returns its tag. With `if_absent`, an object that is there is an error of status 412 or 409.
    pub fn put(
        &self,
        key: &str,
        bytes: Bytes,
        if_absent: bool,
        timeout: Duration,
    ) -> Result<Option<String>, StoreError> {
        let mode = if if_absent { PutMode::Create } else { PutMode::Overwrite };
        let options = PutOptions::from(mode);
        let path = self.path(key)?;
        let put = self.s3.put_opts(&path, bytes.into(), options);
        Ok(self.run(key, None, timeout, put)?.e_tag)
    }

    /// Starts an upload in parts. Nothing is visible before `complete`.
    pub fn create_upload(&self, key: &str, timeout: Duration) -> Result<UploadId, StoreError> {
        let path = self.path(key)?;
        self.run(key, None, timeout, self.s3.create_multipart(&path))
            .map(UploadId)
    }

    /// Sends part `part` (counted from 0); returns its tag. Sending a part again replaces it.
    pub fn put_part(
        &self,
        key: &str,
        upload: &UploadId,
        part: usize,
        bytes: Bytes,
        timeout: Duration,
    ) -> Result<String, StoreError> {
        let path = self.path(key)?;
        let put = self.s3.put_part(&path, &upload.0, part, bytes.into());
        Ok(self.run(key, None, timeout, put)?.content_id)
    }

    /// Makes the object of its parts, given by their tags in order; returns the object's tag.
    pub fn complete(
        &self,
        key: &str,
        upload: &UploadId,
        tags: Vec<String>,
        timeout: Duration,
    ) -> Result<Option<String>, StoreError> {
        let path = self.path(key)?;
        let parts = tags.into_iter().map(|content_id| PartId { content_id }).collect();
        let complete = self.s3.complete_multipart(&path, &upload.0, parts);
        Ok(self.run(key, None, timeout, complete)?.e_tag)
    }

    /// Gives up an upload and the parts it has.
    pub fn abort(&self, key: &str, upload: &UploadId, timeout: Duration) -> Result<(), StoreError> {
        let path = self.path(key)?;
        self.run(key, None, timeout, self.s3.abort_multipart(&path, &upload.0))
    }

    pub(crate) fn path(&self, key: &str) -> Result<Path, StoreError> {
        let full = match self.prefix.as_str() {
            "" => key.to_owned(),
            prefix => format!("{prefix}/{key}"),
        };
        Path::parse(full).map_err(|e| self.fail(key, None, Failure::BadKey).caused_by(e))
    }

    pub(crate) fn fail(&self, key: &str, range: Option<(u64, u64)>, failure: Failure) -> StoreError {
        let place = Place {
            store: self.name.clone(),
            key: key.to_owned(),
            range,
        };
        StoreError::new(place, failure)
    }

    /// Runs one request to its end.
    pub(crate) fn run<T>(
        &self,
        key: &str,
        range: Option<(u64, u64)>,
        timeout: Duration,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, StoreError> {
        let limited = async { tokio::time::timeout(timeout, observed(request)).await };
        match self.runtime.block_on(limited) {
            Ok((Ok(value), _)) => Ok(value),
            Ok((Err(error), seen)) => Err(self.fail(key, range, judge(seen)).caused_by(error)),
            Err(_) => Err(self.fail(key, range, Failure::Timeout { after: timeout })),
        }
    }
}

/// What an error of object_store means, by the answer that it got.
fn judge(seen: Option<Seen>) -> Failure {
    match seen {
        Some(seen) if !seen.status.is_success() => of_status(seen.status.as_u16(), seen.code),
        // The answer began well: its headers, its body or its end are wrong.
        Some(_) => Failure::BadAnswer,
        None => Failure::Unreachable,
    }
}

fn build(config: &S3Config, http: Http) -> object_store::Result<AmazonS3> {
    let keys_given = config.access_key_id.is_some();
    let mut builder = if keys_given {
        AmazonS3Builder::new()
    } else {
        AmazonS3Builder::from_env()
    };
    builder = builder
        .with_bucket_name(&config.bucket)
        .with_region(&config.region)
        .with_virtual_hosted_style_request(config.addressing == Addressing::Virtual)
        .with_allow_http(config.allow_http)
        .with_http_connector(Connector(http))
        .with_retry(RetryConfig {
            max_retries: 0,
            ..RetryConfig::default()
        });
    if let (Some(key), Some(secret)) = (&config.access_key_id, &config.secret_access_key) {
        builder = builder.with_access_key_id(key).with_secret_access_key(secret);
    }
    if let Some(token) = &config.session_token {
        builder = builder.with_token(token);
    }
    if let Some(endpoint) = endpoint(config) {
        builder = builder.with_endpoint(endpoint);
    }
    builder.build()
}

/// The endpoint as object_store wants it: with virtual addressing it carries the bucket's name.
fn endpoint(config: &S3Config) -> Option<String> {
    let endpoint = config.endpoint.as_deref()?.trim_end_matches('/');
    match (config.addressing, endpoint.split_once("://")) {
        (Addressing::Virtual, Some((scheme, host))) => Some(format!("{scheme}://{}.{host}", config.bucket)),
        _ => Some(endpoint.to_owned()),
    }
}
