"""Manifests as JSON. Unknown fields of a newer version are refused: a manifest half understood restores half a VM."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentenv.errors import OperationFailed
from agentenv.model import SnapshotManifest

# Version 1: the fields of `SnapshotManifest`, by name.
MANIFEST_VERSION: Final = 1


class CorruptManifest(OperationFailed):
    """A snapshot record cannot be read; the message names the file or the field."""


class NewerManifest(CorruptManifest):
    """A record of a version that this server does not read: not damaged, and left alone."""


class SealedManifest(NewerManifest):
    """A record whose secrets are encrypted under a key that this server does not have: left alone, too."""


def encode_manifest(manifest: SnapshotManifest) -> bytes:
    """The record's bytes: a JSON object with `version` and `snapshot`."""
    body = {"version": MANIFEST_VERSION, "snapshot": msgspec.to_builtins(manifest)}
    return msgspec.json.format(msgspec.json.encode(body), indent=1)


def decode_manifest(raw: bytes, origin: str) -> SnapshotManifest:
    """Raises `CorruptManifest` naming `origin`."""
    try:
        body: Any = msgspec.json.decode(raw)
        if body["version"] != MANIFEST_VERSION:
            raise NewerManifest(f"{origin}: version {body['version']}, this server reads {MANIFEST_VERSION}")
        return msgspec.convert(body["snapshot"], SnapshotManifest)
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError) as error:
        raise CorruptManifest(f"{origin}: not a snapshot record ({error})") from error
