//! Every limit of the cache, with its unit in its name and its reason beside it.

use std::time::Duration;

/// Largest block of a blob in bytes: a list of digests with larger ones would make every miss expensive.
pub const BLOCK_BYTES_MAX: u64 = 4 << 20;

/// Largest blob in bytes: its map must fit in memory.
pub const BLOB_BYTES_MAX: u64 = 16 << 40;

/// Bytes of one request of a reader to a store, and of one in the background. Smaller there: a reader that needs one
/// block of it waits for the whole.
pub const FETCH_BYTES_MAX: u64 = 4 << 20;
pub const BACKGROUND_FETCH_BYTES_MAX: u64 = 1 << 20;

/// Largest window of a sequential reader in bytes, and the first one.
pub const READ_AHEAD_BYTES_MAX: u64 = 4 << 20;
pub const READ_AHEAD_BYTES_FIRST: u64 = 256 << 10;

/// A window takes at most this part of the cache: one in so many.
pub const READ_AHEAD_SHARE: u64 = 8;

/// Sequential readers that are told apart per blob.
pub const STREAMS_MAX: usize = 8;

/// Requests to stores in the background at a time; threads, since requests block.
pub const BACKGROUND_THREADS_MAX: usize = 16;

/// How long a background thread waits for work before it ends.
pub const BACKGROUND_IDLE: Duration = Duration::from_secs(2);

/// Pieces that wait for a background thread; a hint beyond that is dropped, a trace waits.
pub const READ_AHEAD_QUEUE_MAX: usize = 1024;

/// Blocks of a trace: 64 GiB at 64 KiB.
pub const TRACE_BLOCKS_MAX: usize = 1 << 20;
pub const TRACES_MAX: usize = 64;

/// Bytes of a trace's file.
pub const TRACE_FILE_BYTES_MAX: u64 = 64 << 20;

/// Runs of a trace within which order gives way to larger requests, and blocks in between that are fetched with them.
pub const TRACE_WINDOW_RUNS: usize = 64;
pub const TRACE_GAP_BLOCKS_MAX: u64 = 1;

/// One attempt at a store: this long, and longer by what a slow line needs for its bytes.
pub const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(8);
/// The last attempt of a reader whose time is over: long enough for an answer that is on its way already.
pub const ATTEMPT_TIMEOUT_MIN: Duration = Duration::from_millis(20);
pub const LINE_BYTES_PER_S_MIN: u64 = 512 << 10;

/// Pause before the next attempt: doubled each time, half of it at random, so that readers do not come all at once.
pub const BACKOFF_FIRST: Duration = Duration::from_millis(50);
pub const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// Attempts that fail for good (not there, not allowed) before it is believed.
pub const REFUSALS_MAX: u32 = 3;

/// Attempts at a block whose bytes are wrong.
pub const WRONG_BYTES_MAX: u32 = 3;

/// Attempts of a prefetch at one piece: readers come for what it leaves out.
pub const PREFETCH_ATTEMPTS_MAX: u32 = 2;

/// How often someone who waits looks whether it is still wanted.
pub const CANCEL_LOOK: Duration = Duration::from_millis(50);

/// A read that took this long counts as a stall, as does one of which an attempt failed.
pub const STALL: Duration = Duration::from_secs(1);

/// Parts of the limit, in percent: eviction begins above the first and ends at the second.
pub const HIGH_WATERMARK_PERCENT: u64 = 95;
pub const LOW_WATERMARK_PERCENT: u64 = 88;

/// Turns of the clock over everything that one eviction makes: the first may only find blocks in use.
pub const CLOCK_TURNS_MAX: usize = 3;
