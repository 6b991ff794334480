"""API keys: the file they live in and how a request's key is compared.

One key a line, `e2b_` and 40 lower-case hex digits (older SDKs check the shape on their side); `#` begins a comment.
The file is made at first start with one key. It must be a regular file that belongs to us and that nobody else can
read: a key opens every sandbox of the node. Keys never reach a guest and open nothing in one.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers

from agentenv.errors import ConfigError, Unauthorized

KEY_PATTERN: Final = re.compile(r"e2b_[0-9a-f]{40}")
_FILE_BYTES_MAX: Final = 64 << 10
_HEADER_CHARS_MAX: Final = 512


def new_key() -> str:
    """A new random key (160 bits)."""
    return "e2b_" + secrets.token_hex(20)


class ApiKeys:
    """The accepted keys. Immutable; safe to share."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(key.encode("ascii") for key in keys)
        if not self._keys:
            raise ConfigError("at least one API key is needed")

    def first(self) -> str:
        """The first key, for whoever starts the server and needs one to begin with."""
        return self._keys[0].decode("ascii")

    def accepts(self, presented: str) -> bool:
        """Compare with every key in constant time, whichever matches."""
        candidate = presented.encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(candidate, key) for key in self._keys]
        return any(matches)

    def check(self, headers: Headers) -> None:
        """Raises `Unauthorized` unless the request presents an accepted key.

        `X-API-KEY` decides where it is present (the JS SDK may send an unrelated Bearer token beside it); repeated
        headers are refused, because two parties could read different ones.
        """
        presented = headers.getlist("x-api-key")
        if not presented:
            tokens = [value.partition(" ") for value in headers.getlist("authorization")]
            presented = [token.strip() for scheme, _, token in tokens if scheme.lower() == "bearer"]
        if not presented:
            raise Unauthorized("API key is missing; send it in the X-API-KEY header")
        if len(presented) > 1:
            raise Unauthorized("more than one API key was sent")
        if len(presented[0]) > _HEADER_CHARS_MAX or not self.accepts(presented[0]):
            raise Unauthorized("API key is not known to this server")


def load_or_create(path: Path) -> ApiKeys:
    """The keys of `path`, which is made with one new key when it does not exist.

    Raises `ConfigError` when the file is a symlink, belongs to somebody else, is readable by others or holds
    anything but keys.
    """
    with contextlib.suppress(FileExistsError):
        _create(path)
    return ApiKeys(_parse(_read(path), path))


def _create(path: Path) -> None:
    """Write one key so that the file is complete whenever it exists; raises `FileExistsError` when it is there."""
    if os.path.lexists(path):
        raise FileExistsError(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(new_key() + "\n")
                file.flush()
                os.fsync(file.fileno())
            # Unlike rename, link never replaces a file that somebody else made in between.
            os.link(partial, path)
        finally:
            partial.unlink()
        _sync_directory(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}") from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> str:
    try:
        # O_NONBLOCK: a FIFO in this place must not hang the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot open {path} (a symlink is not followed): {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        if status.st_uid != os.geteuid():
            raise ConfigError(f"{path} belongs to user {status.st_uid}, not to the server's user {os.geteuid()}")
        if status.st_mode & 0o077:
            raise ConfigError(f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):o}); chmod 600 it")
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {_FILE_BYTES_MAX} bytes")
    return data.decode("utf-8", "replace")


def _parse(text: str, path: Path) -> list[str]:
    keys: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        # The line itself stays out of the message: it may be a key with a typing error.
        if not KEY_PATTERN.fullmatch(word):
            raise ConfigError(f"{path}: line {number} is not a key (e2b_ and 40 lower-case hex digits)")
        keys.append(word)
    if not keys:
        raise ConfigError(f"{path} holds no key")
    return keys
