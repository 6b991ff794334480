"""What things are called in a repository, and how a layer is shown to blockd: as a file, or as a descriptor of a blob.

    layers/<digest>.lsmt     states/<digest>.state     manifests/<digest>.json     snapshots/<snapshot id>.json

Ids of 64 hexadecimal digits are the sha256 of what is stored. Ids of 24 are local layers of one node's staging; in
`layers/` they are what repositories of version 1 hold.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

from agentenv.errors import RepositoryDamaged
from agentenv.model import BLOB_DESCRIPTOR_SUFFIX, Blob, SnapshotManifest
from agentenv.snapshots.stores.files import Files, translated

LAYERS: Final = "layers/"
STATES: Final = "states/"
MANIFESTS: Final = "manifests/"
RECORDS: Final = "snapshots/"
NAMES: Final = "names/"
IMAGES: Final = "images/"
TRACES: Final = "traces/"
HOLDS: Final = "holds/"
# What cannot be read and is kept for a person to look at.
DAMAGED: Final = "damaged/"

BLOCK_BYTES: Final = 65_536
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def is_digest(layer_id: str) -> bool:
    """Whether the id is a content address; else it is a local or version 1 id."""
    return _DIGEST.fullmatch(layer_id) is not None


def layer_key(layer_id: str) -> str:
    """The key of a layer's content."""
    return f"{LAYERS}{layer_id}.lsmt"


def state_key(state_id: str) -> str:
    """The key of a device state; version 1 had them beside the layers."""
    return f"{STATES}{state_id}.state" if is_digest(state_id) else f"{LAYERS}{state_id}.state"


def manifest_key(digest: str) -> str:
    """The key of a manifest."""
    return f"{MANIFESTS}{digest}.json"


def record_key(snapshot_id: str) -> str:
    """The key whose appearance is the commit."""
    return f"{RECORDS}{snapshot_id}.json"


def quoted(name: str) -> str:
    """Any text as the last part of a key."""
    return quote(name, safe="").replace("~", "%7E").replace(".", "%2E")


def id_of(key: str) -> str:
    """The id in a key: its name without the suffix."""
    return key.rpartition("/")[2].partition(".")[0]


def ids_of(manifest: SnapshotManifest) -> set[str]:
    """Every layer and device state that a snapshot needs."""
    return {*manifest.disk.layers, *manifest.memory.layers, manifest.device_state}


class Places(Protocol):
    """How the content of a published layer is named for blockd."""

    def path(self, layer_id: str, blob: Blob | None) -> Path:
        """Raises `RepositoryDamaged` where nothing is known of the layer."""

    def state_path(self, blob: Blob) -> Path:
        """The descriptor of a device state, for aenv-storage."""


class LocalPlaces:
    """A repository in a directory: layers are files; encrypted ones have a descriptor that says so."""

    def __init__(self, root: Path, descriptors: Descriptors) -> None:
        self._root = root
        self._descriptors = descriptors

    def path(self, layer_id: str, blob: Blob | None) -> Path:
        """See `Places.path`."""
        plain = self._root / layer_key(layer_id)
        if blob is not None and blob.origin is not None:
            return self._descriptors.path(blob, blob.origin, None)
        if blob is None or blob.encryption is None:
            return plain
        return self._descriptors.path(blob, {"kind": "file", "path": str(plain)}, None)

    def state_path(self, blob: Blob) -> Path:
        """See `Places.state_path`."""
        return self._descriptors.path(blob, {"kind": "file", "path": str(self._root / state_key(blob.digest))}, None)


class RemotePlaces:
    """A repository in a bucket: every layer is a descriptor, by which blockd reads it through the node's cache."""

    def __init__(self, descriptors: Descriptors, store_name: str = "repository") -> None:
        self._descriptors = descriptors
        self._store_name = store_name

    def path(self, layer_id: str, blob: Blob | None) -> Path:
        """See `Places.path`."""
        if blob is None:
            raise RepositoryDamaged(f"no snapshot describes layer {layer_id}")
        if blob.origin is not None:
            return self._descriptors.path(blob, blob.origin, None)
        blocks = self._object(f"{LAYERS}{layer_id}.blocks") if blob.blocks_digest is not None else None
        return self._descriptors.path(blob, self._object(layer_key(layer_id)), blocks)

    def state_path(self, blob: Blob) -> Path:
        """See `Places.state_path`."""
        return self._descriptors.path(blob, self._object(state_key(blob.digest)), None)

    def _object(self, key: str) -> dict[str, str]:
        return {"kind": "object", "store": self._store_name, "key": key}


class Descriptors:
    """STATE/blobs: one small file per blob that is no plain file. May be deleted whole; missing ones are written."""

    def __init__(self, directory: Path, files: Files | None = None) -> None:
        self._directory = directory
        self._files = files or Files()
        # Those of an earlier process may be torn: each is written once per process.
        self._written: set[str] = set()

    def path(self, blob: Blob, source: dict[str, Any], blocks: dict[str, Any] | None) -> Path:
        """The descriptor's file. Blocks for a millisecond the first time. Raises `StorageFull`."""
        path = self._directory / f"{blob.digest}{BLOB_DESCRIPTOR_SUFFIX}"
        if blob.digest not in self._written or not path.exists():
            body = {
                "aenv_blob": 1,
                "digest": blob.digest,
                "size_bytes": blob.size_bytes,
                "source": source,
                "block_bytes": BLOCK_BYTES,
                "blocks": blocks,
                "blocks_digest": blob.blocks_digest,
                "encryption": blob.encryption,
            }
            self.write(path, json.dumps(body, separators=(",", ":")).encode())
            self._written.add(blob.digest)
        return path

    def write(self, path: Path, content: bytes) -> None:
        """A whole file or none; not durable, since whoever finds it torn after a power loss writes it again."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with translated(f"cannot write {path}"):
            self._files.make_directory(path.parent)
            try:
                self._files.write(temporary, content)
                self._files.rename(temporary, path)
            finally:
                with suppress(FileNotFoundError):
                    self._files.unlink(temporary)

    def state_path(self, digest: str) -> Path:
        """Where a fetched device state lies."""
        return self._directory / f"{digest}.state"

    def forget(self, kept: Iterable[str]) -> int:
        """Remove descriptors and fetched states of all blobs but `kept`; returns how many."""
        kept = set(kept)
        removed = 0
        with translated(f"cannot tidy {self._directory}"):
            for name in os.listdir(self._directory) if self._directory.is_dir() else ():
                if name.partition(".")[0] in kept:
                    continue
                with suppress(FileNotFoundError):
                    self._files.unlink(self._directory / name)
                    removed += 1
                self._written.discard(name.partition(".")[0])
        return removed
