//! Bodies: nothing is held back, nothing is lost, nothing grows.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected happens")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use support::{ID, World, get_request, ok, post, read_chunk, read_head, read_reply, read_request, soon, with_lines};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

/// A guest that sends each message of the test as a chunk, when the test says so.
async fn chunk_guest() -> (std::net::SocketAddr, mpsc::UnboundedSender<&'static str>) {
    let (send, receive) = mpsc::unbounded_channel::<&'static str>();
    let receive = Arc::new(tokio::sync::Mutex::new(receive));
    let guest = support::guest(move |mut stream| {
        let receive = Arc::clone(&receive);
        async move {
            read_request(&mut stream).await.unwrap();
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n")
                .await
                .unwrap();
            while let Some(text) = receive.lock().await.recv().await {
                stream.write_all(text.as_bytes()).await.unwrap();
            }
        }
    })
    .await;
    (guest, send)
}

#[tokio::test]
async fn each_chunk_of_an_answer_arrives_before_the_next_is_sent() {
    let (guest, send) = chunk_guest().await;
    let world = World::leading_to(guest).await;
    let request = with_lines(&get_request(ID, 80, "/"), "TE: trailers\r\nAccept-Encoding: gzip");
    let mut client = world.send(&request).await;
    let head = read_head(&mut client).await.unwrap();
    assert_eq!(support::header(&head, "content-encoding"), None);
    for chunk in ["1\r\na\r\n", "1\r\nb\r\n"] {
        send.send(chunk).unwrap();
        assert_eq!(read_chunk(&mut client).await.unwrap(), &chunk.as_bytes()[3..4]);
    }
    send.send("0\r\nx-sum: 2\r\n\r\n").unwrap();
    assert_eq!(read_chunk(&mut client).await.unwrap(), b"");
    let mut trailer = [0; "x-sum: 2\r\n\r\n".len()];
    soon(client.read_exact(&mut trailer)).await.unwrap();
    assert_eq!(&trailer, b"x-sum: 2\r\n\r\n");
}

#[tokio::test]
async fn each_chunk_of_an_upload_arrives_before_the_next_is_sent() {
    let (guest, mut heard) = support::telling_guest(|mut stream, told| async move {
        read_head(&mut stream).await.unwrap();
        loop {
            let chunk = read_chunk(&mut stream).await.unwrap();
            let is_last = chunk.is_empty();
            told.send(chunk).unwrap();
            if is_last {
                break;
            }
        }
        stream.write_all(ok("done").as_bytes()).await.unwrap();
        let _ = support::ending(&mut stream).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let mut client = world.send(&post("Transfer-Encoding: chunked")).await;
    for text in ["a", "b"] {
        client.write_all(format!("1\r\n{text}\r\n").as_bytes()).await.unwrap();
        assert_eq!(soon(heard.recv()).await.unwrap(), text.as_bytes());
    }
    client.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(soon(heard.recv()).await.unwrap(), b"");
    assert_eq!(read_reply(&mut client).await.body, "done");
}

#[tokio::test]
async fn a_get_with_a_chunked_body_keeps_it() {
    let world = World::leading_to(support::echo_guest().await).await;
    let request = post("Transfer-Encoding: chunked").replace("POST", "GET") + "4\r\nbody\r\n0\r\n\r\n";
    assert!(world.ask(&request).await.body.ends_with("\r\n\r\nbody"));
}

#[tokio::test]
async fn a_large_chunked_upload_does_not_grow_the_proxy() {
    const UPLOAD_BYTES: usize = 100 << 20;
    let guest = support::guest(|mut stream| async move {
        read_head(&mut stream).await.unwrap();
        let mut sum = 0;
        loop {
            let chunk = read_chunk(&mut stream).await.unwrap();
            if chunk.is_empty() {
                break;
            }
            sum += chunk.len();
        }
        stream.write_all(ok(&sum.to_string()).as_bytes()).await.unwrap();
        let _ = support::ending(&mut stream).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let before = world.memory_kib("VmRSS");
    let mut client = world.send(&post("Transfer-Encoding: chunked")).await;
    let chunk = [b"100000\r\n".as_slice(), &vec![b'x'; 1 << 20], b"\r\n"].concat();
    for _ in 0..UPLOAD_BYTES >> 20 {
        client.write_all(&chunk).await.unwrap();
    }
    client.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(read_reply(&mut client).await.body, UPLOAD_BYTES.to_string());
    let grown = world.memory_kib("VmHWM") - before;
    assert!(grown < 8 * 1024, "grew by {grown} KiB");
}

#[tokio::test]
async fn a_slow_reader_does_not_grow_the_proxy() {
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&sent);
    let guest = support::guest(move |mut stream| {
        let sent = Arc::clone(&counter);
        async move {
            read_request(&mut stream).await.unwrap();
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
                .await
                .unwrap();
            let block = vec![0; 1 << 20];
            while stream.write_all(&block).await.is_ok() {
                sent.fetch_add(1, Ordering::SeqCst);
            }
        }
    })
    .await;
    let world = World::leading_to(guest).await;
    let before = world.memory_kib("VmRSS");
    let mut client = world.send(&get_request(ID, 80, "/")).await;
    read_head(&mut client).await.unwrap();
    // Nothing is read; the guest must come to a halt when the sockets' buffers are full.
    let last = AtomicUsize::new(usize::MAX);
    support::until(|| async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let now = sent.load(Ordering::SeqCst);
        last.swap(now, Ordering::SeqCst) == now
    })
    .await;
    let last = last.into_inner();
    assert!(last < 64, "{last} MiB went into buffers");
    let grown = world.memory_kib("VmHWM") - before;
    assert!(grown < 8 * 1024, "grew by {grown} KiB");
}

#[tokio::test]
async fn expect_continue_is_the_guests_decision() {
    let guest = support::guest(|mut stream| async move {
        while let Some(head) = read_head(&mut stream).await {
            if head.contains("/refuse") {
                let refusal = "HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n";
                stream.write_all(refusal.as_bytes()).await.unwrap();
                return;
            }
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
            let mut body = [0; 4];
            stream.read_exact(&mut body).await.unwrap();
            stream
                .write_all(ok(std::str::from_utf8(&body).unwrap()).as_bytes())
                .await
                .unwrap();
        }
    })
    .await;
    let world = World::leading_to(guest).await;
    let request = post("Expect: 100-continue\r\nContent-Length: 4");
    let mut client = world.send(&request).await;
    assert_eq!(read_head(&mut client).await.unwrap(), "HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"body").await.unwrap();
    assert_eq!(read_reply(&mut client).await.body, "body");
    let mut refused = world.send(&request.replace("POST / ", "POST /refuse ")).await;
    assert_eq!(read_reply(&mut refused).await.status(), 417);
}

#[tokio::test]
async fn heads_without_bodies_keep_their_length() {
    let guest = support::guest(|mut stream| async move {
        while let Some(request) = read_request(&mut stream).await {
            let answer = if request.head.starts_with("HEAD") {
                "HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n"
            } else {
                "HTTP/1.1 204 No Content\r\n\r\n"
            };
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    })
    .await;
    let world = World::leading_to(guest).await;
    let mut client = world.connect().await;
    for _ in 0..2 {
        client
            .write_all(get_request(ID, 80, "/").replace("GET", "HEAD").as_bytes())
            .await
            .unwrap();
        let head = read_head(&mut client).await.unwrap();
        assert_eq!(support::header(&head, "content-length"), Some("12345"));
        client.write_all(get_request(ID, 80, "/").as_bytes()).await.unwrap();
        assert_eq!(read_reply(&mut client).await.status(), 204);
    }
}

#[tokio::test]
async fn an_answer_that_ends_with_the_connection_is_whole() {
    let guest = support::guest(|mut stream| async move {
        read_request(&mut stream).await.unwrap();
        stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nold style").await.unwrap();
    })
    .await;
    let world = World::leading_to(guest).await;
    assert_eq!(world.get(ID, 80, "/").await.body, "old style");
}

/// The guest answers and hangs up while the upload goes on, as servers with a body limit do.
#[tokio::test]
async fn an_answer_that_comes_before_the_end_of_an_upload_is_delivered() {
    let guest = support::guest(|mut stream| async move {
        read_head(&mut stream).await.unwrap();
        let refusal = "HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbig";
        stream.write_all(refusal.as_bytes()).await.unwrap();
        // A polite server reads on for a while, so that its answer is not lost to a reset.
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), support::ending(&mut stream)).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let mut client = world.send(&post("Content-Length: 20000000")).await;
    client.write_all(b"some of it").await.unwrap();
    let reply = read_reply(&mut client).await;
    assert_eq!((reply.status(), reply.body.as_str()), (413, "big"));
}

#[tokio::test]
async fn an_old_client_is_served() {
    let guest = support::guest(|mut stream| async move {
        let request = read_request(&mut stream).await.unwrap();
        assert_eq!(support::header(&request.head, "host"), Some("localhost"));
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
            .await
            .unwrap();
        let _ = support::ending(&mut stream).await;
    })
    .await;
    let world = World::leading_to(guest).await;
    let mut client = world.send(&format!("GET /proxy/{ID}/80/ HTTP/1.0\r\n\r\n")).await;
    let all = String::from_utf8(support::ending(&mut client).await.unwrap()).unwrap();
    assert!(
        all.starts_with("HTTP/1.0 200 ") && all.ends_with("\r\n\r\nok") && !all.contains("chunked"),
        "{all}"
    );
}
