//! The proxy in front of a node: one listener for the API and for every port of every sandbox.
//!
//! It decides nothing. Where a sandbox is, and what must be checked, the server says (`directory`); the proxy keeps the
//! answer until the server withdraws its *generation* (one run of one sandbox), and then resets everything that carries
//! it (`generation`). A restart of the server cuts no stream to a guest.
//!
//! ```text
//! client -> serve -> route (pure) -> sandbox -> directory -> generation -> pool -> guest
//!                                 \-> api    -> pool -> server's Unix socket
//! server -> control -> directory (withdraw, live)
//! ```

/// One line on stderr. Not `eprintln!`, which ends the process when it cannot write: the log lies on the same disk as the
/// guests' data, and a full one must not take the daemon with it.
macro_rules! say {
    ($($what:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($what)*);
    }};
}

pub mod answer;
pub mod api;
pub mod args;
pub mod body;
pub mod client;
pub mod control;
pub mod directory;
pub mod exchange;
pub mod generation;
pub mod head;
pub mod internal;
pub mod limits;
pub mod listen;
pub mod outage;
pub mod pass;
pub mod pool;
pub mod resolver;
pub mod route;
pub mod sandbox;
pub mod serve;
pub mod socket;
pub mod tunnel;
pub mod upload;
pub mod withdrawn;
