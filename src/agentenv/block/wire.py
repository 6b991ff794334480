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


class ExportInfo(msgspec.Struct, frozen=True):
    """One export as blockd knows it; `layers` bottom first."""

    name: str
    kind: ExportKind
    inode: int
    size_bytes: int
    layers: tuple[str, ...]
    upper: str | None
    abandoned: bool


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
