//! Decides from a request's head alone where the request goes. Pure: no sockets, no cache, no clock.
//!
//! In order: a Host whose first label is `{port}-{sandbox id}`; the headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port`;
//! a path `/proxy/{sandbox id}/{port}/...`; else the API. A Host that names a sandbox wins over the headers, so that a
//! page served by one sandbox cannot make a browser's request to itself end in another one.

use hyper::HeaderMap;
use hyper::header::HeaderName;

use crate::limits::ENVD_PORT;

pub static SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
pub static SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

/// Our ids have 21 characters; other issuers' may be longer, but a label of a host name ends at 63.
const SANDBOX_ID_CHARS_MAX: usize = 63;

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    Api,
    /// The second field is the request target to send when it is not the one that came (path routing).
    Sandbox(Place, Option<String>),
}

/// One port of one sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    pub sandbox_id: String,
    pub port: u16,
}

/// Why the head names no usable destination; the text is the message of a 400.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRoute {
    #[error("header {name} must appear once, not {count} times")]
    Repeated { name: HeaderName, count: usize },
    #[error("invalid sandbox id {value:?} in {place}: expected letters and digits")]
    SandboxId { place: &'static str, value: String },
    #[error("invalid sandbox port {value:?} in {place}: expected a number from 1 to 65535")]
    Port { place: &'static str, value: String },
}

/// `host` is the Host header (or the authority of an absolute request target), `target` path and query.
pub fn choose(host: &str, headers: &HeaderMap, target: &str, domain: Option<&str>) -> Result<Destination, BadRoute> {
    if let Some(place) = from_host(host, domain)? {
        return Ok(Destination::Sandbox(place, None));
    }
    if let Some(id) = single(headers, &SANDBOX_ID)? {
        return from_headers(id, single(headers, &SANDBOX_PORT)?);
    }
    if let Some(rest) = target.strip_prefix("/proxy/") {
        return from_path(rest);
    }
    Ok(Destination::Api)
}

fn from_host(host: &str, domain: Option<&str>) -> Result<Option<Place>, BadRoute> {
    let name = host
        .rsplit_once(':')
        .map_or(host, |(name, _)| name)
        .to_ascii_lowercase();
    let (label, parent) = name.split_once('.').unwrap_or((&name, ""));
    let Some((port, id)) = label.split_once('-') else {
        return Ok(None);
    };
    let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    if !is_port || !id.starts_with(|first: char| first.is_ascii_alphanumeric()) || !is_ours(parent, domain) {
        return Ok(None);
    }
    let place = "the host name";
    Ok(Some(Place {
        sandbox_id: sandbox_id(id, place)?,
        port: port_number(port, place)?,
    }))
}

/// Without a configured domain any parent will do; `localhost` always will, for tests on one machine.
fn is_ours(parent: &str, domain: Option<&str>) -> bool {
    let parent = parent.strip_suffix('.').unwrap_or(parent);
    parent.is_empty() || parent == "localhost" || domain.is_none_or(|domain| domain.eq_ignore_ascii_case(parent))
}

fn from_headers(id: &str, port: Option<&str>) -> Result<Destination, BadRoute> {
    let sandbox_id = sandbox_id(id, "header e2b-sandbox-id")?;
    let port = port.map_or(Ok(ENVD_PORT), |port| port_number(port, "header e2b-sandbox-port"))?;
    Ok(Destination::Sandbox(Place { sandbox_id, port }, None))
}

/// `rest` follows `/proxy/`. Nothing of what the sandbox will see is decoded or normalised.
fn from_path(rest: &str) -> Result<Destination, BadRoute> {
    let place = "the path";
    let (path, query) = rest.find('?').map_or((rest, ""), |at| rest.split_at(at));
    let (id, after_id) = path.split_once('/').unwrap_or((path, ""));
    let (port, tail) = after_id.find('/').map_or((after_id, "/"), |at| after_id.split_at(at));
    let place = Place {
        sandbox_id: sandbox_id(id, place)?,
        port: port_number(port, place)?,
    };
    Ok(Destination::Sandbox(place, Some(format!("{tail}{query}"))))
}

/// Old clients append `-{client id}` to the sandbox id; it means nothing.
fn sandbox_id(text: &str, place: &'static str) -> Result<String, BadRoute> {
    let id = text.split_once('-').map_or(text, |(id, _)| id);
    let is_valid =
        !id.is_empty() && id.len() <= SANDBOX_ID_CHARS_MAX && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if is_valid {
        Ok(id.to_ascii_lowercase())
    } else {
        Err(BadRoute::SandboxId {
            place,
            value: shortened(text),
        })
    }
}

fn port_number(text: &str, place: &'static str) -> Result<u16, BadRoute> {
    // `parse` alone would accept "+80".
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u16>() {
        Ok(port) if digits && port > 0 => Ok(port),
        _ => Err(BadRoute::Port {
            place,
            value: shortened(text),
        }),
    }
}

/// Whatever a client sent must not fill our answers.
fn shortened(text: &str) -> String {
    text.chars().take(SANDBOX_ID_CHARS_MAX).collect()
}

/// The value of a header that decides something: absent, or exactly once. Unreadable bytes fail the later check.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, BadRoute> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    let count = 1 + values.count();
    if first.is_some() && count > 1 {
        return Err(BadRoute::Repeated {
            name: name.clone(),
            count,
        });
    }
    Ok(first.map(|value| value.to_str().unwrap_or("\u{fffd}").trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "iabcdefghij0123456789";

    fn sandbox(port: u16, target: Option<&str>) -> Result<Destination, BadRoute> {
        Ok(Destination::Sandbox(
            Place {
                sandbox_id: ID.into(),
                port,
            },
            target.map(str::to_owned),
        ))
    }

    fn with_headers(id: &str, port: Option<&str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(&SANDBOX_ID, id.parse().unwrap());
        if let Some(port) = port {
            headers.insert(&SANDBOX_PORT, port.parse().unwrap());
        }
        headers
    }

    fn by_host(host: &str, domain: Option<&str>) -> Result<Destination, BadRoute> {
        choose(host, &HeaderMap::new(), "/", domain)
    }

    #[test]
    fn a_host_with_port_and_id_is_a_sandbox() {
        for host in [
            "8080-ID",
            "8080-ID.box.dev",
            "8080-ID.box.dev:3000",
            "8080-ID.BOX.dev.",
            "8080-ID-client.box.dev",
        ] {
            assert_eq!(
                by_host(&host.replace("ID", ID), Some("box.dev")),
                sandbox(8080, None),
                "{host}"
            );
        }
        assert_eq!(by_host(&format!("8080-{ID}.any.where"), None), sandbox(8080, None));
        assert_eq!(
            by_host(&format!("8080-{ID}.localhost:3000"), Some("box.dev")),
            sandbox(8080, None)
        );
        assert_eq!(
            by_host(&format!("8080-{}.box.dev", ID.to_uppercase()), Some("box.dev")),
            sandbox(8080, None)
        );
    }

    #[test]
    fn other_hosts_are_the_api() {
        for host in [
            "",
            "127.0.0.1:8000",
            "[::1]:8000",
            "localhost",
            "api.box.dev",
            "box.dev",
            "x80-abc.box.dev",
            "80-.box.dev",
        ] {
            assert_eq!(by_host(host, Some("box.dev")), Ok(Destination::Api), "{host}");
        }
        assert_eq!(
            by_host(&format!("8080-{ID}.other.dev"), Some("box.dev")),
            Ok(Destination::Api)
        );
    }

    #[test]
    fn a_host_with_an_impossible_port_is_refused() {
        for port in ["0", "65536", "99999999999999999999"] {
            let found = by_host(&format!("{port}-{ID}.box.dev"), Some("box.dev"));
            assert_eq!(
                found,
                Err(BadRoute::Port {
                    place: "the host name",
                    value: port.into()
                })
            );
        }
    }

    #[test]
    fn headers_name_a_sandbox_where_the_host_does_not() {
        for host in [
            "127.0.0.1:8000",
            "[::1]",
            "localhost",
            "sandbox.box.dev",
            "api.box.dev",
            "box.dev",
            "",
        ] {
            let found = choose(host, &with_headers(ID, Some("8080")), "/proxy/x/y", Some("box.dev"));
            assert_eq!(found, sandbox(8080, None), "{host}");
        }
        assert_eq!(
            choose("localhost", &with_headers(ID, None), "/", None),
            sandbox(ENVD_PORT, None)
        );
        assert_eq!(
            choose("localhost", &with_headers(&format!("{ID}-c1"), None), "/", None),
            sandbox(ENVD_PORT, None)
        );
    }

    #[test]
    fn a_sandbox_host_wins_over_headers() {
        let found = choose(
            &format!("80-{ID}.box.dev"),
            &with_headers("iother", Some("x")),
            "/",
            Some("box.dev"),
        );
        assert_eq!(found, sandbox(80, None));
    }

    #[test]
    fn malformed_headers_are_named() {
        for port in ["", "0", "+80", "80 81", "0x50", "65536", "http"] {
            let error = choose("localhost", &with_headers(ID, Some(port)), "/", None).unwrap_err();
            assert!(error.to_string().contains("e2b-sandbox-port"), "{error}");
        }
        for id in ["", "-", "a_b", "a.b", "../x", &"a".repeat(64)] {
            let error = choose("localhost", &with_headers(id, None), "/", None).unwrap_err();
            assert!(error.to_string().contains("e2b-sandbox-id"), "{error}");
        }
        let mut headers = with_headers(ID, None);
        headers.append(&SANDBOX_ID, "iother".parse().unwrap());
        let error = choose("localhost", &headers, "/", None).unwrap_err();
        assert_eq!(error.to_string(), "header e2b-sandbox-id must appear once, not 2 times");
    }

    #[test]
    fn a_proxy_path_loses_its_prefix_and_nothing_else() {
        for (path, target) in [
            ("/proxy/ID/8080", "/"),
            ("/proxy/ID/8080/", "/"),
            ("/proxy/ID/8080?a=/b", "/?a=/b"),
            ("/proxy/ID/8080//x/%2e./?q", "//x/%2e./?q"),
        ] {
            let found = choose("localhost", &HeaderMap::new(), &path.replace("ID", ID), None);
            assert_eq!(found, sandbox(8080, Some(target)), "{path}");
        }
        for path in ["/proxy/", "/proxy/ID", "/proxy/ID/", "/proxy/ID/x/", "/proxy/a%2fb/80/"] {
            assert!(
                choose("localhost", &HeaderMap::new(), &path.replace("ID", ID), None).is_err(),
                "{path}"
            );
        }
        assert_eq!(
            choose("localhost", &HeaderMap::new(), "/proxyfoo", None),
            Ok(Destination::Api)
        );
    }
}
