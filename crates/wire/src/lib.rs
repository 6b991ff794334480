//! Messages that the daemons exchange with the server. Shapes only: no transport, no behaviour.

pub mod block;
pub mod route;
