"""Snapshots as JSON, version 2: a small record that is listed, and a content-addressed manifest that it names.

    snapshots/<id>.json     {"version": 2, "snapshot_id", "kind", "node_id", "created_at", "names", "build_id",
                             "manifest": sha256 of the other file}
    manifests/<sha>.json    {"version": 2, "snapshot": every other field of `SnapshotManifest`}

The record comes second, so that what it names is there when it appears. Equal descriptions (a pause, and a snapshot
that was made of it) are one manifest. Version 1 had all fields in the record; it is read, and never written.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any, Final

import msgspec

from agentenv.model import SnapshotKind, SnapshotManifest
from agentenv.snapshots.codec import MANIFEST_VERSION as VERSION_ONE
from agentenv.snapshots.codec import CorruptManifest, NewerManifest, decode_manifest

VERSION: Final = 2


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a snapshot that make it findable."""

    version: int
    snapshot_id: str
    kind: SnapshotKind
    node_id: str
    created_at: float
    names: tuple[str, ...]
    build_id: str
    manifest: str


_IN_RECORD: Final = frozenset(Record.__struct_fields__) - {"version", "manifest"}
_IN_MANIFEST: Final = frozenset(field.name for field in fields(SnapshotManifest)) - _IN_RECORD


def encode(snapshot: SnapshotManifest) -> tuple[bytes, bytes, str]:
    """The bytes of the record and of the manifest, and the manifest's digest."""
    body = msgspec.to_builtins(snapshot)
    described = {"version": VERSION, "snapshot": {name: body[name] for name in _IN_MANIFEST}}
    manifest = msgspec.json.encode(described, order="deterministic")
    digest = hashlib.sha256(manifest).hexdigest()
    record = Record(version=VERSION, manifest=digest, **{name: body[name] for name in _IN_RECORD})
    return msgspec.json.format(msgspec.json.encode(record), indent=1), manifest, digest


def decode_record(raw: bytes, origin: str) -> Record | SnapshotManifest:
    """A record; of version 1 it is the whole snapshot. Raises `CorruptManifest` naming `origin`."""
    try:
        version = msgspec.json.decode(raw, type=_Versioned).version
        if version == VERSION_ONE:
            return decode_manifest(raw, origin)
        if version != VERSION:
            raise NewerManifest(f"{origin}: version {version}, this server reads {VERSION_ONE} and {VERSION}")
        return msgspec.json.decode(raw, type=Record)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptManifest(f"{origin}: not a snapshot record ({error})") from error


def decode_snapshot(record: Record, manifest: bytes, origin: str) -> SnapshotManifest:
    """The snapshot of a record and its manifest. Raises `CorruptManifest`, also where the content is another."""
    if hashlib.sha256(manifest).hexdigest() != record.manifest:
        raise CorruptManifest(f"{origin}: its content is not what its name says")
    try:
        body = msgspec.json.decode(manifest, type=_Described)
        if body.version != VERSION:
            raise NewerManifest(f"{origin}: version {body.version}, this server reads {VERSION}")
        unknown = body.snapshot.keys() - _IN_MANIFEST
        if unknown:
            raise CorruptManifest(f"{origin}: unknown fields {', '.join(sorted(unknown))}")
        found = {name: getattr(record, name) for name in _IN_RECORD}
        return msgspec.convert(body.snapshot | found, SnapshotManifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptManifest(f"{origin}: not a manifest ({error})") from error


class _Versioned(msgspec.Struct):
    version: int


class _Described(msgspec.Struct):
    version: int
    snapshot: dict[str, Any]
