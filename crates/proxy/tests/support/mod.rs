//! A real proxy process between fakes: a resolver with programmable answers, an API server, raw guests and raw clients.
//!
//! Guests and clients are plain sockets with hand-written HTTP, because the tests are about exact bytes and resets.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected happens")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

mod guests;
mod wire;

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;

pub use guests::*;
pub use wire::*;

pub const ID: &str = "iabcdefghij0123456789";

/// Far above what anything here takes; a test that hangs ends with an error instead.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work)
        .await
        .expect("did not happen in time")
}

/// Programmable answers of the server's resolver, and what it was asked.
#[derive(Default)]
pub struct Answers {
    pub bodies: Mutex<HashMap<(String, u16), String>>,
    pub asked: AtomicUsize,
    /// Each answer takes a permit, when there is a gate.
    pub gate: Mutex<Option<Arc<Semaphore>>>,
}

impl Answers {
    pub fn set(&self, id: &str, port: u16, body: String) {
        self.bodies.lock().unwrap().insert((id.to_owned(), port), body);
    }

    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    fn find(&self, question: &str) -> String {
        let question: serde_json::Value = serde_json::from_str(question).unwrap();
        let key = (
            question["sandbox_id"].as_str().unwrap().to_owned(),
            question["port"].as_u64().unwrap() as u16,
        );
        self.asked.fetch_add(1, Ordering::SeqCst);
        let found = self.bodies.lock().unwrap().get(&key).cloned();
        found.unwrap_or_else(|| not_found(&key.0))
    }
}

pub fn not_found(id: &str) -> String {
    format!(
        r#"{{"refuse":{{"status":502,"headers":{{"x-reason":"gone"}},"body":{{"sandboxId":"{id}","message":"The sandbox was not found","code":502}}}}}}"#
    )
}

pub fn target(guest: SocketAddr, generation: u64) -> String {
    guarded(guest, generation, None, None)
}

pub fn guarded(guest: SocketAddr, generation: u64, token: Option<&str>, mask: Option<&str>) -> String {
    serde_json::json!({"address": guest.ip(), "port": guest.port(), "generation": generation,
        "traffic_token": token, "host_mask": mask})
    .to_string()
}

/// The proxy and its fakes; all of it ends when this is dropped.
pub struct World {
    pub folder: tempfile::TempDir,
    pub proxy: Child,
    pub address: SocketAddr,
    pub answers: Arc<Answers>,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.proxy.kill();
        let _ = self.proxy.wait();
    }
}

impl World {
    pub async fn new() -> Self {
        Self::with(&["--domain", "box.dev"]).await
    }

    /// Port 80 of the sandbox is this guest's, in generation 1.
    pub async fn leading_to(guest: SocketAddr) -> Self {
        let world = Self::new().await;
        world.answers.set(ID, 80, target(guest, 1));
        world
    }

    pub async fn with(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let answers = Arc::new(Answers::default());
        start_resolver(&folder.path().join("internal.sock"), Arc::clone(&answers));
        let path = |name: &str| folder.path().join(name).into_os_string();
        let proxy = Command::new(env!("CARGO_BIN_EXE_aenv-proxy"))
            .args(["--listen", "127.0.0.1:0"])
            .args([
                "--api".into(),
                path("api.sock"),
                "--resolver".into(),
                path("internal.sock"),
            ])
            .args(["--control".into(), path("proxy.sock")])
            .args(options)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let address = wait_for_listener(&folder.path().join("proxy.sock")).await;
        Self {
            folder,
            proxy,
            address,
            answers,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A new connection on which this was sent.
    pub async fn send(&self, request: &str) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Sends a whole request on a new connection and reads the whole answer.
    pub async fn ask(&self, request: &str) -> Reply {
        let mut stream = self.send(request).await;
        read_reply(&mut stream).await
    }

    pub async fn get(&self, id: &str, port: u16, path: &str) -> Reply {
        self.ask(&get_request(id, port, path)).await
    }

    pub async fn control(&self, method: &str, path: &str, body: &str) -> serde_json::Value {
        control(&self.path("proxy.sock"), method, path, body).await.unwrap()
    }

    pub async fn withdraw(&self, generation: u64) -> serde_json::Value {
        self.control("POST", "/withdraw", &format!(r#"{{"generations":[{generation}]}}"#))
            .await
    }

    pub fn memory_kib(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.proxy.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

async fn wait_for_listener(socket: &Path) -> SocketAddr {
    soon(async {
        loop {
            if let Ok(health) = control(socket, "GET", "/health", "").await {
                return health["listen"].as_str().unwrap().parse().unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

pub async fn control(socket: &Path, method: &str, path: &str, body: &str) -> io::Result<serde_json::Value> {
    let mut stream = UnixStream::connect(socket).await?;
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: proxy\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let reply = read_reply(&mut stream).await;
    Ok(serde_json::from_str(&reply.body).unwrap())
}

fn start_resolver(socket: &Path, answers: Arc<Answers>) {
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answers = Arc::clone(&answers);
            tokio::spawn(async move {
                while let Some(request) = read_request(&mut stream).await {
                    // The answer is fixed when the question comes, and may be sent much later.
                    let body = answers.find(&request.body);
                    let gate = answers.gate.lock().unwrap().clone();
                    if let Some(gate) = gate {
                        gate.acquire().await.unwrap().forget();
                    }
                    if stream.write_all(ok(&body).as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
}

/// Some ports of the sandbox that echo.
pub async fn with_echo() -> World {
    let world = World::new().await;
    let guest = echo_guest().await;
    for port in [80, 8080, 49983] {
        world.answers.set(ID, port, target(guest, 1));
    }
    world
}

/// Waits until a condition of the proxy holds that nothing announces.
pub async fn until<Fut: Future<Output = bool>>(mut condition: impl FnMut() -> Fut) {
    soon(async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}
