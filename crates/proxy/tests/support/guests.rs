//! Guests: ports of a sandbox as plain sockets with hand-written answers.

use std::future::Future;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::{ok, read_request};

/// A guest port: runs `serve` for each connection.
pub async fn guest<F, Fut>(serve: F) -> SocketAddr
where
    F: Fn(TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            stream.set_nodelay(true).unwrap();
            tokio::spawn(serve(stream));
        }
    });
    address
}

/// A guest that serves with a means to tell the test something.
pub async fn telling_guest<T, F, Fut>(serve: F) -> (SocketAddr, mpsc::UnboundedReceiver<T>)
where
    T: Send + 'static,
    F: Fn(TcpStream, mpsc::UnboundedSender<T>) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let (told, heard) = mpsc::unbounded_channel();
    let address = guest(move |stream| serve(stream, told.clone())).await;
    (address, heard)
}

/// A guest that answers each request with the request's own head and body.
pub async fn echo_guest() -> SocketAddr {
    guest(|mut stream| async move {
        while let Some(request) = read_request(&mut stream).await {
            let text = format!("{}{}", request.head, request.body);
            if stream.write_all(ok(&text).as_bytes()).await.is_err() {
                return;
            }
        }
    })
    .await
}

/// A guest that sends one chunk and then keeps the stream open; it drops the stream when it is reset.
pub async fn stream_guest() -> SocketAddr {
    guest(|mut stream| async move {
        begin_stream(&mut stream).await;
        let mut byte = [0];
        let _ = stream.read(&mut byte).await;
    })
    .await
}

/// Takes a request and begins an endless answer, with the chunk "first".
pub async fn begin_stream(stream: &mut TcpStream) {
    read_request(stream).await.unwrap();
    stream
        .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        .await
        .unwrap();
}
