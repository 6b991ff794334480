//! Tokens, signatures, /init and the small routes, against a real daemon.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::json;
use support::Envd;

const TOKEN: &str = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0";
const WITH_TOKEN: (&str, &str) = ("x-access-token", TOKEN);
const JSON: (&str, &str) = ("content-type", "application/json");

fn secured() -> Envd {
    let envd = Envd::start();
    envd.init(&json!({ "accessToken": TOKEN }));
    envd
}

#[test]
fn the_token_guards_everything_but_health_and_what_checks_itself() {
    let envd = secured();
    for (method, path) in [
        ("GET", "/metrics"),
        ("GET", "/envs"),
        ("GET", "/nope"),
        ("POST", "/process.Process/List"),
        ("POST", "/filesystem.Filesystem/Stat"),
    ] {
        for headers in [vec![JSON], vec![JSON, ("x-access-token", "wrong")]] {
            let answer = envd.request(method, path, &headers, b"{}");
            assert_eq!(
                (answer.status, answer.json()["code"].as_i64()),
                (401, Some(401)),
                "{method} {path}"
            );
        }
        assert_ne!(
            envd.request(method, path, &[JSON, WITH_TOKEN], b"{}").status,
            401,
            "{method} {path}"
        );
    }
    assert_eq!(envd.get("/health", &[]).status, 204);
    assert_eq!(envd.request("OPTIONS", "/files", &[], b"").status, 204);
    assert_eq!(
        envd.get("/metrics", &[]).json()["message"],
        "unauthorized access, please provide a valid access token or method signing if supported"
    );
}

#[test]
fn files_take_the_token_or_a_signature_and_say_what_is_wrong() {
    let envd = secured();
    let path = "/files?path=hello.txt&username=user";
    let signature = "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E".replace('/', "%2F");
    let message = |path: &str, headers: &[(&str, &str)]| {
        let answer = envd.get(path, headers);
        (answer.status, answer.json()["message"].as_str().unwrap().to_owned())
    };
    assert_eq!(message(path, &[]), (401, "missing signature query parameter".into()));
    assert_eq!(
        message(&format!("{path}&signature=v1_x"), &[]),
        (401, "invalid signature".into())
    );
    let wrong = message(path, &[("x-access-token", "wrong")]);
    assert_eq!(wrong, (401, "access token present in header but does not match".into()));
    // Past the check, the user `user` or the file is what is missing.
    let (status, text) = message(&format!("{path}&signature={signature}"), &[]);
    assert!(status == 404 || text.contains("unknown user"), "{status} {text}");
    let answer = envd.post(&format!("{path}&signature={signature}"), &[], b"");
    assert_eq!(answer.json()["message"], "invalid signature");
    assert_eq!(envd.get("/files?path=/etc/passwd", &[WITH_TOKEN]).status, 200);
}

#[test]
fn init_sets_the_token_once_and_changes_it_only_for_who_knows_it() {
    let envd = secured();
    let init = |headers: &[(&str, &str)], message: serde_json::Value| {
        envd.post("/init", headers, message.to_string().as_bytes()).status
    };
    assert_eq!(init(&[], json!({ "envVars": { "A": "1" } })), 401);
    assert_eq!(init(&[], json!({ "accessToken": "other" })), 401);
    assert_eq!(init(&[], json!({ "accessToken": TOKEN, "envVars": { "A": "2" } })), 204);
    assert_eq!(envd.get("/envs", &[WITH_TOKEN]).json()["A"], "2");
    assert_eq!(init(&[WITH_TOKEN], json!({ "accessToken": "next" })), 204);
    assert_eq!(envd.get("/envs", &[WITH_TOKEN]).status, 401);
    assert_eq!(init(&[("x-access-token", "next")], json!({ "accessToken": "" })), 204);
    assert_eq!(envd.get("/envs", &[]).json()["A"], "2");
}

#[test]
fn init_changes_nothing_when_a_field_is_wrong() {
    let envd = Envd::start();
    for bad in [
        json!({ "timestamp": "yesterday" }),
        json!({ "machineID": "xyz" }),
        json!({ "hostname": "a b" }),
        json!({ "entropy": "AAAA" }),
        json!({ "volumeMounts": [{}] }),
        json!({ "caBundle": "-----BEGIN" }),
        json!({ "envVars": { "A": 1 } }),
    ] {
        let mut message = bad.clone();
        message["accessToken"] = "secret".into();
        let answer = envd.post("/init", &[], message.to_string().as_bytes());
        assert_eq!(
            (answer.status, answer.json()["code"].as_i64()),
            (400, Some(400)),
            "{bad}"
        );
    }
    assert_eq!(envd.get("/envs", &[]).status, 200);
    envd.init(&json!({ "unknown": true, "timestamp": "2026-01-01T00:00:00.5+02:00" }));
}

#[test]
fn init_replaces_the_variables_and_keeps_what_it_does_not_name() {
    let envd = Envd::start();
    envd.init(&json!({ "envVars": { "A": "1", "B": "1" }, "sandboxID": "s" }));
    envd.init(&json!({ "envVars": { "B": "2" } }));
    envd.init(&json!({}));
    assert_eq!(
        envd.get("/envs", &[]).json(),
        json!({ "B": "2", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "s" })
    );
}

#[test]
fn browsers_may_read_every_answer() {
    let envd = secured();
    for path in ["/health", "/metrics", "/files?path=x", "/nope"] {
        assert_eq!(
            envd.get(path, &[]).header("access-control-allow-origin"),
            Some("*"),
            "{path}"
        );
    }
    let asked = [("access-control-request-headers", "authorization,x-access-token")];
    let answer = envd.request("OPTIONS", "/process.Process/Start", &asked, b"");
    assert_eq!(
        answer.header("access-control-allow-headers"),
        Some("authorization,x-access-token")
    );
}

#[test]
fn metrics_have_all_their_fields() {
    let envd = Envd::start();
    let metrics = envd.get("/metrics", &[]).json();
    for key in [
        "ts",
        "cpu_count",
        "mem_total",
        "mem_used",
        "mem_cache",
        "mem_total_mib",
        "disk_used",
        "disk_total",
    ] {
        assert!(metrics[key].as_u64().unwrap() > 0, "{key}");
    }
    assert!(metrics["cpu_used_pct"].as_f64().unwrap() <= 100.0);
    assert_eq!(envd.get("/health", &[]).header("cache-control"), Some("no-store"));
    assert_eq!(envd.post("/health", &[], b"").status, 405);
}
