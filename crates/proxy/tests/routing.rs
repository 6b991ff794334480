//! Where requests go, what they look like when they arrive, and what it takes to be let through.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected happens")]

mod support;

use std::sync::Arc;

use support::{ID, World, get_request, header, ok, read_reply, read_request, with_echo, with_lines};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;

fn start_api(world: &World) {
    let listener = UnixListener::bind(world.path("api.sock")).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                while let Some(request) = read_request(&mut stream).await {
                    let text = format!("api\n{}{}", request.head, request.body);
                    stream.write_all(ok(&text).as_bytes()).await.unwrap();
                }
            });
        }
    });
}

#[tokio::test]
async fn host_header_and_path_lead_to_the_sandbox() {
    let world = with_echo().await;
    let by_host = world
        .ask(&format!("GET /a?b HTTP/1.1\r\nHost: 8080-{ID}.box.dev\r\n\r\n"))
        .await;
    assert!(by_host.body.starts_with("GET /a?b HTTP/1.1\r\n"), "{by_host:?}");
    assert_eq!(
        header(&by_host.body, "host"),
        Some(format!("8080-{ID}.box.dev").as_str())
    );
    let by_header = world.get(ID, 80, "/a").await;
    assert_eq!(
        (by_header.status(), header(&by_header.body, "host")),
        (200, Some("localhost"))
    );
    let by_path = world
        .ask(&format!("GET /proxy/{ID}/80/a//b?c HTTP/1.1\r\nHost: h\r\n\r\n"))
        .await;
    assert!(by_path.body.starts_with("GET /a//b?c HTTP/1.1\r\n"), "{by_path:?}");
    let default_port = world
        .ask(&format!(
            "GET /health HTTP/1.1\r\nHost: h\r\nE2B-Sandbox-ID: {ID}-c\r\n\r\n"
        ))
        .await;
    assert!(default_port.body.starts_with("GET /health"), "{default_port:?}");
    let absolute = world
        .ask(&format!("GET http://80-{ID}.box.dev/x HTTP/1.1\r\nHost: h\r\n\r\n"))
        .await;
    assert!(absolute.body.starts_with("GET /x HTTP/1.1\r\n"), "{absolute:?}");
}

#[tokio::test]
async fn everything_else_is_the_api() {
    let world = World::new().await;
    start_api(&world);
    let reply = world
        .ask("POST /sandboxes HTTP/1.1\r\nHost: api.box.dev\r\nX-API-KEY: e2b_1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        .await;
    assert!(
        reply.body.starts_with("api\nPOST /sandboxes HTTP/1.1\r\n") && reply.body.ends_with("{}"),
        "{reply:?}"
    );
    assert_eq!(header(&reply.body, "x-api-key"), Some("e2b_1"));
    assert_eq!(header(&reply.body, "x-forwarded-for"), Some("127.0.0.1"));
}

#[tokio::test]
async fn an_absent_api_server_is_503_and_its_return_is_noticed() {
    let world = World::new().await;
    let request = "GET /health HTTP/1.1\r\nHost: h\r\n\r\n";
    let reply = world.ask(request).await;
    assert_eq!((reply.status(), reply.header("retry-after")), (503, Some("1")));
    assert_eq!(
        reply.body,
        r#"{"code":503,"message":"the API server is not running; retry"}"#
    );
    start_api(&world);
    assert_eq!(world.ask(request).await.status(), 200);
}

#[tokio::test]
async fn cached_answers_serve_while_the_server_is_gone() {
    let world = with_echo().await;
    assert_eq!(world.get(ID, 80, "/").await.status(), 200);
    std::fs::remove_file(world.path("internal.sock")).unwrap();
    for _ in 0..3 {
        assert_eq!(world.get(ID, 80, "/").await.status(), 200);
    }
    assert_eq!(world.answers.asked(), 1);
}

#[tokio::test]
async fn an_absent_resolver_is_503() {
    let world = World::new().await;
    std::fs::remove_file(world.path("internal.sock")).unwrap();
    let reply = world.get(ID, 80, "/").await;
    assert_eq!((reply.status(), reply.header("retry-after")), (503, Some("1")));
    assert_eq!(
        reply.body,
        r#"{"code":503,"message":"the API server cannot be reached"}"#
    );
}

#[tokio::test]
async fn one_question_per_place_however_many_wait() {
    let world = with_echo().await;
    let gate = Arc::new(Semaphore::new(0));
    *world.answers.gate.lock().unwrap() = Some(Arc::clone(&gate));
    let mut clients = Vec::new();
    for _ in 0..20 {
        let client = world.send(&get_request(ID, 80, "/")).await;
        clients.push(client);
    }
    support::until(|| async { world.answers.asked() == 1 }).await;
    // The one who asked first leaves; the others still get their answer.
    drop(clients.remove(0));
    gate.add_permits(1);
    for client in &mut clients {
        assert_eq!(read_reply(client).await.status(), 200);
    }
    assert_eq!(world.answers.asked(), 1);
}

#[tokio::test]
async fn refusals_pass_as_given_and_are_not_cached() {
    let world = World::new().await;
    let reply = world.get(ID, 80, "/").await;
    assert_eq!((reply.status(), reply.header("x-reason")), (502, Some("gone")));
    assert_eq!(
        reply.body,
        format!(r#"{{"sandboxId":"{ID}","message":"The sandbox was not found","code":502}}"#)
    );
    world
        .answers
        .set(ID, 80, support::target(support::echo_guest().await, 1));
    assert_eq!(world.get(ID, 80, "/").await.status(), 200);
}

#[tokio::test]
async fn the_traffic_token_is_demanded_and_kept_from_the_guest() {
    let world = World::new().await;
    let guest = support::echo_guest().await;
    for port in [80, 49983] {
        world
            .answers
            .set(ID, port, support::guarded(guest, 1, Some("tok"), None));
    }
    let with = |lines: &str| with_lines(&get_request(ID, 80, "/"), lines);
    let missing = world.get(ID, 80, "/").await;
    let prefix = format!(r#"{{"sandboxId":"{ID}","message":"Sandbox is secured with traffic access token. "#);
    let text = format!(r#"{prefix}Token header 'e2b-traffic-access-token' is missing","code":403}}"#);
    assert_eq!((missing.status(), missing.body), (403, text));
    for wrong in [
        "E2B-Traffic-Access-Token: toc",
        "e2b-traffic-access-token: tok\r\ne2b-traffic-access-token: tok",
    ] {
        let invalid = world.ask(&with(wrong)).await;
        let text = format!(r#"{prefix}Provided token in header 'e2b-traffic-access-token' is invalid","code":403}}"#);
        assert_eq!((invalid.status(), invalid.body), (403, text));
    }
    let right = world.ask(&with("e2b-traffic-access-token: tok")).await;
    assert_eq!(
        (right.status(), header(&right.body, "e2b-traffic-access-token")),
        (200, None)
    );
    assert_eq!(world.get(ID, 49983, "/files").await.status(), 200);
}

#[tokio::test]
async fn guests_see_no_keys_and_no_hop_by_hop_headers() {
    let world = with_echo().await;
    let lines = "X-API-KEY: e2b_1\r\nx-api-key: e2b_2\r\nX-Access-Token: daemon\r\nConnection: X-Gone\r\nX-Gone: 1\r\nX-Kept: 2";
    let reply = world.ask(&with_lines(&get_request(ID, 80, "/"), lines)).await;
    for gone in [
        "x-api-key",
        "e2b-sandbox-id",
        "e2b-sandbox-port",
        "x-gone",
        "connection",
    ] {
        assert_eq!(header(&reply.body, gone), None, "{gone}");
    }
    assert_eq!(header(&reply.body, "x-access-token"), Some("daemon"));
    assert!(
        reply.body.contains("X-Kept: 2\r\n"),
        "the client's spelling is kept: {reply:?}"
    );
}

#[tokio::test]
async fn the_host_is_masked_where_the_answer_says_so() {
    let world = World::new().await;
    let guest = support::echo_guest().await;
    world
        .answers
        .set(ID, 8080, support::guarded(guest, 1, None, Some("localhost:${PORT}")));
    assert_eq!(
        header(&world.get(ID, 8080, "/").await.body, "host"),
        Some("localhost:8080")
    );
}
