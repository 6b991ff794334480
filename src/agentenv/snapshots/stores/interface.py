"""What a repository needs of the place where its objects lie: six operations, each atomic for one object.

Owns the contract and the form of keys. The implementations are `memory` (a fake that ships), `posix` (a directory,
perhaps shared by nodes) and `oss` (S3); tests/conformance/snapshots runs on all three. Large blobs do not pass through
here: `publishing` writes them, and blockd reads them by ranges.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

from agentenv.errors import Conflict, NotFound, StoreRefused

# A record of a snapshot with a hundred layers is 30 KiB; a device state some MiB.
OBJECT_BYTES_MAX: Final = 256 << 20
KEY_CHARS_MAX: Final = 512
# One folder and a name; names of snapshots are percent-encoded by their callers. No leading dot: temporaries have one.
_KEY: Final = re.compile(r"^[a-z]+/[A-Za-z0-9_%-][A-Za-z0-9._%-]*$")


class ObjectNotFound(NotFound):
    """The store has no object of this key."""


class PreconditionFailed(Conflict):
    """A conditional put found another object than it was made for."""


class AccessDenied(StoreRefused):
    """The store does not let these keys do that."""


class NoBucket(StoreRefused):
    """The store has no such bucket."""


@dataclass(frozen=True, slots=True)
class Object:
    """One object as it was at one instant. `etag` changes whenever the content does."""

    content: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One object without its content."""

    key: str
    size_bytes: int
    # Unix seconds by the *store's* clock. Compare them with each other only, never with the clock of a node.
    modified_s: float
    # What the object takes where it lies: less than its size for the sparse form of a layer.
    stored_bytes: int


class Store(Protocol):
    """Small objects by key. Every operation is atomic, durable on return, and seen by all nodes from then on.

    All raise `StoreUnavailable` when the store does not answer within its deadline, and `StorageFull`,
    `StoreRefused` or `OperationFailed` for what waiting does not mend. All are safe to cancel: what was cancelled has
    happened wholly or not at all.
    """

    async def get(self, key: str) -> Object:
        """Raises `ObjectNotFound`."""

    async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """Store an object whole; returns its etag. Raises `PreconditionFailed`.

        A conditional put that finds exactly `content` there succeeds: the request may have been repeated after its
        answer was lost. Who needs to be the only one therefore puts a nonce into the content.
        """

    async def list(self, folder: str) -> list[Entry]:
        """All objects below `folder` (which ends in '/'), sorted by key."""

    async def stat(self, key: str) -> Entry | None:
        """The object without its content; None where there is none."""

    async def delete(self, key: str) -> None:
        """Remove an object. Idempotent."""


def check_key(key: str) -> str:
    """The key itself. Raises `ValueError`: keys are made by this package, so a bad one is a bug."""
    if len(key) > KEY_CHARS_MAX or not _KEY.match(key):
        raise ValueError(f"not a key of the repository: {key[:80]!r}")
    return key


def check_folder(folder: str) -> str:
    """The folder itself; raises `ValueError` as `check_key` does."""
    if not re.fullmatch(r"[a-z]+/", folder):
        raise ValueError(f"not a folder of the repository: {folder[:80]!r}")
    return folder
