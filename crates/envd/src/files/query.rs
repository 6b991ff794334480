//! The query of /files: which file, as whom, and by which right.

use http::HeaderMap;
use http::request::Parts;

use crate::auth::{self, FileAccessError, SignedFile};
use crate::daemon::Daemon;

/// The query of /files, for both directions.
#[derive(Debug, Default)]
pub struct FileQuery {
    pub path: Option<String>,
    pub username: Option<String>,
    pub signature: Option<String>,
    pub expiration: Option<i64>,
}

impl FileQuery {
    pub fn parse(parts: &Parts) -> Self {
        let mut query = FileQuery::default();
        for (key, value) in form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
            match key.as_ref() {
                "path" => query.path = Some(value.into_owned()),
                "username" => query.username = Some(value.into_owned()).filter(|name| !name.is_empty()),
                "signature" => query.signature = Some(value.into_owned()),
                // What is no number was never signed, so it must not pass as "no expiration".
                "signature_expiration" => query.expiration = Some(value.parse().unwrap_or(0)),
                _ => {}
            }
        }
        query
    }

    /// Checks the token or the signature for `read` or `write`.
    pub fn check(&self, daemon: &Daemon, headers: &HeaderMap, operation: &'static str) -> Result<(), FileAccessError> {
        let file = SignedFile {
            path: self.path.as_deref().unwrap_or_default(),
            operation,
            username: self.username.as_deref().unwrap_or_default(),
            signature: self.signature.as_deref(),
            expiration: self.expiration,
        };
        let now_s = jiff::Timestamp::now().as_second();
        auth::check_file(headers, daemon.settings.borrow().token.as_deref(), &file, now_s)
    }
}
