//! Withdrawing a generation: what is reset, what is not, and what can never come back.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected happens")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use support::{
    ID, World, begin_stream, ending, get_request, is_reset, ok, post, read_chunk, read_head, read_reply, read_request,
    soon, with_lines,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// A client in the middle of a chunked answer.
async fn streaming(world: &World, port: u16) -> TcpStream {
    let mut client = world.send(&get_request(ID, port, "/")).await;
    read_head(&mut client).await.unwrap();
    assert_eq!(read_chunk(&mut client).await.unwrap(), b"first");
    client
}

#[tokio::test]
async fn a_chunked_stream_is_reset_without_its_terminating_chunk() {
    let world = World::leading_to(support::stream_guest().await).await;
    let mut client = streaming(&world, 80).await;
    assert_eq!(world.withdraw(1).await["aborted"], 1);
    let end = ending(&mut client).await;
    assert!(is_reset(&end), "{end:?}");
}

#[tokio::test]
async fn both_sides_are_reset_by_the_time_of_the_answer() {
    let (guest, mut heard) = support::telling_guest(|mut stream, told| async move {
        begin_stream(&mut stream).await;
        told.send(ending(&mut stream).await).unwrap();
    })
    .await;
    let world = World::leading_to(guest).await;
    let client = streaming(&world, 80).await;
    world.withdraw(1).await;
    // No waiting here: the reset came before the answer, so the kernel knows of it already.
    let mut byte = [0];
    let error = client.try_read(&mut byte).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let guest_end = soon(heard.recv()).await.unwrap();
    assert!(is_reset(&guest_end), "{guest_end:?}");
}

#[tokio::test]
async fn another_generation_streams_on() {
    let other = support::guest(|mut stream| async move {
        begin_stream(&mut stream).await;
        // The client's upload of nothing stays open; the test's word comes on the next connection.
        let mut rest = stream;
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        rest.write_all(b"6\r\nsecond\r\n0\r\n\r\n").await.unwrap();
        let _ = ending(&mut rest).await;
    })
    .await;
    let world = World::leading_to(support::stream_guest().await).await;
    world.answers.set(ID, 81, support::target(other, 2));
    let mut first = streaming(&world, 80).await;
    let mut second = streaming(&world, 81).await;
    assert_eq!(world.withdraw(1).await["aborted"], 1);
    assert!(is_reset(&ending(&mut first).await));
    assert_eq!(read_chunk(&mut second).await.unwrap(), b"second");
    assert_eq!(read_chunk(&mut second).await.unwrap(), b"");
    assert_eq!(
        world.control("GET", "/health", "").await["generations"],
        serde_json::json!([2])
    );
}

#[tokio::test]
async fn a_request_that_waits_for_its_answer_is_reset() {
    let (guest, mut heard) = support::telling_guest(|mut stream, told| async move {
        read_request(&mut stream).await.unwrap();
        told.send(()).unwrap();
        let _ = ending(&mut stream).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let mut client = world.send(&get_request(ID, 80, "/")).await;
    soon(heard.recv()).await.unwrap();
    assert_eq!(world.withdraw(1).await["aborted"], 1);
    assert!(is_reset(&ending(&mut client).await));
}

#[tokio::test]
async fn an_upload_under_way_is_reset() {
    let (guest, mut heard) = support::telling_guest(|mut stream, told| async move {
        read_head(&mut stream).await.unwrap();
        told.send(read_chunk(&mut stream).await.unwrap()).unwrap();
        let _ = ending(&mut stream).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let mut client = world
        .send(&(post("Transfer-Encoding: chunked") + "4\r\nbyte\r\n"))
        .await;
    assert_eq!(soon(heard.recv()).await.unwrap(), b"byte");
    assert_eq!(world.withdraw(1).await["aborted"], 1);
    assert!(is_reset(&ending(&mut client).await));
}

#[tokio::test]
async fn a_tunnel_is_reset() {
    let guest = support::guest(|mut stream| async move {
        read_head(&mut stream).await.unwrap();
        stream
            .write_all(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: own\r\n\r\nhello")
            .await
            .unwrap();
        let _ = ending(&mut stream).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let request = with_lines(&get_request(ID, 80, "/"), "Connection: upgrade\r\nUpgrade: own");
    let mut client = world.send(&request).await;
    read_head(&mut client).await.unwrap();
    let mut hello = [0; 5];
    soon(client.read_exact(&mut hello)).await.unwrap();
    assert_eq!(&hello, b"hello");
    assert_eq!(world.withdraw(1).await["aborted"], 1);
    assert!(is_reset(&ending(&mut client).await));
}

#[tokio::test]
async fn an_idle_keep_alive_connection_survives() {
    let guest = support::echo_guest().await;
    let world = World::leading_to(guest).await;
    let mut client = world.send(&get_request(ID, 80, "/one")).await;
    assert_eq!(read_reply(&mut client).await.status(), 200);
    assert_eq!(world.withdraw(1).await["aborted"], 0);
    world.answers.set(ID, 80, support::target(guest, 2));
    client.write_all(get_request(ID, 80, "/two").as_bytes()).await.unwrap();
    assert!(read_reply(&mut client).await.body.starts_with("GET /two"));
}

/// The address of a dead sandbox belongs to the next one at once; an old connection must not reach it.
#[tokio::test]
async fn connections_are_never_reused_across_generations() {
    let world = World::new().await;
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connections);
    // Answers the path of the first request that came through the same connection.
    let guest = support::guest(move |mut stream| {
        counter.fetch_add(1, Ordering::SeqCst);
        async move {
            let mut first = None;
            while let Some(request) = read_request(&mut stream).await {
                let path = request.head.split(' ').nth(1).map(str::to_owned);
                let body = first.get_or_insert(path).clone().unwrap();
                let _ = stream.write_all(ok(&body).as_bytes()).await;
            }
        }
    })
    .await;
    for generation in 1..50 {
        world.answers.set(ID, 80, support::target(guest, generation));
        for _ in 0..3 {
            let path = format!("/{generation}");
            assert_eq!(world.get(ID, 80, &path).await.body, path);
        }
        world.withdraw(generation).await;
    }
    // Also while both generations live at one address (a server's mistake, or two ports that are one).
    world.answers.set("iother", 80, support::target(guest, 51));
    world.answers.set(ID, 80, support::target(guest, 50));
    for (id, path) in [(ID, "/50"), ("iother", "/51"), (ID, "/50"), ("iother", "/51")] {
        assert_eq!(world.get(id, 80, path).await.body, path);
    }
    // Within a generation they are reused, or this test would show nothing.
    assert!(connections.load(Ordering::SeqCst) < 49 * 3, "no connection was reused");
}

#[tokio::test]
async fn an_answer_in_flight_of_a_withdrawn_generation_is_asked_again() {
    let world = World::new().await;
    let guest = support::echo_guest().await;
    let gate = Arc::new(Semaphore::new(0));
    *world.answers.gate.lock().unwrap() = Some(Arc::clone(&gate));
    world.answers.set(ID, 80, support::target(guest, 1));
    let mut client = world.send(&get_request(ID, 80, "/")).await;
    support::until(|| async { world.answers.asked() == 1 }).await;
    world.answers.set(ID, 80, support::target(guest, 2));
    world.withdraw(1).await;
    gate.add_permits(2);
    assert_eq!(read_reply(&mut client).await.status(), 200);
    assert_eq!(world.answers.asked(), 2);
    assert_eq!(
        world.control("GET", "/health", "").await["generations"],
        serde_json::json!([2])
    );
}

#[tokio::test]
async fn a_withdrawn_generation_is_refused_for_ever() {
    let world = World::leading_to(support::echo_guest().await).await;
    world.withdraw(1).await;
    let reply = world.get(ID, 80, "/").await;
    assert_eq!((reply.status(), reply.header("retry-after")), (503, Some("1")));
    assert_eq!(
        world.control("GET", "/health", "").await["generations"],
        serde_json::json!([])
    );
}

#[tokio::test]
async fn live_withdraws_what_a_restarted_server_does_not_know() {
    let world = World::new().await;
    let guest = support::stream_guest().await;
    let mut clients = Vec::new();
    for generation in [3, 5, 9] {
        world
            .answers
            .set(ID, generation as u16, support::target(guest, generation));
        clients.push(streaming(&world, generation as u16).await);
    }
    let answer = world.control("PUT", "/live", r#"{"generations":[5],"below":9}"#).await;
    assert_eq!(answer["aborted"], 1);
    assert!(is_reset(&ending(&mut clients[0]).await));
    assert_eq!(
        world.control("GET", "/health", "").await["generations"],
        serde_json::json!([5, 9])
    );
    world.answers.set(ID, 100, support::target(guest, 4));
    assert_eq!(world.get(ID, 100, "/").await.status(), 503);
}

#[tokio::test]
async fn a_guest_that_breaks_off_resets_the_client() {
    let guest = support::guest(|mut stream| async move {
        begin_stream(&mut stream).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let mut client = world.send(&get_request(ID, 80, "/")).await;
    let end = ending(&mut client).await;
    assert!(is_reset(&end), "{end:?}");
}

#[tokio::test]
async fn control_refuses_what_it_does_not_know() {
    let world = World::new().await;
    assert_eq!(world.control("POST", "/withdraw", "{}").await["code"], 400);
    assert_eq!(world.control("GET", "/withdraw", "").await["code"], 404);
}
