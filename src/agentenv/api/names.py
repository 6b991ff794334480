"""Ids and names as they appear in requests: sandbox ids, snapshot names, snapshot references.

A snapshot's name is `[namespace/]name[:tag]`, kept with its tag always written out, so that one name has one
spelling. Upper-case letters are lowered, as E2B does with template names.
"""

from __future__ import annotations

import re
from typing import Final

from agentenv.errors import InvalidRequest, SandboxNotFound
from agentenv.model import SANDBOX_ID_PATTERN, SnapshotManifest

DEFAULT_TAG: Final = "default"
REFERENCE_CHARS_MAX: Final = 256
_NAME = re.compile(r"(?:[a-z0-9][a-z0-9_-]{0,62}/)?([a-z0-9][a-z0-9_-]{0,127})(?::([a-z0-9][a-z0-9_.-]{0,127}))?")
# A name of this shape could not be told from the id of another snapshot.
_ID_SHAPE = re.compile(r"s[a-z0-9]{20}")


def sandbox_id(raw: str) -> str:
    """The sandbox id in a path; old clients append `-` and the client id.

    Raises `SandboxNotFound` for what cannot be an id: to a client that is the same thing as an unknown one.
    """
    candidate = raw.partition("-")[0]
    if SANDBOX_ID_PATTERN.fullmatch(candidate) is None:
        raise SandboxNotFound(f"sandbox {shown(raw)} was not found")
    return candidate


def snapshot_name(raw: str, field: str = "name") -> str:
    """`raw` lowered and with its tag. Raises `InvalidRequest`, naming `field`, when it is no name."""
    match = _NAME.fullmatch(raw.lower())
    if match is None:
        raise InvalidRequest(
            f"{field}: {shown(raw)} is not a name; use [namespace/]name[:tag] of the characters a-z, 0-9, - and _"
        )
    if _ID_SHAPE.fullmatch(match[1]):
        raise InvalidRequest(f"{field}: {shown(raw)} has the shape of a snapshot id; choose another name")
    return match[0] if match[2] else f"{match[0]}:{DEFAULT_TAG}"


def template_reference(raw: str, field: str) -> str:
    """What create, DELETE and the alias route take: an id or a name, with or without tag; the node resolves it."""
    if not raw or len(raw) > REFERENCE_CHARS_MAX or not raw.isprintable():
        raise InvalidRequest(f"{field}: must be 1 to {REFERENCE_CHARS_MAX} printable characters")
    return raw


def snapshot_reference(manifest: SnapshotManifest) -> str:
    """How a snapshot is called in answers: its first name, or its id, with the tag."""
    return manifest.names[0] if manifest.names else f"{manifest.snapshot_id}:{DEFAULT_TAG}"


def without_tag(name: str) -> str:
    """`namespace/name` of `namespace/name:tag`."""
    return name.partition(":")[0]


def shown(raw: str) -> str:
    """`raw` for an error message: quoted, escaped and short."""
    return ascii(raw if len(raw) <= 64 else raw[:61] + "...")
