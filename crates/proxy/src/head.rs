//! What happens to headers on their way: hop-by-hop ones stay with their hop, secrets stay out of guests.

use std::net::IpAddr;

use hyper::header::{
    ACCEPT, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRANSFER_ENCODING,
    UPGRADE,
};

use crate::route::{SANDBOX_ID, SANDBOX_PORT};

pub static TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");
static API_KEY: HeaderName = HeaderName::from_static("x-api-key");
static FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
static PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Replaced by the port in a host mask.
const PORT_PLACEHOLDER: &str = "${PORT}";

/// The protocol that a client wants to switch to, if it does.
pub fn wanted_upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let is_asked = connection_tokens(headers).any(|token| token.eq_ignore_ascii_case("upgrade"));
    if is_asked { headers.get(UPGRADE).cloned() } else { None }
}

fn connection_tokens(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|token| !token.is_empty())
}

/// Removes what concerns one hop only. Framing is put back by hyper, for what must be said explicitly see below.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = connection_tokens(headers)
        .filter_map(|token| HeaderName::from_bytes(token.as_bytes()).ok())
        .collect();
    for name in named {
        // Nobody may talk us out of routing or framing headers by calling them hop-by-hop.
        if ![HOST, CONTENT_LENGTH, CONTENT_TYPE].contains(&name) {
            headers.remove(name);
        }
    }
    for name in [
        &CONNECTION,
        &KEEP_ALIVE,
        &PROXY_CONNECTION,
        &TE,
        &TRANSFER_ENCODING,
        &UPGRADE,
    ] {
        headers.remove(name);
    }
}

/// Turns a client's request headers into those of the next hop.
pub fn prepare_request(headers: &mut HeaderMap) {
    let upgrade = wanted_upgrade(headers);
    let is_chunked = headers.contains_key(TRANSFER_ENCODING);
    let wants_trailers = headers
        .get_all(TE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|value| {
            value
                .split(',')
                .any(|token| token.trim().eq_ignore_ascii_case("trailers"))
        });
    strip_hop_by_hop(headers);
    if is_chunked {
        // Without this hyper takes a GET with a body of unknown length for one without a body.
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// Takes out what a guest must never see: keys of our API, tokens that were checked here, and routing headers.
pub fn remove_secrets(headers: &mut HeaderMap) {
    for name in [&API_KEY, &TRAFFIC_TOKEN, &SANDBOX_ID, &SANDBOX_PORT] {
        headers.remove(name);
    }
}

/// Replaces the Host header by the mask that the server gave; a mask that is no header value changes nothing.
pub fn mask_host(headers: &mut HeaderMap, mask: &str, port: u16) {
    if let Ok(host) = HeaderValue::from_str(&mask.replace(PORT_PLACEHOLDER, &port.to_string())) {
        headers.insert(HOST, host);
    }
}

/// Makes Host say what the target says: an absolute target overrides it, and a 1.1 request must have one.
pub fn complete_host(headers: &mut HeaderMap, authority: Option<&str>) {
    match authority.map(HeaderValue::from_str) {
        Some(Ok(host)) => {
            headers.insert(HOST, host);
        }
        _ if !headers.contains_key(HOST) => {
            headers.insert(HOST, HeaderValue::from_static("localhost"));
        }
        _ => {}
    }
}

/// Appends the client's address to the chain.
pub fn add_forwarded_for(headers: &mut HeaderMap, client: IpAddr) {
    let earlier = headers
        .get_all(&FORWARDED_FOR)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let chain: Vec<String> = earlier
        .map(str::to_owned)
        .chain([client.to_canonical().to_string()])
        .collect();
    if let Ok(value) = HeaderValue::from_str(&chain.join(", ")) {
        headers.insert(&FORWARDED_FOR, value);
    }
}

/// The outcome of checking the traffic token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenCheck {
    Passed,
    Missing,
    Invalid,
}

/// Compares the one traffic token header with the expected value, in time that depends on lengths only.
pub fn check_token(headers: &HeaderMap, expected: &str) -> TokenCheck {
    let mut given = headers.get_all(&TRAFFIC_TOKEN).iter();
    match (given.next(), given.next()) {
        (None, _) => TokenCheck::Missing,
        (Some(token), None) if equal_in_constant_time(token.as_bytes(), expected.as_bytes()) => TokenCheck::Passed,
        _ => TokenCheck::Invalid,
    }
}

fn equal_in_constant_time(left: &[u8], right: &[u8]) -> bool {
    if left.len() != right.len() {
        return false;
    }
    let difference = left.iter().zip(right).fold(0u8, |sum, (a, b)| sum | (a ^ b));
    // The barrier keeps the compiler from leaving the loop early.
    std::hint::black_box(difference) == 0
}

/// Whether the client is a browser that shows a page, rather than a program that parses JSON.
pub fn prefers_html(headers: &HeaderMap) -> bool {
    let accept = headers
        .get(ACCEPT)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let position = |kind: &str| accept.find(kind).unwrap_or(usize::MAX);
    position("text/html") < position("application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::from_static(name), value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn hop_by_hop_headers_stay_with_their_hop() {
        let mut map = headers(&[
            ("connection", "keep-alive, X-Mine"),
            ("connection", "host"),
            ("x-mine", "1"),
            ("host", "h"),
            ("keep-alive", "9"),
            ("te", "gzip, trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("x-other", "2"),
        ]);
        prepare_request(&mut map);
        let expected = headers(&[
            ("host", "h"),
            ("x-other", "2"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
        ]);
        assert_eq!(map, expected);
    }

    #[test]
    fn an_upgrade_is_asked_for_again() {
        let mut map = headers(&[("connection", "Keep-Alive, Upgrade"), ("upgrade", "websocket")]);
        prepare_request(&mut map);
        assert_eq!(map, headers(&[("connection", "upgrade"), ("upgrade", "websocket")]));
    }

    #[test]
    fn secrets_and_routing_headers_are_removed() {
        let mut map = headers(&[
            ("x-api-key", "e2b_1"),
            ("x-api-key", "e2b_2"),
            ("e2b-traffic-access-token", "t"),
            ("e2b-sandbox-id", "i"),
            ("e2b-sandbox-port", "1"),
            ("x-access-token", "for the daemon"),
        ]);
        remove_secrets(&mut map);
        assert_eq!(map, headers(&[("x-access-token", "for the daemon")]));
    }

    #[test]
    fn exactly_one_right_token_passes() {
        let name = "e2b-traffic-access-token";
        assert_eq!(check_token(&headers(&[]), "tok"), TokenCheck::Missing);
        assert_eq!(check_token(&headers(&[(name, "tok")]), "tok"), TokenCheck::Passed);
        for wrong in [
            &[(name, "toK")][..],
            &[(name, "")],
            &[(name, "token")],
            &[(name, "tok"), (name, "tok")],
        ] {
            assert_eq!(check_token(&headers(wrong), "tok"), TokenCheck::Invalid, "{wrong:?}");
        }
    }

    #[test]
    fn the_host_is_masked() {
        let mut map = headers(&[("host", "8080-i.box.dev")]);
        mask_host(&mut map, "localhost:${PORT}", 8080);
        assert_eq!(map, headers(&[("host", "localhost:8080")]));
        mask_host(&mut map, "bad\nmask", 8080);
        assert_eq!(map, headers(&[("host", "localhost:8080")]));
    }

    #[test]
    fn the_host_is_completed() {
        let mut map = headers(&[]);
        complete_host(&mut map, None);
        assert_eq!(map, headers(&[("host", "localhost")]));
        complete_host(&mut map, Some("h:1"));
        assert_eq!(map, headers(&[("host", "h:1")]));
        complete_host(&mut map, None);
        assert_eq!(map, headers(&[("host", "h:1")]));
    }

    #[test]
    fn the_client_is_appended_to_the_chain() {
        let mut map = headers(&[("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "2.2.2.2")]);
        add_forwarded_for(&mut map, "::1".parse().unwrap());
        assert_eq!(map, headers(&[("x-forwarded-for", "1.1.1.1, 2.2.2.2, ::1")]));
    }

    #[test]
    fn only_browsers_get_html() {
        let chrome = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
        assert!(prefers_html(&headers(&[("accept", chrome)])));
        for accept in ["*/*", "application/json", "application/json, text/html", ""] {
            assert!(!prefers_html(&headers(&[("accept", accept)])), "{accept}");
        }
        assert!(!prefers_html(&headers(&[])));
    }
}
