//! Every answer that the proxy makes itself because of the guest or of the request.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected happens")]

mod support;

use support::{ID, World, get_request, read_request, with_echo, with_lines};

async fn closed_port() -> std::net::SocketAddr {
    tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
}

#[tokio::test]
async fn a_closed_port_has_its_exact_body() {
    let world = World::new().await;
    world.answers.set(ID, 8080, support::target(closed_port().await, 1));
    let reply = world.get(ID, 8080, "/").await;
    let body = format!(
        r#"{{"sandboxId":"{ID}","message":"The sandbox is running but port is not open","port":8080,"code":502}}"#
    );
    assert_eq!((reply.status(), reply.body), (502, body));
    let reply = world.get(ID, 8080, "/").await;
    assert_eq!(reply.header("access-control-allow-origin"), Some("*"));
    assert_eq!(reply.header("content-type"), Some("application/json; charset=utf-8"));
}

#[tokio::test]
async fn a_browser_gets_a_page() {
    let world = World::new().await;
    world.answers.set(ID, 8080, support::target(closed_port().await, 1));
    for port in [8080, 81] {
        let request = with_lines(&get_request(ID, port, "/"), "Accept: text/html,*/*;q=0.8");
        let reply = world.ask(&request).await;
        assert_eq!(
            (reply.status(), reply.header("content-type")),
            (502, Some("text/html; charset=utf-8"))
        );
        assert!(
            reply.body.starts_with("<!doctype html>") && reply.body.contains("<p>The sandbox "),
            "{reply:?}"
        );
    }
}

/// TCP to the broadcast address fails at once in every kernel, as a route that is gone does.
#[tokio::test]
async fn an_unreachable_guest_is_asked_for_once_more() {
    let world = World::leading_to("255.255.255.255:80".parse().unwrap()).await;
    let reply = world.get(ID, 80, "/").await;
    assert_eq!(reply.status(), 502);
    assert!(reply.body.contains("port is not open"), "{reply:?}");
    assert_eq!(world.answers.asked(), 2);
    // The cached answer leads nowhere; the fresh one is a refusal.
    world.answers.bodies.lock().unwrap().clear();
    assert!(world.get(ID, 80, "/").await.body.contains("was not found"));
}

#[tokio::test]
async fn a_guest_that_hangs_up_without_an_answer_is_502() {
    let guest = support::guest(|mut stream| async move {
        read_request(&mut stream).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let reply = world.get(ID, 80, "/").await;
    let message = "The sandbox closed the connection before it answered";
    assert_eq!(reply.status(), 502);
    assert_eq!(
        reply.body,
        format!(r#"{{"sandboxId":"{ID}","message":"{message}","port":80,"code":502}}"#)
    );
}

#[tokio::test]
async fn internal_routes_of_the_daemon_do_not_exist() {
    let world = with_echo().await;
    for path in [
        "/init",
        "//init/",
        "/%69nit",
        "/x/..%2ffreeze",
        "/fsthaw?x",
        "/Upgrade;a",
    ] {
        let reply = world.get(ID, 49983, path).await;
        assert_eq!(
            (reply.status(), reply.body.as_str()),
            (404, r#"{"code":404,"message":"no such route"}"#),
            "{path}"
        );
    }
    let by_path = format!("POST /proxy/{ID}/49983//init HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(world.ask(&by_path).await.status(), 404);
    assert_eq!(world.get(ID, 80, "/init").await.status(), 200);
}

#[tokio::test]
async fn malformed_routes_are_400_and_name_the_culprit() {
    let world = with_echo().await;
    let cases = [
        ("E2b-Sandbox-Id: a b", "e2b-sandbox-id"),
        ("E2b-Sandbox-Id: ../x", "e2b-sandbox-id"),
        ("E2b-Sandbox-Id: x\r\nE2b-Sandbox-Id: y", "e2b-sandbox-id"),
        ("E2b-Sandbox-Id: x\r\nE2b-Sandbox-Port: 0", "e2b-sandbox-port"),
        ("E2b-Sandbox-Id: x\r\nE2b-Sandbox-Port: 80x", "e2b-sandbox-port"),
        (
            "E2b-Sandbox-Id: x\r\nE2b-Sandbox-Port: 80\r\nE2b-Sandbox-Port: 81",
            "e2b-sandbox-port",
        ),
        ("Host: other", "host"),
    ];
    for (lines, culprit) in cases {
        let reply = world
            .ask(&format!("GET / HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n\r\n"))
            .await;
        let body: serde_json::Value = serde_json::from_str(&reply.body).unwrap();
        assert_eq!(
            (reply.status(), &body["code"]),
            (400, &serde_json::json!(400)),
            "{lines}"
        );
        assert!(body["message"].as_str().unwrap().contains(culprit), "{lines}: {body}");
    }
    assert_eq!(world.ask("GET / HTTP/1.1\r\n\r\n").await.status(), 400);
    assert_eq!(
        world
            .ask(&format!("GET / HTTP/1.1\r\nHost: 70000-{ID}.box.dev\r\n\r\n"))
            .await
            .status(),
        400
    );
}

#[tokio::test]
async fn huge_heads_are_431_and_garbage_is_400() {
    let world = with_echo().await;
    let huge = with_lines(&get_request(ID, 80, "/"), &format!("X-Big: {}", "a".repeat(70_000)));
    assert_eq!(world.ask(&huge).await.status(), 431);
    let many = with_lines(&get_request(ID, 80, "/"), "X-Many: 1\r\n".repeat(200).trim_end());
    assert_eq!(world.ask(&many).await.status(), 431);
    assert_eq!(world.ask("NOT HTTP\r\n\r\n").await.status(), 400);
    let both = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab";
    assert_eq!(world.ask(both).await.status(), 400);
}
