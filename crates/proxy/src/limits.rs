//! Every limit of the proxy, with its unit and its reason.

use std::time::Duration;

/// Port of the daemon inside each guest; the default of header routing and never behind a traffic token.
pub const ENVD_PORT: u16 = 49983;

/// Client connections at once; the rest is answered 503 and closed. Also bounded by the descriptors we may open.
pub const CONNECTIONS_MAX: usize = 16_384;
/// Descriptors kept for sockets to the server, the control socket, logs and the runtime.
pub const DESCRIPTORS_RESERVED: usize = 64;

/// One request or response head. Browsers and SDKs stay under 16 KiB; long cookies need the rest.
pub const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Header lines of one head.
pub const HEAD_LINES_MAX: usize = 128;
/// hyper's read and write buffer per connection; a head must fit in it.
pub const BUFFER_BYTES_MAX: usize = 128 * 1024;

/// From the first byte of a request head to its last (slow senders are cut off).
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(20);
/// A client's keep-alive connection between two requests. Longer than the SDKs keep theirs, so they close first.
pub const CLIENT_IDLE_TIMEOUT: Duration = Duration::from_secs(620);
/// How often idle and slow connections are looked for; the two limits above are exact to this.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(2);

/// TCP connect to a guest. Generous, because a software-emulated guest under load answers its SYN late.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// One resolve, which may resume a sandbox.
pub const RESOLVE_TIMEOUT: Duration = Duration::from_secs(120);
/// Times that an answer of an already withdrawn generation is asked for again.
pub const RESOLVE_ATTEMPTS_MAX: u32 = 3;
/// Resolves under way at once.
pub const RESOLVES_MAX: usize = 4_096;
/// Body of a resolver answer.
pub const RESOLVE_ANSWER_BYTES_MAX: usize = 64 * 1024;
/// Cached (sandbox, port) answers; beyond it an arbitrary one is forgotten and asked for again.
pub const ROUTES_MAX: usize = 65_536;
/// Ranges of withdrawn generations that are remembered; beyond it gaps that hold nothing live are closed.
pub const WITHDRAWN_RANGES_MAX: usize = 16_384;

/// Idle connections kept to one port of one sandbox run.
pub const GUEST_IDLE_MAX: usize = 32;
/// Age of an idle connection to a guest.
pub const GUEST_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Idle connections kept to the server.
pub const SERVER_IDLE_MAX: usize = 64;
/// Age of an idle connection to the server; uvicorn closes its own after 5 s.
pub const SERVER_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// For a connection that was just given back to become usable; normally microseconds.
pub const RETURN_TIMEOUT: Duration = Duration::from_millis(5);
/// A request that must not run twice takes an idle connection only this young: servers close idle connections after
/// seconds (2 s and more), and a fresh connection costs less than a request of unknown fate.
pub const UNREPEATABLE_IDLE_MAX: Duration = Duration::from_millis(1000);

/// Of a request body on a reused connection, so that it can be sent again when that turns out to be closed.
pub const KEPT_BYTES_MAX: usize = 64 * 1024;

/// How long a request with `Expect: 100-continue` waits for the guest's word before its body is sent anyway.
pub const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);
/// From the 101 answer to both sides being raw tunnels.
pub const UPGRADE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes moved by one read of a tunnel.
pub const TUNNEL_CHUNK_BYTES: usize = 64 * 1024;

/// Body of a request on the control socket.
pub const CONTROL_BODY_BYTES_MAX: usize = 4 * 1024 * 1024;
/// From a shutdown request to the end of the process, for answers under way.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// Pause of the accept loop when descriptors run out.
pub const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);
