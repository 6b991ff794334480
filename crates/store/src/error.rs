//! The one error of reading and writing a store: which store, which key, which bytes, and whether trying again may help.
//!
//! Callers decide by [`StoreError::kind`], never by the text.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

/// What went wrong with one request.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {failure}")]
pub struct StoreError {
    // Boxed, so that a result stays small on the path of every read.
    place: Box<Place>,
    failure: Failure,
    #[source]
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// What the request was about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Name of the store in the configuration, host of the registry, or `file`.
    pub store: String,
    /// Key, `repository@digest`, or path.
    pub key: String,
    /// First byte and number of bytes; none for a request about the whole object.
    pub range: Option<(u64, u64)>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.store, self.key)?;
        match self.range {
            Some((offset, length)) => write!(f, " (bytes {offset}+{length})"),
            None => Ok(()),
        }
    }
}

/// How a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("there is no such object")]
    NotFound,
    #[error("access was denied ({status}{})", code.as_deref().map(|c| format!(" {c}")).unwrap_or_default())]
    Denied { status: u16, code: Option<String> },
    #[error("the store answered {status}{}", code.as_deref().map(|c| format!(" {c}")).unwrap_or_default())]
    Status { status: u16, code: Option<String> },
    #[error("no answer came")]
    Unreachable,
    #[error("no complete answer within {} ms", after.as_millis())]
    Timeout { after: Duration },
    #[error("{found} of {expected} bytes came")]
    Truncated { expected: u64, found: u64 },
    #[error("the answer is not the part that was asked for")]
    WrongRange,
    #[error("the object was replaced: its tag is {found} and was {expected}")]
    Replaced { expected: String, found: String },
    #[error("the answer cannot be understood")]
    BadAnswer,
    #[error("the object has {found} bytes; at most {limit} were expected")]
    TooLarge { found: u64, limit: u64 },
    #[error("the file cannot be read")]
    File,
    #[error("no store of this name is configured")]
    UnknownStore,
    #[error("the configuration is wrong: {what}")]
    Config { what: String },
    #[error("this is no key of an object")]
    BadKey,
}

/// What a caller may decide on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreErrorKind {
    /// The same request may succeed later.
    Transient,
    NotFound,
    Denied,
    /// The request or what it named is wrong; trying again does not help.
    Invalid,
}

impl StoreError {
    pub(crate) fn new(place: Place, failure: Failure) -> Self {
        StoreError {
            place: Box::new(place),
            failure,
            source: None,
        }
    }

    pub(crate) fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    pub fn place(&self) -> &Place {
        &self.place
    }

    pub fn failure(&self) -> &Failure {
        &self.failure
    }

    /// Whether trying again may help.
    pub fn kind(&self) -> StoreErrorKind {
        match &self.failure {
            Failure::NotFound => StoreErrorKind::NotFound,
            Failure::Denied { .. } => StoreErrorKind::Denied,
            Failure::Status { status, code } => status_kind(*status, code.as_deref()),
            Failure::Unreachable
            | Failure::Timeout { .. }
            | Failure::Truncated { .. }
            | Failure::WrongRange
            | Failure::Replaced { .. }
            | Failure::BadAnswer => StoreErrorKind::Transient,
            Failure::File => match self.io_kind() {
                Some(std::io::ErrorKind::NotFound) => StoreErrorKind::NotFound,
                Some(std::io::ErrorKind::PermissionDenied) => StoreErrorKind::Denied,
                // A network file system may come back.
                _ => StoreErrorKind::Transient,
            },
            Failure::TooLarge { .. } | Failure::UnknownStore | Failure::Config { .. } | Failure::BadKey => {
                StoreErrorKind::Invalid
            }
        }
    }

    fn io_kind(&self) -> Option<std::io::ErrorKind> {
        let source = self.source.as_ref()?.downcast_ref::<std::io::Error>()?;
        Some(source.kind())
    }
}

/// 409 is a write that met another one; 408 and the code `RequestTimeout` (a 400) a body that came too slowly.
fn status_kind(status: u16, code: Option<&str>) -> StoreErrorKind {
    match status {
        408 | 409 | 425 | 429 => StoreErrorKind::Transient,
        400 if code == Some("RequestTimeout") => StoreErrorKind::Transient,
        500..=599 => StoreErrorKind::Transient,
        _ => StoreErrorKind::Invalid,
    }
}

/// The failure that a status other than success is.
pub(crate) fn of_status(status: u16, code: Option<String>) -> Failure {
    match status {
        404 | 410 => Failure::NotFound,
        401 | 403 => Failure::Denied { status, code },
        _ => Failure::Status { status, code },
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn kind(failure: Failure) -> StoreErrorKind {
        let place = Place {
            store: "s".into(),
            key: "k".into(),
            range: None,
        };
        StoreError::new(place, failure).kind()
    }

    #[test]
    fn a_status_says_whether_trying_again_may_help() {
        for status in [408, 409, 429, 500, 502, 503, 504] {
            assert_eq!(kind(of_status(status, None)), StoreErrorKind::Transient, "{status}");
        }
        for status in [301, 400, 411, 412, 416] {
            assert_eq!(kind(of_status(status, None)), StoreErrorKind::Invalid, "{status}");
        }
        assert_eq!(
            kind(of_status(400, Some("RequestTimeout".into()))),
            StoreErrorKind::Transient
        );
        assert_eq!(kind(of_status(404, None)), StoreErrorKind::NotFound);
        assert_eq!(kind(of_status(403, None)), StoreErrorKind::Denied);
    }

    #[test]
    fn the_text_names_store_key_and_bytes() {
        let place = Place {
            store: "repository".into(),
            key: "layers/ab".into(),
            range: Some((4096, 512)),
        };
        let error = StoreError::new(place, of_status(503, Some("SlowDown".into())));
        assert_eq!(
            error.to_string(),
            "repository: layers/ab (bytes 4096+512): the store answered 503 SlowDown"
        );
    }
}
