//! HTTP/1.1 by hand: what is sent, and what is read byte by byte.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

use super::{ID, soon};

pub fn get_request(id: &str, port: u16, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n\r\n")
}

/// A POST with these header lines too, without its body.
pub fn post(lines: &str) -> String {
    with_lines(&get_request(ID, 80, "/").replace("GET", "POST"), lines)
}

/// A request with these header lines too, each but the last with its line end.
pub fn with_lines(request: &str, lines: &str) -> String {
    request.replace("\r\n\r\n", &format!("\r\n{lines}\r\n\r\n"))
}

pub fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

#[derive(Debug)]
pub struct Request {
    pub head: String,
    pub body: String,
}

#[derive(Debug)]
pub struct Reply {
    pub head: String,
    pub body: String,
}

impl Reply {
    pub fn status(&self) -> u16 {
        self.head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }
}

pub fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = head.lines().filter_map(|line| line.split_once(':'));
    lines
        .find(|(found, _)| found.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.trim())
}

/// Reads up to the empty line; none at the end of the stream.
pub async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(soon(stream.read_u8()).await.ok()?);
    }
    Some(String::from_utf8(bytes).unwrap())
}

/// Reads one chunk of a chunked body; empty at its end.
pub async fn read_chunk(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut size = Vec::new();
    while !size.ends_with(b"\r\n") {
        size.push(soon(stream.read_u8()).await?);
    }
    let size = usize::from_str_radix(std::str::from_utf8(&size).unwrap().trim(), 16).unwrap();
    let mut chunk = vec![0; size];
    soon(stream.read_exact(&mut chunk)).await?;
    if size > 0 {
        soon(stream.read_exact(&mut [0; 2])).await?;
    }
    Ok(chunk)
}

async fn read_body(stream: &mut (impl AsyncRead + Unpin), head: &str) -> String {
    let mut body = Vec::new();
    if header(head, "transfer-encoding").is_some() {
        loop {
            let chunk = read_chunk(stream).await.unwrap();
            if chunk.is_empty() {
                // Trailers and the empty line.
                body.extend(read_trailers(stream).await.into_bytes());
                break;
            }
            body.extend(chunk);
        }
    } else if let Some(length) = header(head, "content-length") {
        body.resize(length.parse().unwrap(), 0);
        soon(stream.read_exact(&mut body)).await.unwrap();
    }
    String::from_utf8(body).unwrap()
}

async fn read_trailers(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut text = Vec::new();
    while !(text == b"\r\n" || text.ends_with(b"\r\n\r\n")) {
        text.push(soon(stream.read_u8()).await.unwrap());
    }
    String::from_utf8(text).unwrap().trim_end().to_owned()
}

pub async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> Option<Request> {
    let head = read_head(stream).await?;
    let body = read_body(stream, &head).await;
    Some(Request { head, body })
}

pub async fn read_reply(stream: &mut (impl AsyncRead + Unpin)) -> Reply {
    let head = read_head(stream).await.expect("the connection ended before a reply");
    let body = read_body(stream, &head).await;
    Reply { head, body }
}

/// Reads until the connection ends and says how.
pub async fn ending(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut rest = Vec::new();
    soon(stream.read_to_end(&mut rest)).await.map(|_| rest)
}

pub fn is_reset(ending: &io::Result<Vec<u8>>) -> bool {
    matches!(ending, Err(error) if error.kind() == io::ErrorKind::ConnectionReset)
}
