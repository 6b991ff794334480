//! A small S3 server for tests: objects in memory, ranges, and misbehaviour on request. And blobs made for it.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aenv_layers::{ZFileOptions, ZFileWriter};
use aenv_store::{BlockListBuilder, Cipher, Descriptor, Digest, EncryptWriter, Encryption, Source};
use aenv_wire::block::{ImportRaw, ImportRawOk, Operation};

use super::{Daemons, Random};

/// How the store answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mode {
    Good,
    /// Holds every request until the mode changes.
    Silent,
    Unavailable,
    /// Every body has one wrong bit.
    Wrong,
    /// Every body ends early.
    Truncated,
}

/// What the stored bytes of a layer are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    Plain,
    /// Compressed, and verified by nothing but its own checksums.
    UnlistedZFile,
    EncryptedZFile,
}

const KEY_HEX: &str = "0707070707070707070707070707070707070707070707070707070707070707";

impl Form {
    fn of(self, layer: Vec<u8>) -> Vec<u8> {
        if self == Form::Plain {
            return layer;
        }
        let mut writer = ZFileWriter::new(Vec::new(), ZFileOptions::default()).unwrap();
        writer.append(&layer).unwrap();
        let (compressed, _) = writer.finish().unwrap();
        if self == Form::UnlistedZFile {
            return compressed;
        }
        let cipher = Cipher::new([7; 32]);
        let mut encrypted = EncryptWriter::new(&cipher, Digest::of(&compressed), Vec::new()).unwrap();
        encrypted.write_all(&compressed).unwrap();
        encrypted.finish().unwrap()
    }
}

#[derive(Debug)]
struct Shared {
    objects: Mutex<HashMap<String, Arc<Vec<u8>>>>,
    mode: Mutex<Mode>,
    latency: Duration,
    stop: AtomicBool,
    requests: AtomicU64,
}

/// The server; its threads end when it is dropped.
#[derive(Debug)]
pub struct TestStore {
    shared: Arc<Shared>,
    port: u16,
}

impl TestStore {
    pub fn start(latency: Duration) -> TestStore {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            objects: Mutex::default(),
            mode: Mutex::new(Mode::Good),
            latency,
            stop: AtomicBool::new(false),
            requests: AtomicU64::new(0),
        });
        let serving = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if serving.stop.load(Ordering::Relaxed) {
                    return;
                }
                let shared = serving.clone();
                std::thread::spawn(move || shared.converse(stream));
            }
        });
        TestStore { shared, port }
    }

    pub fn turn(&self, mode: Mode) {
        *self.shared.mode.lock().unwrap() = mode;
    }

    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    pub fn put(&self, key: &str, bytes: Vec<u8>) {
        self.shared
            .objects
            .lock()
            .unwrap()
            .insert(format!("/b/{key}"), Arc::new(bytes));
    }

    pub fn configuration(&self) -> String {
        format!(
            r#"{{"stores":{{"repository":{{"kind":"s3","bucket":"b","region":"r","endpoint":"http://127.0.0.1:{}",
            "addressing":"path","access_key_id":"id","secret_access_key":"secret","allow_http":true}}}},"encryption_key":"{KEY_HEX}"}}"#,
            self.port
        )
    }

    /// A pair of daemons that reaches this store, with a cache of so many bytes.
    pub fn daemons(&self, cache_bytes: u64, options: &[&str]) -> Daemons {
        let folder = tempfile::Builder::new().prefix("blockd").tempdir().unwrap();
        let text = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        std::fs::write(text("stores.json"), self.configuration()).unwrap();
        let (stores, cache, size) = (text("stores.json"), text("cache"), cache_bytes.to_string());
        let mut all = vec![
            "--stores",
            &stores,
            "--cache-dir",
            &cache,
            "--cache-size-bytes-max",
            &size,
        ];
        all.extend(options);
        Daemons::start_in(folder, &all, &[])
    }

    /// Makes a layer of an image, puts it and its block list into the store, and writes its descriptor. Returns the
    /// descriptor's path and the layer's own file.
    pub fn publish(&self, daemons: &Daemons, name: &str, image: &[u8]) -> (String, String) {
        self.publish_as(daemons, name, image, Form::Plain)
    }

    pub fn publish_as(&self, daemons: &Daemons, name: &str, image: &[u8], form: Form) -> (String, String) {
        let (raw, layer) = (
            daemons.text(&format!("{name}.raw")),
            daemons.text(&format!("{name}.lsmt")),
        );
        std::fs::write(&raw, image).unwrap();
        daemons.client().ask::<ImportRawOk>(Operation::ImportRaw(ImportRaw {
            source: raw,
            into: layer.clone(),
        }));
        let bytes = form.of(std::fs::read(&layer).unwrap());
        let mut builder = BlockListBuilder::new();
        builder.update(&bytes);
        let list = builder.finish();
        let source = |key: String| Source::Object {
            store: "repository".to_owned(),
            key,
        };
        let blocks = (source(format!("layers/{name}.blocks")), list.digest());
        let place = source(format!("layers/{name}.lsmt"));
        let (blocks, encryption) = match form {
            Form::Plain => (Some(blocks), None),
            Form::UnlistedZFile => (None, None),
            Form::EncryptedZFile => (Some(blocks), Some(Encryption::Aes256Gcm)),
        };
        let descriptor = Descriptor::new(Digest::of(&bytes), bytes.len() as u64, place, blocks, encryption);
        self.put(&format!("layers/{name}.blocks"), list.encode());
        self.put(&format!("layers/{name}.lsmt"), bytes);
        let path = daemons.text(&format!("{name}.blob"));
        std::fs::write(&path, descriptor.encode()).unwrap();
        (path, layer)
    }
}

impl Drop for TestStore {
    fn drop(&mut self) {
        self.turn(Mode::Unavailable);
        self.shared.stop.store(true, Ordering::Relaxed);
        // Wakes the listener, which ends.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Bytes that nothing repeats in.
pub fn random_image(seed: u64, bytes: u64) -> Vec<u8> {
    let mut image = vec![0; usize::try_from(bytes).unwrap()];
    Random::new(seed).fill(&mut image);
    image
}

impl Shared {
    fn converse(&self, stream: TcpStream) {
        let Ok(mut writer) = stream.try_clone() else { return };
        let mut reader = BufReader::new(stream);
        loop {
            let mut lines = Vec::new();
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 {
                    return;
                }
                match line.trim_end() {
                    "" => break,
                    text => lines.push(text.to_owned()),
                }
            }
            if self.answer(&lines, &mut writer).is_err() {
                return;
            }
        }
    }

    fn answer(&self, lines: &[String], writer: &mut TcpStream) -> std::io::Result<()> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.latency);
        let held = Instant::now();
        while *self.mode.lock().unwrap() == Mode::Silent && held.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(2));
        }
        let mode = *self.mode.lock().unwrap();
        let key = lines[0].split(' ').nth(1).unwrap_or_default();
        let object = self.objects.lock().unwrap().get(key).cloned();
        let Some(object) = object else {
            return writer.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
        };
        if mode == Mode::Unavailable {
            return writer.write_all(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n");
        }
        let range = lines.iter().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let (first, last) = value.trim().strip_prefix("bytes=")?.split_once('-')?;
            name.eq_ignore_ascii_case("range")
                .then(|| Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?)))?
        });
        let (status, first, last) = match range {
            Some((first, last)) => ("206 Partial Content", first, last.min(object.len() - 1)),
            None => ("200 OK", 0, object.len() - 1),
        };
        let mut body = object[first..=last].to_vec();
        let mut head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: \"tag\"\r\nLast-Modified: Sun, 29 Nov 2026 10:00:00 GMT\r\n",
            body.len()
        );
        if range.is_some() {
            head.push_str(&format!("Content-Range: bytes {first}-{last}/{}\r\n", object.len()));
        }
        head.push_str("\r\n");
        writer.write_all(head.as_bytes())?;
        match mode {
            Mode::Wrong => {
                let middle = body.len() / 2;
                body[middle] ^= 4;
            }
            Mode::Truncated => {
                writer.write_all(&body[..body.len() / 2])?;
                return Err(std::io::ErrorKind::BrokenPipe.into());
            }
            _ => {}
        }
        writer.write_all(&body)
    }
}
