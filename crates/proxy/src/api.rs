//! Requests for the API: everything that names no sandbox goes to the server's Unix socket.

use std::path::PathBuf;
use std::sync::Arc;

use hyper::StatusCode;

use crate::answer::{self, Form, Reply};
use crate::client::Client;
use crate::exchange::ExchangeError;
use crate::head;
use crate::outage::Outage;
use crate::pass::{Inbound, pass};
use crate::pool::{Peer, Pool};
use crate::sandbox::chain;

/// The way to the server's API.
#[derive(Debug)]
pub struct Api {
    pool: Arc<Pool>,
    outage: Outage,
}

impl Api {
    pub fn new(socket: PathBuf) -> Self {
        Self {
            pool: Pool::new(Peer::Server(socket)),
            outage: Outage::of("the API server"),
        }
    }

    /// Drops idle connections that are too old.
    pub fn sweep(&self) {
        self.pool.sweep();
    }
}

/// Passes a request to the server; 503 while there is none.
pub async fn answer(api: &Api, client: &Arc<Client>, mut inbound: Inbound) -> Reply {
    let form = Form::wanted(&inbound.head.headers);
    head::add_forwarded_for(&mut inbound.head.headers, client.peer.ip());
    match pass(&api.pool, client, &mut inbound, None).await {
        Ok(reply) => {
            api.outage.end();
            reply
        }
        Err(ExchangeError::Connect(error)) => {
            api.outage.begin(&error);
            answer::unavailable(form, "the API server is not running; retry")
        }
        // It may have done what was asked, so nobody is told to retry blindly.
        Err(ExchangeError::Broken(error)) => {
            say!("proxy: API server broke off: {}", chain(&error));
            answer::plain(
                form,
                StatusCode::BAD_GATEWAY,
                "the API server broke off before it answered",
            )
        }
    }
}
