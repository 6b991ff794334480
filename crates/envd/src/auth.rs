//! Who may call: the access token, the signature of a file URL, the user of a request.
//!
//! Secrets are compared in constant time. Decides only; the HTTP layer words the refusals.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use http::HeaderMap;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

pub const TOKEN_HEADER: &str = "x-access-token";

/// Why a file request is refused. The texts are those that E2B's clients show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileAccessError {
    #[error("access token present in header but does not match")]
    TokenWrong,
    #[error("missing signature query parameter")]
    SignatureMissing,
    #[error("invalid signature")]
    SignatureWrong,
    #[error("signature is already expired")]
    SignatureExpired,
}

/// What a file URL says about itself.
#[derive(Clone, Copy, Debug)]
pub struct SignedFile<'a> {
    /// As the client wrote it, before any resolution.
    pub path: &'a str,
    pub operation: &'static str,
    pub username: &'a str,
    pub signature: Option<&'a str>,
    /// Unix seconds.
    pub expiration: Option<i64>,
}

pub fn equal(left: &str, right: &str) -> bool {
    left.as_bytes().ct_eq(right.as_bytes()).into()
}

/// Whether the header carries the token. No token set: everybody may.
pub fn has_token(headers: &HeaderMap, token: Option<&str>) -> bool {
    let Some(token) = token else { return true };
    headers
        .get(TOKEN_HEADER)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|given| equal(given, token))
}

/// The rule of /files: the token, or a signature made with it.
pub fn check_file(
    headers: &HeaderMap,
    token: Option<&str>,
    file: &SignedFile<'_>,
    now_s: i64,
) -> Result<(), FileAccessError> {
    let Some(secret) = token else { return Ok(()) };
    if headers.contains_key(TOKEN_HEADER) {
        return if has_token(headers, token) {
            Ok(())
        } else {
            Err(FileAccessError::TokenWrong)
        };
    }
    let given = file.signature.ok_or(FileAccessError::SignatureMissing)?;
    if !equal(given, &sign(file, secret)) {
        return Err(FileAccessError::SignatureWrong);
    }
    if file.expiration.is_some_and(|expiration| expiration < now_s) {
        return Err(FileAccessError::SignatureExpired);
    }
    Ok(())
}

fn sign(file: &SignedFile<'_>, secret: &str) -> String {
    let mut text = format!("{}:{}:{}:{secret}", file.path, file.operation, file.username);
    if let Some(expiration) = file.expiration {
        text.push_str(&format!(":{expiration}"));
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// The user name of a Basic header; the password is unused in this protocol.
pub fn basic_user(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(http::header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let name = decoded.split(':').next().unwrap_or_default();
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    const TOKEN: &str = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0";
    const FILE: SignedFile<'_> = SignedFile {
        path: "hello.txt",
        operation: "read",
        username: "user",
        signature: Some("v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"),
        expiration: None,
    };

    #[test]
    fn the_published_test_vector_verifies() {
        assert_eq!(check_file(&HeaderMap::new(), Some(TOKEN), &FILE, 0), Ok(()));
        let write = SignedFile {
            operation: "write",
            ..FILE
        };
        let wrong = check_file(&HeaderMap::new(), Some(TOKEN), &write, 0);
        assert_eq!(wrong, Err(FileAccessError::SignatureWrong));
    }

    #[test]
    fn a_signature_expires_and_covers_its_expiration() {
        let unsigned = SignedFile {
            expiration: Some(100),
            signature: None,
            ..FILE
        };
        let signature = sign(&unsigned, TOKEN);
        let file = SignedFile {
            signature: Some(&signature),
            ..unsigned
        };
        assert_eq!(check_file(&HeaderMap::new(), Some(TOKEN), &file, 100), Ok(()));
        let late = check_file(&HeaderMap::new(), Some(TOKEN), &file, 101);
        assert_eq!(late, Err(FileAccessError::SignatureExpired));
        let moved = SignedFile {
            expiration: Some(200),
            ..file
        };
        let wrong = check_file(&HeaderMap::new(), Some(TOKEN), &moved, 101);
        assert_eq!(wrong, Err(FileAccessError::SignatureWrong));
    }

    #[test]
    fn a_wrong_header_is_not_saved_by_a_signature() {
        let mut headers = HeaderMap::new();
        headers.insert(TOKEN_HEADER, HeaderValue::from_static("nope"));
        assert_eq!(
            check_file(&headers, Some(TOKEN), &FILE, 0),
            Err(FileAccessError::TokenWrong)
        );
        headers.insert(TOKEN_HEADER, HeaderValue::from_static(TOKEN));
        assert_eq!(check_file(&headers, Some(TOKEN), &FILE, 0), Ok(()));
    }

    #[test]
    fn without_a_token_everything_is_open() {
        let file = SignedFile {
            signature: None,
            ..FILE
        };
        assert_eq!(check_file(&HeaderMap::new(), None, &file, 0), Ok(()));
        let missing = check_file(&HeaderMap::new(), Some(TOKEN), &file, 0);
        assert_eq!(missing, Err(FileAccessError::SignatureMissing));
        assert!(has_token(&HeaderMap::new(), None));
        assert!(!has_token(&HeaderMap::new(), Some(TOKEN)));
    }

    #[test]
    fn the_user_comes_from_the_basic_header() {
        let mut headers = HeaderMap::new();
        assert_eq!(basic_user(&headers), None);
        headers.insert("authorization", HeaderValue::from_static("Basic cm9vdDo="));
        assert_eq!(basic_user(&headers).as_deref(), Some("root"));
        headers.insert("authorization", HeaderValue::from_static("Bearer cm9vdDo="));
        assert_eq!(basic_user(&headers), None);
    }
}
