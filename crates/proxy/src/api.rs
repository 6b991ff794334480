//! Requests for the API: everything that names no sandbox goes to the server's Unix socket.

use std::sync::Arc;

use hyper::StatusCode;

use crate::answer::{self, Form, Reply};
use crate::client::Client;
use crate::exchange::ExchangeError;
use crate::head;
use crate::pass::{Inbound, pass};
use crate::pool::Pool;
use crate::sandbox::chain;

/// Passes a request to the server; 503 while there is none.
pub async fn answer(api: &Arc<Pool>, client: &Arc<Client>, mut inbound: Inbound) -> Reply {
    let form = Form::wanted(&inbound.head.headers);
    head::add_forwarded_for(&mut inbound.head.headers, client.peer.ip());
    match pass(api, client, &mut inbound, None).await {
        Ok(reply) => reply,
        Err(ExchangeError::Connect(error)) => {
            eprintln!("proxy: API server unreachable: {}", chain(&error));
            answer::unavailable(form, "the API server is not running; retry")
        }
        // It may have done what was asked, so nobody is told to retry blindly.
        Err(ExchangeError::Broken(error)) => {
            eprintln!("proxy: API server broke off: {}", chain(&error));
            answer::plain(form, StatusCode::BAD_GATEWAY, "the API server broke off before it answered")
        }
    }
}
