//! The control socket: connections, and carrying out what they ask.
//!
//! Owns the socket and the translation of errors into the protocol's kinds. Every connection has a thread that reads
//! requests. What is done in no time (hello, lists) is done right there; everything else runs on a thread of its own and
//! answers when it is done. `OPERATIONS_MAX` of them run at a time; what ends something (abandon, cancel) always may.

mod connection;
mod dispatch;
mod layers;
mod refusal;

pub use connection::listen;
pub use dispatch::Daemon;
pub use refusal::{Refusal, chain};
