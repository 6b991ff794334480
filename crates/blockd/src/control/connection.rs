//! Connections to the control socket.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aenv_wire::block::{ErrorKind, Request, encode_error, read_frame, write_frame};

use super::Daemon;
use crate::limits::{CONNECTIONS_MAX, OPERATIONS_MAX};

/// How long an answer may take to go out: a client that does not read loses its connection, not our threads.
const WRITE_WAIT: Duration = Duration::from_secs(10);

/// Binds the socket in place of a dead one. The new socket gets the name in one step, so that a client finds either
/// the old one, which refuses, or the new one, which answers.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let temporary = crate::files::sibling(path, ".new");
    crate::files::remove_if_there(&temporary)?;
    let listener = UnixListener::bind(&temporary)?;
    rustix::fs::chmod(&temporary, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    std::fs::rename(&temporary, path)?;
    Ok(listener)
}

impl Daemon {
    /// Serves the socket for as long as the process lives.
    pub fn serve(self: &Arc<Self>, listener: &UnixListener) {
        let connections = Arc::new(AtomicUsize::new(0));
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // Out of descriptors: without a pause this would spin until some are free.
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            if connections.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
                say!("aenv-blockd: more than {CONNECTIONS_MAX} control connections: one is refused");
                continue;
            }
            connections.fetch_add(1, Ordering::Relaxed);
            let (daemon, count) = (self.clone(), connections.clone());
            let served = spawn("control", move || {
                daemon.converse(stream);
                count.fetch_sub(1, Ordering::Relaxed);
            });
            if served.is_err() {
                connections.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn converse(self: &Arc<Self>, mut stream: UnixStream) {
        let writer = stream.try_clone().and_then(|writer| {
            writer.set_write_timeout(Some(WRITE_WAIT))?;
            Ok(Arc::new(Mutex::new(writer)))
        });
        let Ok(writer) = writer else { return };
        loop {
            match read_frame(&mut stream) {
                Ok(Some(body)) => self.take(&body, &writer),
                Ok(None) => return,
                Err(error) => {
                    say!("aenv-blockd: a control connection ends: {error}");
                    return;
                }
            }
        }
    }

    fn take(self: &Arc<Self>, body: &[u8], writer: &Arc<Mutex<UnixStream>>) {
        let request = match Request::decode(body) {
            Ok(request) => request,
            Err(error) => {
                let id = error.id.unwrap_or(0);
                return send(writer, &encode_error(id, ErrorKind::Invalid, &error.to_string()));
            }
        };
        if Daemon::is_immediate(&request.operation) {
            return send(writer, &self.carry_out(request));
        }
        let id = request.id;
        let running = self.operations.fetch_add(1, Ordering::Relaxed);
        if running >= OPERATIONS_MAX && !Daemon::is_always_admitted(&request.operation) {
            self.operations.fetch_sub(1, Ordering::Relaxed);
            let message = format!("{OPERATIONS_MAX} operations are running");
            return send(writer, &encode_error(id, ErrorKind::Busy, &message));
        }
        let (daemon, answers) = (self.clone(), writer.clone());
        let started = spawn("operation", move || {
            let answer = daemon.carry_out(request);
            daemon.operations.fetch_sub(1, Ordering::Relaxed);
            send(&answers, &answer);
        });
        if let Err(error) = started {
            self.operations.fetch_sub(1, Ordering::Relaxed);
            send(
                writer,
                &encode_error(id, ErrorKind::Busy, &format!("no thread can be started: {error}")),
            );
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // Operations merge and import layers: more stack than the handlers of guests' requests.
    std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(1 << 20)
        .spawn(work)
        .map(|_| ())
}

fn send(writer: &Mutex<UnixStream>, body: &[u8]) {
    let mut stream = writer.lock().unwrap_or_else(PoisonError::into_inner);
    if write_frame(&mut *stream, body).is_err() {
        // Half a frame may be out: nothing after it could be read. The reader of this connection ends with it.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
}
