//! Connections: their order, reuse, number and end, and those that became tunnels.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected happens")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use support::{ID, World, get_request, ok, post, read_head, read_reply, read_request, soon, with_echo, with_lines};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Semaphore, mpsc};

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let world = World::leading_to(support::echo_guest().await).await;
    let mut client = world.connect().await;
    let requests: String = (0..20)
        .map(|number| get_request(ID, 80, &format!("/{number}")))
        .collect();
    client.write_all(requests.as_bytes()).await.unwrap();
    for number in 0..20 {
        assert!(
            read_reply(&mut client)
                .await
                .body
                .starts_with(&format!("GET /{number} "))
        );
    }
}

/// A guest that answers once per connection, then closes it without having said so, and tells that it did.
async fn closing_guest() -> (std::net::SocketAddr, mpsc::UnboundedReceiver<()>) {
    support::telling_guest(|mut stream, told| async move {
        if read_request(&mut stream).await.is_some() {
            stream.write_all(ok("x").as_bytes()).await.unwrap();
        }
        drop(stream);
        let _ = told.send(());
    })
    .await
}

/// Whether the guest closes before or while the next request is sent is left to chance, 300 times.
#[tokio::test]
async fn a_connection_closed_just_before_its_reuse_fails_no_request() {
    let (guest, mut closed) = closing_guest().await;
    let world = World::leading_to(guest).await;
    let mut client = world.connect().await;
    for round in 0..300 {
        client.write_all(get_request(ID, 80, "/").as_bytes()).await.unwrap();
        assert_eq!(read_reply(&mut client).await.status(), 200, "round {round}");
    }
    for _ in 0..300 {
        soon(closed.recv()).await.unwrap();
    }
}

#[tokio::test]
async fn a_closed_connection_is_not_reused_for_what_must_not_run_twice() {
    let (guest, mut closed) = closing_guest().await;
    let world = World::leading_to(guest).await;
    let mut client = world.connect().await;
    for round in 0..100 {
        client
            .write_all((post("Content-Length: 4") + "body").as_bytes())
            .await
            .unwrap();
        assert_eq!(read_reply(&mut client).await.status(), 200, "round {round}");
        soon(closed.recv()).await.unwrap();
    }
}

/// The guest closes only when the second request has arrived: the request may have been run, so POST is not repeated.
#[tokio::test]
async fn only_harmless_requests_are_sent_twice() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connections);
    let guest = support::guest(move |mut stream| {
        counter.fetch_add(1, Ordering::SeqCst);
        async move {
            read_request(&mut stream).await.unwrap();
            stream.write_all(ok("x").as_bytes()).await.unwrap();
            read_request(&mut stream).await;
        }
    })
    .await;
    let world = World::leading_to(guest).await;
    assert_eq!(world.get(ID, 80, "/").await.status(), 200);
    support::until(|| async { connections.load(Ordering::SeqCst) == 1 }).await;
    assert_eq!(world.get(ID, 80, "/").await.status(), 200);
    assert_eq!(connections.load(Ordering::SeqCst), 2);
    assert_eq!(world.ask(&post("Content-Length: 0")).await.status(), 502);
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

/// Each connection of this guest answers one request with its body and breaks off at the second, having read it.
#[tokio::test]
async fn a_small_body_is_sent_again_whole_and_a_large_one_is_not() {
    let guest = support::guest(|mut stream| async move {
        let request = read_request(&mut stream).await.unwrap();
        stream.write_all(ok(&request.body).as_bytes()).await.unwrap();
        read_request(&mut stream).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let put = |framing: &str, body: &str| post(framing).replace("POST", "PUT") + body;
    let large = "x".repeat(70_000);
    for (request, expected) in [
        (put("Content-Length: 4", "body"), Some("body")),
        (put("Content-Length: 5", "again"), Some("again")),
        (
            put("Transfer-Encoding: chunked", "2\r\nch\r\n4\r\nunks\r\n0\r\n\r\n"),
            Some("chunks"),
        ),
        (put("Content-Length: 70000", &large), None),
    ] {
        let reply = world.ask(&request).await;
        match expected {
            Some(body) => assert_eq!((reply.status(), reply.body.as_str()), (200, body)),
            None => assert_eq!(reply.status(), 502),
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_by_the_guest() {
    let (guest, mut heard) = support::telling_guest(|mut stream, told| async move {
        read_request(&mut stream).await.unwrap();
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
            .await
            .unwrap();
        let _ = support::ending(&mut stream).await;
        told.send(()).unwrap();
    })
    .await;
    let world = World::leading_to(guest).await;
    let mut client = world.send(&get_request(ID, 80, "/")).await;
    read_head(&mut client).await.unwrap();
    drop(client);
    soon(heard.recv()).await.unwrap();
}

#[tokio::test]
async fn tunnels_carry_bytes_both_ways_and_half_closes() {
    let guest = support::guest(|mut stream| async move {
        let head = read_head(&mut stream).await.unwrap();
        assert!(head.to_lowercase().contains("upgrade: own/2"), "{head}");
        stream
            .write_all(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: own/2\r\n\r\n")
            .await
            .unwrap();
        // Echoes after the client's end of sending, which a half-closed tunnel must let through.
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        stream.write_all(&all).await.unwrap();
    })
    .await;
    let world = World::leading_to(guest).await;
    let request = with_lines(&get_request(ID, 80, "/"), "Connection: Upgrade\r\nUpgrade: own/2") + "early ";
    let mut client = world.send(&request).await;
    let head = read_head(&mut client).await.unwrap();
    assert!(
        head.starts_with("HTTP/1.1 101 ") && support::header(&head, "upgrade") == Some("own/2"),
        "{head}"
    );
    let bulk = vec![7; 3 << 20];
    let (mut reader, mut writer) = client.split();
    let write = async {
        writer.write_all(&bulk).await.unwrap();
        writer.shutdown().await.unwrap();
    };
    let (_, echoed) = tokio::join!(write, support::ending(&mut reader));
    let echoed = echoed.unwrap();
    assert!(echoed.starts_with(b"early ") && echoed[6..] == bulk);
    support::until(|| async { world.control("GET", "/health", "").await["connections"] == 0 }).await;
}

#[tokio::test]
async fn an_upgrade_that_the_guest_declines_is_an_ordinary_answer() {
    let world = World::leading_to(support::echo_guest().await).await;
    let request = with_lines(&get_request(ID, 80, "/"), "Connection: Upgrade\r\nUpgrade: h2c");
    assert_eq!(world.ask(&request).await.status(), 200);
}

#[tokio::test]
async fn half_a_request_costs_nothing() {
    let world = with_echo().await;
    for half in ["", "GET", "GET / HTTP/1.1\r\nHost: h"] {
        let mut client = world.send(half).await;
        client.shutdown().await.unwrap();
        let _ = support::ending(&mut client).await;
    }
    support::until(|| async { world.control("GET", "/health", "").await["connections"] == 0 }).await;
    assert_eq!(world.get(ID, 80, "/").await.status(), 200);
}

#[tokio::test]
async fn the_connection_after_the_last_is_503() {
    let world = World::with(&["--connections-max", "2"]).await;
    world
        .answers
        .set(ID, 80, support::target(support::echo_guest().await, 1));
    let first = world.connect().await;
    let _second = world.connect().await;
    support::until(|| async { world.control("GET", "/health", "").await["connections"] == 2 }).await;
    let mut third = world.connect().await;
    let reply = read_reply(&mut third).await;
    assert_eq!((reply.status(), reply.header("retry-after")), (503, Some("1")));
    drop(first);
    support::until(|| async { world.control("GET", "/health", "").await["connections"] == 1 }).await;
    assert_eq!(world.get(ID, 80, "/").await.status(), 200);
}

#[tokio::test]
async fn shutdown_lets_an_answer_end_and_removes_the_socket() {
    let gate = Arc::new(Semaphore::new(0));
    let guest = {
        let gate = Arc::clone(&gate);
        support::guest(move |mut stream| {
            let gate = Arc::clone(&gate);
            async move {
                read_request(&mut stream).await.unwrap();
                gate.acquire().await.unwrap().forget();
                stream.write_all(ok("late").as_bytes()).await.unwrap();
            }
        })
        .await
    };
    let mut world = World::leading_to(guest).await;
    let idle = world.connect().await;
    let mut client = world.send(&get_request(ID, 80, "/")).await;
    support::until(|| async { world.answers.asked() == 1 }).await;
    world.control("POST", "/shutdown", "").await;
    support::until(|| async { tokio::net::TcpStream::connect(world.address).await.is_err() }).await;
    gate.add_permits(1);
    assert_eq!(read_reply(&mut client).await.body, "late");
    let status = soon(async {
        loop {
            if let Some(status) = world.proxy.try_wait().unwrap() {
                break status;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
    assert!(status.success() && !world.path("proxy.sock").exists());
    drop(idle);
}
