//! What a registry's 401 asks for, and the token that answers it.
//!
//! Only values: no request is made here (`registry.rs` makes them).

use std::time::{Duration, Instant};

use serde::Deserialize;

/// The life of a token that does not say how long it lives, as the token specification has it.
const DEFAULT_LIFE: Duration = Duration::from_secs(60);
/// Longest time that a token is kept, whatever it says.
const LIFE_MAX: Duration = Duration::from_secs(3600);
/// Longest token that is put into a header.
const TOKEN_BYTES_MAX: usize = 16 << 10;

/// A `WWW-Authenticate` header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

impl Challenge {
    /// Reads one header; none if the scheme is neither of the two or no realm is named.
    pub fn parse(header: &str) -> Option<Challenge> {
        let (scheme, parameters) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Challenge::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut scope) = (None, None, None);
        let mut rest = parameters;
        while let Some((name, value, tail)) = parameter(rest) {
            match name.to_ascii_lowercase().as_str() {
                "realm" => realm = Some(value),
                "service" => service = Some(value),
                "scope" => scope = Some(value),
                _ => {}
            }
            rest = tail;
        }
        realm.map(|realm| Challenge::Bearer { realm, service, scope })
    }
}

/// Takes `name=value` or `name="value"` off the front of a list.
fn parameter(text: &str) -> Option<(&str, String, &str)> {
    let text = text.trim_start_matches([' ', ',']);
    let (name, rest) = text.split_once('=')?;
    let Some(quoted) = rest.strip_prefix('"') else {
        let end = rest.find(',').unwrap_or(rest.len());
        return Some((name.trim(), rest[..end].trim().to_owned(), &rest[end..]));
    };
    let mut value = String::new();
    let mut escaped = false;
    for (at, c) in quoted.char_indices() {
        match c {
            '"' if !escaped => return Some((name.trim(), value, &quoted[at + 1..])),
            '\\' if !escaped => escaped = true,
            _ => {
                value.push(c);
                escaped = false;
            }
        }
    }
    None
}

/// The answer of a token service.
#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

/// A value of the `Authorization` header and the moment from which on it is not used.
#[derive(Clone)]
pub(crate) struct Token {
    pub bearer: String,
    pub until: Instant,
}

impl Token {
    /// Reads the answer that came for a request made at `asked`. None if it holds no token.
    pub fn parse(body: &[u8], asked: Instant) -> Option<Token> {
        let answer: TokenAnswer = serde_json::from_slice(body).ok()?;
        let bearer = answer.token.or(answer.access_token)?;
        let fits =
            !bearer.is_empty() && bearer.len() <= TOKEN_BYTES_MAX && bearer.bytes().all(|b| b.is_ascii_graphic());
        let life = answer
            .expires_in
            .map_or(DEFAULT_LIFE, Duration::from_secs)
            .min(LIFE_MAX);
        // A tenth is left for the requests that are under way when it ends.
        let until = asked + life * 9 / 10;
        fits.then_some(Token { bearer, until })
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_bearer_challenge_is_read() {
        let header =
            r#"Bearer realm="https://a.example/token",service="reg, istry",scope="repository:a/b:pull",error=x"#;
        let challenge = Challenge::Bearer {
            realm: "https://a.example/token".into(),
            service: Some("reg, istry".into()),
            scope: Some("repository:a/b:pull".into()),
        };
        assert_eq!(Challenge::parse(header), Some(challenge));
        let bare = Challenge::parse(r#"bearer Realm=http://x , foo="a\"b""#);
        assert!(matches!(bare, Some(Challenge::Bearer { realm, .. }) if realm == "http://x"));
        assert_eq!(Challenge::parse("Basic realm=\"x\""), Some(Challenge::Basic));
    }

    #[test]
    fn what_is_no_challenge_is_none() {
        for header in ["", "Digest realm=\"x\"", "Bearer service=\"x\"", "Bearer realm=\"open"] {
            assert_eq!(Challenge::parse(header), None, "{header}");
        }
    }

    #[test]
    fn a_token_lives_as_long_as_it_says() {
        let now = Instant::now();
        let life = |body: &str| Token::parse(body.as_bytes(), now).map(|token| token.until - now);
        assert_eq!(life(r#"{"token":"t","expires_in":100}"#), Some(Duration::from_secs(90)));
        assert_eq!(life(r#"{"access_token":"t"}"#), Some(Duration::from_secs(54)));
        assert_eq!(life(r#"{"token":"t","expires_in":99999999}"#), Some(LIFE_MAX * 9 / 10));
        assert_eq!(life(r#"{"token":"two words"}"#), None);
        assert_eq!(life("{}"), None);
    }
}
