"""Encryption of what a manifest must not tell: the token of the guest's daemon, and the digests of plain content.

By the digest of what is inside of an encrypted blob one could look whether a repository holds content that one knows.
Owns how these are sealed, and the check by which a node finds at its start that its key is not the repository's. Does
not own layers and device states: aenv-storage encrypts them, under keys derived from the same one (spec/store.md).

They are sealed with AES-SIV (RFC 5297): equal text of one place gives equal bytes, so that equal manifests stay one
object, and there is no nonce that two nodes could use twice. The place (the token's owner, the blob) is authenticated.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from agentenv.errors import ConfigError, RepositoryDamaged
from agentenv.model import Blob, SnapshotManifest
from agentenv.snapshots.codec import SealedManifest
from agentenv.snapshots.stores.interface import ObjectNotFound, PreconditionFailed, Store

# What is sealed never begins like this: it is hexadecimal.
_SEALED: Final = "aes-siv-1:"
_KEY_INFO: Final = b"aenv manifest key 1"
_TOKEN: Final = b"guest token of "
_DIGEST: Final = b"plain digest of "
_CHECK_INFO: Final = b"aenv repository key 1"
# Beside the objects that hold content: no sweep looks here.
CHECK_KEY: Final = "keys/check.json"
SETTING: Final = "snapshot.encryption_key_file"


class Sealer:
    """Seals and opens manifests with the key of the configuration, 64 hexadecimal digits."""

    def __init__(self, key: str) -> None:
        self._master = bytes.fromhex(key)
        # 64 bytes: AES-256 for each of the two halves.
        self._siv = AESSIV(hmac.digest(self._master, _KEY_INFO, "sha512"))

    @property
    def check(self) -> str:
        """Tells this key from others, and tells nothing of it."""
        return hmac.digest(self._master, _CHECK_INFO, hashlib.sha256).hex()

    def sealed(self, snapshot: SnapshotManifest) -> SnapshotManifest:
        """The snapshot as it may be stored."""
        return replace(
            snapshot,
            guest_token=self._seal(snapshot.guest_token, _TOKEN + snapshot.token_owner.encode()),
            blobs={digest: self._blob(blob, self._seal) for digest, blob in snapshot.blobs.items()},
        )

    def opened(self, snapshot: SnapshotManifest, origin: str) -> SnapshotManifest:
        """The snapshot as it was before `sealed`. Raises `SealedManifest` naming `origin` for another key's."""
        try:
            return replace(
                snapshot,
                guest_token=self._open(snapshot.guest_token, _TOKEN + snapshot.token_owner.encode()),
                blobs={digest: self._blob(blob, self._open) for digest, blob in snapshot.blobs.items()},
            )
        except (InvalidTag, ValueError) as error:
            raise SealedManifest(f"{origin}: it cannot be decrypted with the key of {SETTING}") from error

    @staticmethod
    def _blob(blob: Blob, change: Callable[[str, bytes], str]) -> Blob:
        """What is not encrypted is named by its plain digest anyway."""
        if blob.encryption is None:
            return blob
        return replace(blob, plain_digest=change(blob.plain_digest, _DIGEST + blob.digest.encode()))

    def _seal(self, text: str, place: bytes) -> str:
        return _SEALED + base64.b64encode(self._siv.encrypt(text.encode(), [place])).decode() if text else ""

    def _open(self, text: str, place: bytes) -> str:
        if not text.startswith(_SEALED):
            return text
        return self._siv.decrypt(base64.b64decode(text.removeprefix(_SEALED), validate=True), [place]).decode()


def seal(snapshot: SnapshotManifest, sealer: Sealer | None) -> SnapshotManifest:
    """What is stored of a snapshot; without a key it is the snapshot."""
    return snapshot if sealer is None else sealer.sealed(snapshot)


def unseal(snapshot: SnapshotManifest, sealer: Sealer | None, origin: str) -> SnapshotManifest:
    """The snapshot of what was stored, under this key or before there was one. Raises `SealedManifest`."""
    texts = [snapshot.guest_token, *(blob.plain_digest for blob in snapshot.blobs.values())]
    if not any(text.startswith(_SEALED) for text in texts):
        return snapshot
    if sealer is None:
        raise SealedManifest(f"{origin}: it is encrypted, and no key is configured ({SETTING})")
    return sealer.opened(snapshot, origin)


async def check_key(store: Store, sealer: Sealer | None, location: str) -> None:
    """Make sure that all nodes of a repository have one key, or none; the first node with one says which.

    Raises `ConfigError` naming the setting, `RepositoryDamaged`, and what the store raises.
    """
    found = await _stored_check(store)
    if sealer is None:
        if found is not None:
            raise ConfigError(f"{SETTING} is not set, and the repository {location} is encrypted")
        return
    if found is None:
        try:
            await store.put(CHECK_KEY, msgspec.json.encode(_Check(1, sealer.check)), if_absent=True)
        except PreconditionFailed:
            found = await _stored_check(store)
        else:
            return
    if found != sealer.check:
        raise ConfigError(f"{SETTING}: this is not the key that the repository {location} is encrypted with")


class _Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    check: str


async def _stored_check(store: Store) -> str | None:
    try:
        content = (await store.get(CHECK_KEY)).content
    except ObjectNotFound:
        return None
    try:
        return msgspec.json.decode(content, type=_Check).check
    except msgspec.MsgspecError as error:
        raise RepositoryDamaged(f"{CHECK_KEY} of the repository cannot be read: {error}") from error
