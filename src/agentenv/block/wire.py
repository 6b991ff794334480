"""The messages of blockd's control socket (spec/wire/block.md), and nothing that acts on them.

A frame is a little-endian u32 with the length of the JSON text that follows. The golden bytes in
spec/wire/block.golden hold for this module and for `crates/wire`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, Literal, TypeVar

import msgspec

FRAME_BYTES_MAX: Final = 1 << 20
HEADER: Final = struct.Struct("<I")

Hold = Literal["buffer", "process"]
ExportKind = Literal["memory", "disk"]


class Operation(msgspec.Struct, frozen=True, tag_field="op"):
    """Base of all requests. Sizes and lengths are bytes, paths absolute."""


class HelloRequest(Operation, frozen=True, tag="hello"):
    """Who answers, and where its mounts are."""


class ExportMemory(Operation, frozen=True, tag="export_memory"):
    """A read-only file on the memory mount; layers bottom first."""

    name: str
    size_bytes: int
    layers: tuple[str, ...]


class ExportDisk(Operation, frozen=True, tag="export_disk"):
    """A writable file on the disk mount; layers bottom first, under one upper."""

    name: str
    size_bytes: int
    layers: tuple[str, ...]
    upper: str


class Unexport(Operation, frozen=True, tag="unexport"):
    """Remove an export that no process uses any more."""

    name: str


class Abandon(Operation, frozen=True, tag="abandon"):
    """Answer everything of an export with an error, now and from now on."""

    name: str


class ListExports(Operation, frozen=True, tag="exports"):
    """All exports."""


class SealDisk(Operation, frozen=True, tag="seal_disk"):
    """The upper becomes a layer, and `new_upper` the upper."""

    name: str
    new_upper: str | None


class SyncPaths(Operation, frozen=True, tag="sync"):
    """Make files and their directory entries durable."""

    paths: tuple[str, ...]


class CaptureStart(Operation, frozen=True, tag="capture_start", omit_defaults=True):
    """Find (and hold) the pages that a stopped process wrote to its mapping of an image."""

    job: str
    pid: int
    address: int
    length_bytes: int
    parent: str
    layer: str
    hold: Hold
    base: tuple[str, ...] | None = None


class CaptureFinish(Operation, frozen=True, tag="capture_finish"):
    """Write the memory layer, durably."""

    job: str


class CaptureCancel(Operation, frozen=True, tag="capture_cancel"):
    """Stop a capture and remove what it wrote."""

    job: str


class Merge(Operation, frozen=True, tag="merge"):
    """Consecutive layers, bottom first, into one."""

    layers: tuple[str, ...]
    into: str


class ImportRaw(Operation, frozen=True, tag="import_raw"):
    """A plain file as a layer."""

    source: str
    into: str


class DigestLayer(Operation, frozen=True, tag="digest"):
    """Hash the canonical bytes of a layer."""

    path: str


class Compact(Operation, frozen=True, tag="compact"):
    """The canonical form of a layer as a file."""

    layer: str
    into: str


class TraceStart(Operation, frozen=True, tag="trace_start", omit_defaults=True):
    """Note the blocks of remote blobs in the order of their first reads; `paths` (descriptors) limits which."""

    trace: str
    paths: tuple[str, ...] = ()


class TraceFinish(Operation, frozen=True, tag="trace_finish"):
    """End a trace and write it."""

    trace: str
    into: str


class Prefetch(Operation, frozen=True, tag="prefetch"):
    """Fetch the blocks of a trace in the background; `blobs` are descriptors that may not be open yet."""

    path: str
    blobs: tuple[str, ...]


class Fill(Operation, frozen=True, tag="fill"):
    """Fetch whole blobs in the background, by their descriptors."""

    paths: tuple[str, ...]
    bytes_per_s_max: int


class ReadCache(Operation, frozen=True, tag="cache"):
    """The cache of remote blobs."""


class CacheEvict(Operation, frozen=True, tag="cache_evict", omit_defaults=True):
    """Give cached bytes back: at least so many, or those of one blob."""

    bytes: int | None = None
    digest: str | None = None


class ReadStats(Operation, frozen=True, tag="stats"):
    """Counters since this blockd started."""


class Shutdown(Operation, frozen=True, tag="shutdown"):
    """End blockd and its keeper and unmount."""


class Hello(msgspec.Struct, frozen=True):
    """`version` is the protocol's number."""

    version: int
    pid: int
    keeper_pid: int
    memory_mount: str
    disk_mount: str


class Exported(msgspec.Struct, frozen=True):
    """Where an export is; the inode number is never used again."""

    path: str
    inode: int


class Abandoned(msgspec.Struct, frozen=True):
    """How many requests were waiting."""

    waiting: int


class ExportFailure(msgspec.Struct, frozen=True):
    """Why an export answered with an I/O error, and how long ago."""

    message: str
    age_ms: int


class ExportInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One export as blockd knows it; `layers` bottom first."""

    name: str
    kind: ExportKind
    inode: int
    size_bytes: int
    layers: tuple[str, ...]
    upper: str | None
    abandoned: bool
    # The last request that ended in an error of the store or the disk, since blockd started.
    failure: ExportFailure | None = None


class ExportList(msgspec.Struct, frozen=True):
    """All exports, oldest first."""

    exports: tuple[ExportInfo, ...]


class SealResult(msgspec.Struct, frozen=True):
    """The layer that the upper has become. Not durable until `sync`."""

    layer: str
    data_bytes: int
    index_entries: int
    duration_us: int


class CaptureStarted(msgspec.Struct, frozen=True):
    """What a capture will write at most, how long the VMM had to stand still for it, and what it will lie upon."""

    dirty_bytes: int
    scan_us: int
    copy_us: int
    based: bool = False


class CaptureFinished(msgspec.Struct, frozen=True):
    """A durable memory layer. `skipped_bytes` were zero in the parent too."""

    layer: str
    data_bytes: int
    zero_bytes: int
    skipped_bytes: int
    duration_us: int


class MergeResult(msgspec.Struct, frozen=True):
    """A layer that reads as those it was made of. Not durable until `sync`."""

    layer: str
    data_bytes: int


class ImportResult(msgspec.Struct, frozen=True):
    """A layer of a plain file; `size_bytes` is the image's. Not durable until `sync`."""

    layer: str
    data_bytes: int
    size_bytes: int


class DigestResult(msgspec.Struct, frozen=True):
    """sha256 of a layer's canonical bytes and their number; `sparse`: the file itself is in another form."""

    digest: str
    size_bytes: int
    data_bytes: int
    sparse: bool


class CompactResult(msgspec.Struct, frozen=True):
    """A durable file in canonical form."""

    layer: str
    data_bytes: int


class TraceFinished(msgspec.Struct, frozen=True):
    """How many blocks a trace holds."""

    blocks: int


class PrefetchStarted(msgspec.Struct, frozen=True):
    """The name of the prefetch in blockd's log."""

    job: str


class CachedBlob(msgspec.Struct, frozen=True):
    """One blob of the cache; `in_use`: an export, a prefetch or a fill has it open."""

    digest: str
    cached_bytes: int
    size_bytes: int
    in_use: bool


class CacheState(msgspec.Struct, frozen=True):
    """The cache now, and counters since this blockd started. `size_bytes_max` 0: blockd was given no cache.

    `blobs` holds those in use first, then the larger ones, as many as fit in an answer. `hits` and `misses` are
    blocks; a stall is a read that waited for a store which failed or was silent.
    """

    size_bytes: int
    size_bytes_max: int
    blobs: tuple[CachedBlob, ...]
    blobs_total: int
    hits: int
    misses: int
    bytes_from_store: int
    bytes_from_cache: int
    stalls: int
    stall_us: int
    verify_failures: int
    evicted_bytes: int


class CacheEvicted(msgspec.Struct, frozen=True):
    """What an eviction gave back."""

    freed_bytes: int


class Stats(msgspec.Struct, frozen=True):
    """Counters by name, and what is in use now."""

    counters: dict[str, int]
    buffer_bytes: int
    exports: int
    captures: int
    threads: int


class Done(msgspec.Struct, frozen=True):
    """The answer that has nothing to say."""


class Refusal(msgspec.Struct, frozen=True):
    """Why blockd did not do it."""

    kind: str
    message: str


class Answer(msgspec.Struct, frozen=True):
    """One answer; the good half is read when its type is known."""

    id: int
    ok: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: Refusal | msgspec.UnsetType = msgspec.UNSET


T = TypeVar("T", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()
_answers = msgspec.json.Decoder(Answer)

# Every request and the type of its answer.
ANSWERS: Final[Mapping[type[Operation], type[msgspec.Struct]]] = {
    HelloRequest: Hello,
    ExportMemory: Exported,
    ExportDisk: Exported,
    Unexport: Done,
    Abandon: Abandoned,
    ListExports: ExportList,
    SealDisk: SealResult,
    SyncPaths: Done,
    CaptureStart: CaptureStarted,
    CaptureFinish: CaptureFinished,
    CaptureCancel: Done,
    Merge: MergeResult,
    ImportRaw: ImportResult,
    DigestLayer: DigestResult,
    Compact: CompactResult,
    TraceStart: Done,
    TraceFinish: TraceFinished,
    Prefetch: PrefetchStarted,
    Fill: Done,
    ReadCache: CacheState,
    CacheEvict: CacheEvicted,
    ReadStats: Stats,
    Shutdown: Done,
}


def name_of(operation: Operation) -> str:
    """The operation's name in the protocol."""
    return str(type(operation).__struct_config__.tag)


def encode(request_id: int, operation: Operation) -> bytes:
    """The body of a request. Raises `ValueError` when it is over the limit of a frame."""
    # The id goes first, as in the golden bytes; a struct's tag always comes before its fields.
    body = b'{"id":%d,' % request_id + _encoder.encode(operation)[1:]
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a request of {len(body)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return body


def frame(body: bytes) -> bytes:
    """A body with its length."""
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Answer:
    """Reads an answer. Raises `msgspec.DecodeError`."""
    return _answers.decode(body)


def decode_ok(raw: msgspec.Raw, kind: type[T]) -> T:
    """Reads the good half of an answer. Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(raw, type=kind)
