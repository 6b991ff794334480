"""Encryption of the one secret that a manifest holds: the token of the guest's daemon.

Owns how it is sealed, and the check by which a node finds at its start that its key is not the repository's. Does not
own layers and device states, which aenv-storage encrypts under keys derived from the same one (spec/store.md).

A token is sealed with AES-SIV (RFC 5297): equal tokens of one sandbox give equal text, so that equal manifests stay one
object, and there is no nonce that two nodes could use twice. The owner's id is authenticated with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import replace
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from agentenv.errors import ConfigError, RepositoryDamaged
from agentenv.model import SnapshotManifest
from agentenv.snapshots.codec import SealedManifest
from agentenv.snapshots.stores.interface import ObjectNotFound, PreconditionFailed, Store

# A token never begins like this: tokens are hexadecimal.
_SEALED: Final = "aes-siv-1:"
_TOKEN_INFO: Final = b"aenv guest token 1"
_CHECK_INFO: Final = b"aenv repository key 1"
# Beside the objects that hold content: no sweep looks here.
CHECK_KEY: Final = "keys/check.json"
SETTING: Final = "snapshot.encryption_key_file"


class Sealer:
    """Seals and opens tokens with the key of the configuration, 64 hexadecimal digits."""

    def __init__(self, key: str) -> None:
        self._master = bytes.fromhex(key)
        # 64 bytes: AES-256 for each of the two halves.
        self._siv = AESSIV(hmac.digest(self._master, _TOKEN_INFO, "sha512"))

    @property
    def check(self) -> str:
        """Tells this key from others, and tells nothing of it."""
        return hmac.digest(self._master, _CHECK_INFO, hashlib.sha256).hex()

    def sealed(self, snapshot: SnapshotManifest) -> SnapshotManifest:
        """The snapshot as it may be stored."""
        if not snapshot.guest_token:
            return snapshot
        text = self._siv.encrypt(snapshot.guest_token.encode(), [_TOKEN_INFO, snapshot.token_owner.encode()])
        return replace(snapshot, guest_token=_SEALED + base64.b64encode(text).decode())

    def opened(self, snapshot: SnapshotManifest, origin: str) -> SnapshotManifest:
        """The snapshot as it was before `sealed`. Raises `SealedManifest` naming `origin` for another key's."""
        try:
            text = base64.b64decode(snapshot.guest_token.removeprefix(_SEALED), validate=True)
            token = self._siv.decrypt(text, [_TOKEN_INFO, snapshot.token_owner.encode()]).decode()
        except (InvalidTag, ValueError) as error:
            raise SealedManifest(f"{origin}: its token cannot be decrypted with the key of {SETTING}") from error
        return replace(snapshot, guest_token=token)


def seal(snapshot: SnapshotManifest, sealer: Sealer | None) -> SnapshotManifest:
    """What is stored of a snapshot; without a key it is the snapshot."""
    return snapshot if sealer is None else sealer.sealed(snapshot)


def unseal(snapshot: SnapshotManifest, sealer: Sealer | None, origin: str) -> SnapshotManifest:
    """The snapshot of what was stored, under this key or before there was one. Raises `SealedManifest`."""
    if not snapshot.guest_token.startswith(_SEALED):
        return snapshot
    if sealer is None:
        raise SealedManifest(f"{origin}: its token is encrypted, and no key is configured ({SETTING})")
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
