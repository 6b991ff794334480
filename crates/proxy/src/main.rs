//! Starts the proxy: sockets first, then one runtime with two threads until it is told to stop.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use aenv_proxy::api::Api;
use aenv_proxy::args::{Args, USAGE};
use aenv_proxy::client::Clients;
use aenv_proxy::control::{self, BindError, Control};
use aenv_proxy::directory::Directory;
use aenv_proxy::listen;
use aenv_proxy::resolver::Resolver;
use aenv_proxy::sandbox::chain;
use aenv_proxy::serve::Front;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

/// Guests are few and connections many: two threads move more than a node's network can.
const WORKER_THREADS: usize = 2;

#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("cannot start the runtime")]
    Runtime(#[source] std::io::Error),
    #[error("cannot listen on {address}")]
    Listen {
        address: std::net::SocketAddr,
        source: std::io::Error,
    },
    #[error("{path}")]
    Control { path: String, source: BindError },
    #[error("cannot wait for signals")]
    Signals(#[source] std::io::Error),
}

fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("aenv-proxy: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match start(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("aenv-proxy: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn start(args: Args) -> Result<(), StartError> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(WORKER_THREADS).enable_io().enable_time().build();
    let runtime = runtime.map_err(StartError::Runtime)?;
    let result = runtime.block_on(run(args));
    // Streams that outlived their grace end with the process.
    runtime.shutdown_background();
    result
}

async fn run(args: Args) -> Result<(), StartError> {
    let address = args.listen;
    let control_error = |source| StartError::Control {
        path: args.control.display().to_string(),
        source,
    };
    let control_listener = control::bind(&args.control).map_err(control_error)?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| StartError::Listen { address, source })?;
    let listen = listener
        .local_addr()
        .map_err(|source| StartError::Listen { address, source })?
        .to_string();
    let connections_max = listen::connections_max(args.connections_max);
    let clients = Clients::new(connections_max);
    let directory = Directory::new(Resolver::new(args.resolver));
    let shutdown = Arc::new(Notify::new());
    stop_on_signals(&shutdown)?;
    let front = Arc::new(Front {
        domain: args.domain,
        directory: Arc::clone(&directory),
        api: Api::new(args.api),
    });
    eprintln!("proxy: listening on {listen}, at most {connections_max} connections");
    let control = Control {
        listen,
        directory,
        clients: Arc::clone(&clients),
        shutdown: Arc::clone(&shutdown),
    };
    tokio::spawn(control::serve(control_listener, Arc::new(control)));
    listen::serve(listener, front, clients, shutdown).await;
    remove_socket(&args.control);
    eprintln!("proxy: stopped");
    Ok(())
}

/// SIGTERM and SIGINT mean the same as a shutdown request.
fn stop_on_signals(shutdown: &Arc<Notify>) -> Result<(), StartError> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut arrivals = signal(kind).map_err(StartError::Signals)?;
        let shutdown = Arc::clone(shutdown);
        tokio::spawn(async move {
            arrivals.recv().await;
            shutdown.notify_one();
        });
    }
    Ok(())
}

fn remove_socket(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        eprintln!("proxy: cannot remove {}: {error}", path.display());
    }
}
