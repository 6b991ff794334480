//! Messages between the proxy and the server: resolving a route, withdrawing generations, health.
//!
//! Owns the JSON shapes and nothing else; the transport (HTTP over Unix sockets) belongs to the proxy and to
//! `agentenv.routing`. Golden bytes of every message are in `spec/wire/route/` and are checked from Rust and Python.
//! Unknown fields are ignored in both directions, so that a proxy may outlive the server that started it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// `POST /resolve` on the server's internal socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolveRequest {
    pub sandbox_id: String,
    pub port: u16,
}

/// Where the traffic of one (sandbox, port) goes, and what must be checked before it does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteTarget {
    pub address: IpAddr,
    pub port: u16,
    /// One run of one sandbox. Nothing that was opened under one generation is ever used for another.
    pub generation: u64,
    /// Demanded from the client in `e2b-traffic-access-token`, except for the guest daemon's port.
    pub traffic_token: Option<String>,
    /// Replaces the Host header sent into the sandbox; `${PORT}` stands for the port.
    pub host_mask: Option<String>,
}

/// An answer that the proxy passes to its client byte for byte.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Refusal {
    pub status: u16,
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Kept as raw JSON so that key order and spacing reach the client as the server wrote them.
    pub body: Box<RawValue>,
}

/// The 200 body of `/resolve`: either a target or `{"refuse": ...}`.
#[derive(Clone, Debug)]
pub enum ResolveAnswer {
    Target(RouteTarget),
    Refuse(Refusal),
}

/// Why a body is not a `ResolveAnswer`.
#[derive(Debug, thiserror::Error)]
#[error("resolver answer is neither a target nor a refusal")]
pub struct InvalidAnswer(#[source] serde_json::Error);

impl ResolveAnswer {
    /// Parses the 200 body of `/resolve`. A body with `refuse` is a refusal whatever else it holds.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidAnswer> {
        // An untagged enum cannot hold raw JSON, hence two passes over a body of a few hundred bytes.
        #[derive(Deserialize)]
        struct Probe {
            refuse: Option<Refusal>,
        }
        let probe: Probe = serde_json::from_slice(body).map_err(InvalidAnswer)?;
        match probe.refuse {
            Some(refusal) => Ok(Self::Refuse(refusal)),
            None => serde_json::from_slice(body).map(Self::Target).map_err(InvalidAnswer),
        }
    }
}

/// `POST /withdraw` on the proxy's control socket: these runs are over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WithdrawRequest {
    pub generations: Vec<u64>,
}

/// Sent when nothing of the withdrawn generations is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WithdrawAnswer {
    /// Client connections that were reset.
    pub aborted: usize,
}

/// `PUT /live`: every generation below `below` that is not listed is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRequest {
    pub generations: Vec<u64>,
    pub below: u64,
}

/// `GET /health` on the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthAnswer {
    pub pid: u32,
    pub listen: String,
    /// Client connections that are open now.
    pub connections: usize,
    /// Generations that the proxy holds answers or connections of, ascending.
    pub generations: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(name: &str) -> String {
        let path = format!("{}/../../spec/wire/route/{name}.json", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap().trim_end().to_owned()
    }

    fn assert_golden<T: Serialize>(name: &str, value: &T) {
        assert_eq!(serde_json::to_string(value).unwrap(), golden(name), "{name}");
    }

    fn target(traffic_token: Option<&str>, host_mask: Option<&str>) -> RouteTarget {
        RouteTarget {
            address: "10.12.0.7".parse().unwrap(),
            port: 8080,
            generation: 41,
            traffic_token: traffic_token.map(str::to_owned),
            host_mask: host_mask.map(str::to_owned),
        }
    }

    #[test]
    fn every_message_has_its_golden_bytes() {
        let sandbox_id = "iabcdefghij0123456789".to_owned();
        assert_golden("resolve-request", &ResolveRequest { sandbox_id, port: 8080 });
        assert_golden("resolve-target", &target(None, None));
        assert_golden(
            "resolve-target-guarded",
            &target(Some("tok"), Some("localhost:${PORT}")),
        );
        assert_golden(
            "withdraw-request",
            &WithdrawRequest {
                generations: vec![3, 41],
            },
        );
        assert_golden("withdraw-answer", &WithdrawAnswer { aborted: 2 });
        assert_golden(
            "live-request",
            &LiveRequest {
                generations: vec![40, 41],
                below: 43,
            },
        );
        let health = HealthAnswer {
            pid: 7,
            listen: "127.0.0.1:8000".into(),
            connections: 1,
            generations: vec![41],
        };
        assert_golden("health-answer", &health);
    }

    #[test]
    fn a_target_is_read_back() {
        match ResolveAnswer::parse(golden("resolve-target-guarded").as_bytes()).unwrap() {
            ResolveAnswer::Target(found) => {
                assert_eq!(found, target(Some("tok"), Some("localhost:${PORT}")))
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_refusal_keeps_the_bytes_of_its_body() {
        match ResolveAnswer::parse(golden("resolve-refuse-not-found").as_bytes()).unwrap() {
            ResolveAnswer::Refuse(refusal) => {
                let body = r#"{"sandboxId":"iabcdefghij0123456789","message":"The sandbox was not found","code":502}"#;
                assert_eq!((refusal.status, refusal.body.get()), (502, body));
                assert_eq!(refusal.headers["content-type"], "application/json; charset=utf-8");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn other_shapes_are_errors() {
        for body in [
            "",
            "[]",
            "{}",
            r#"{"refuse":{}}"#,
            r#"{"address":"guest","port":1,"generation":1}"#,
        ] {
            assert!(ResolveAnswer::parse(body.as_bytes()).is_err(), "{body}");
        }
    }
}
