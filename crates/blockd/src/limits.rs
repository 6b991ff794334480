//! Every limit of blockd, with its unit in its name and its reason beside it.

use std::time::Duration;

/// Exports at a time over both mounts; each holds descriptors for its layers, and `nofile` is finite.
pub const EXPORTS_MAX: usize = 8192;

/// Bytes of an export's name; it is a file name on the mount and of its record.
pub const NAME_BYTES_MAX: usize = 128;

/// Layers under one export; the format's own chain limit.
pub const LAYERS_MAX: usize = 255;

/// Largest export in bytes: an upper's data and index must fit in one file of the host.
pub const SIZE_BYTES_MAX: u64 = aenv_layers::MAX_UPPER_BYTES;

/// Disks are read and written in sectors, memory in pages.
pub const SECTOR_BYTES: u64 = 512;
pub const PAGE_BYTES: u64 = 4096;

/// Bytes of one READ or WRITE: what 256 pages of `max_pages` carry.
pub const TRANSFER_BYTES_MAX: usize = 1 << 20;
pub const TRANSFER_PAGES_MAX: u16 = 256;

/// Requests that the kernel may have in flight in the background per mount. The kernel's default of 12 would let one
/// slow export hold up all others.
pub const BACKGROUND_REQUESTS_MAX: u16 = 512;
pub const CONGESTION_REQUESTS: u16 = 384;

/// Threads per mount that answer at rest, unless `--serve-threads` says otherwise.
pub const SERVE_THREADS_DEFAULT: usize = 4;

/// Threads per mount at most. More are started only when all are inside a handler.
pub const SERVE_THREADS_MAX: usize = 64;

/// Small local reads of a mount under way without a thread each, unless `--ring-reads` says otherwise; and at most. What is
/// beyond takes a thread.
pub const RING_READS_DEFAULT: usize = 64;
pub const RING_READS_MAX: usize = 1024;

/// Bytes of such a read, and the pieces of files that it may consist of.
pub const RING_READ_BYTES_MAX: usize = 64 << 10;
pub const RING_PIECES_MAX: usize = 16;

/// Bytes of the largest request, a WRITE with its headers; of one that is copied for a thread rather than handed over in
/// its buffer; of all that wait for a thread or are with one; and how many buffers of the first size are kept.
pub const REQUEST_BYTES_MAX: usize = TRANSFER_BYTES_MAX + 4096;
pub const COPIED_REQUEST_BYTES_MAX: usize = 32 << 10;
pub const QUEUED_BYTES_MAX: usize = 64 << 20;
pub const SPARE_REQUEST_BUFFERS_MAX: usize = 16;

/// How long a thread must have been idle among others before it ends: longer than the pauses of a busy guest.
pub const SURPLUS_WINDOW: Duration = Duration::from_secs(3);

/// Bytes of used buffers that the threads of one mount keep between requests; each thread may need two transfers.
pub const BUFFER_BYTES_KEPT: usize = 24 << 20;

/// Threads of a mount inside handlers of *one* export. Further requests of it are parked, so that one slow file
/// leaves most threads to the others.
pub const RUNNING_PER_EXPORT_MAX: usize = 16;

/// Bytes of parked requests per export; beyond it a request takes a thread after all.
pub const PARKED_BYTES_MAX: usize = 32 << 20;

/// Bytes of one export that were written and that the disk does not have: how many it takes for write-back to begin, how
/// many it leaves, and how many keep the answers to further writes back. Enough to write a hot block once and to sort small
/// writes; little before a pause that is to be durable.
pub const DIRTY_BYTES_BEGIN: u64 = 64 << 20;
pub const DIRTY_BYTES_END: u64 = 32 << 20;
pub const DIRTY_BYTES_MAX: u64 = 256 << 20;

/// What they are counted in.
pub const DIRTY_PIECE_BYTES: u64 = 256 << 10;

/// Bytes that the disk is asked to take at a time: enough to keep it busy; and while somebody reads, who waits so long.
pub const BATCH_BYTES: u64 = 8 << 20;
pub const BATCH_BESIDE_READS_BYTES: u64 = 1 << 20;

/// How long after a read the disk is shared with reads; how often a batch's own time it is then left alone after it, and
/// how long at most.
pub const READS_WINDOW: Duration = Duration::from_millis(50);
pub const REST_FACTOR: u32 = 2;
pub const REST_MAX: Duration = Duration::from_millis(50);

/// How long a write waits for room on the host's disk before the guest gets the error, and how often it looks. Long
/// enough for a person or a collection to make room; well below the 120 s after which a guest's kernel complains of a hang.
pub const FULL_DISK_WAIT: Duration = Duration::from_secs(60);
pub const FULL_DISK_RETRY: Duration = Duration::from_millis(200);

/// Connections to the control socket, and operations that run at a time over all of them.
pub const CONNECTIONS_MAX: usize = 128;
pub const OPERATIONS_MAX: usize = 64;

/// Captures at a time (started and neither finished nor cancelled).
pub const CAPTURES_MAX: usize = 64;

/// Memory in bytes for dirty pages of captures with hold "buffer", over all of them, unless
/// `--capture-buffer-bytes-max` says otherwise.
pub const CAPTURE_BUFFER_BYTES_MAX_DEFAULT: u64 = 2 << 30;

/// Bytes of a process's memory read by one call: long enough to be fast, short enough for a prompt cancel.
pub const CAPTURE_CHUNK_BYTES: usize = 4 << 20;

/// How long an operation that must not overlap waits for the one before it.
pub const BUSY_WAIT: Duration = Duration::from_secs(5);

/// How long a new daemon waits for the lock of one that has just been killed.
pub const LOCK_WAIT: Duration = Duration::from_secs(10);

/// Pause before the control socket is tried again.
pub const CONTROL_RETRY: Duration = Duration::from_secs(1);

/// How long the keeper waits for blockd to end by itself before it kills it.
pub const STOP_WAIT: Duration = Duration::from_secs(5);

/// A daemon that lived shorter than this counts as failing at start.
pub const SHORT_LIFE: Duration = Duration::from_secs(1);

/// Restarts at once before the back-off begins, and its bounds.
pub const IMMEDIATE_RESTARTS: u32 = 4;
pub const BACKOFF_FIRST: Duration = Duration::from_millis(50);
pub const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// Bytes of stack per thread: handlers are shallow and hold their buffers on the heap.
pub const STACK_BYTES: usize = 256 << 10;

/// How long a read of a memory image waits for a store that does not answer, unless `--memory-outage-s` says otherwise.
/// An error on a page kills the VMM, so it is longer than a disk's, whose guest can live with an error.
pub const MEMORY_OUTAGE_DEFAULT: Duration = Duration::from_secs(600);
pub const MEMORY_OUTAGE_S_MAX: u64 = 86_400;

/// The same for disks: below the 120 s after which a guest's kernel complains of a hang.
pub const DISK_OUTAGE: Duration = Duration::from_secs(60);

/// Smallest cache: readers, prefetch and fill each need room for what they are fetching.
pub const CACHE_SIZE_BYTES_MIN: u64 = 16 << 20;

/// Threads of a mount inside handlers of exports with remote layers; the rest always serves local ones. And the bytes of
/// such requests that wait for one of them.
pub const REMOTE_RUNNING_MAX: usize = SERVE_THREADS_MAX - 16;
pub const REMOTE_WAITING_BYTES_MAX: usize = 64 << 20;

/// How long an operation of the control socket waits for a store: less than the 30 s that its client waits for it.
pub const OPERATION_OUTAGE: Duration = Duration::from_secs(25);

/// Descriptors opened at a time for a prefetch or a fill; each may cost a request for its block list.
pub const PREPARE_THREADS_MAX: usize = 16;

/// Blobs in an answer of `cache`, which must fit in a frame.
pub const BLOBS_LISTED_MAX: usize = 4096;
