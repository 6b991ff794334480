"""A store in a directory, which may be shared by several nodes over a network file system.

An object is a file; its etag is the sha256 of its content. A put writes a hidden temporary file, makes it durable, and
gives it its name: `rename` replaces, `link` fails if the name is taken, which is atomic on NFS as well. Readers see the
old or the new object, never a part. A crash leaves hidden files, which `list` does not show and `tidy` removes.

`if_match` compares and then replaces, which no file operation does at once, so it needs a lock. flock is not it: over
NFSv3 it may be local to the client, and over NFSv4 it is lost silently when the server restarts. The lock is a hidden
file made by `link`, with a nonce of its holder. Its holder works for at most `LOCK_WORK_S_MAX` by its own clock and
checks that before the rename; another may break a lock which it saw unchanged for `LOCK_STALE_S`, many times longer, by
its own clock too. So clocks are never compared, only their rates. Like every lease it leaves one hole: a holder that is
suspended between its check and its rename for longer than the difference. What is guarded so are locks and
reservations, whose users check again (`gclock`, `names`); records and blobs never need it.

Over NFS the mount must not answer look-ups from an old cache: `lookupcache=none` (or `noac`), see docs/storage.md.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import stat as modes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from agentenv.errors import OperationFailed, StoreUnavailable
from agentenv.snapshots.stores.files import Files, translated
from agentenv.snapshots.stores.interface import (
    Entry,
    Object,
    ObjectNotFound,
    PreconditionFailed,
    check_folder,
    check_key,
)

LOCK_WORK_S_MAX: Final = 5.0
LOCK_STALE_S: Final = 30.0
# Longer than LOCK_STALE_S: who waits for a dead holder must get its turn.
LOCK_WAIT_S_MAX: Final = 45.0
LOCK_POLL_S: Final = 0.02
_SECTOR_BYTES: Final = 512


class PosixStore:
    """`Store` in a directory. The directory and its folders are made when they are first needed."""

    def __init__(
        self, root: Path, files: Files | None = None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._files = files or Files()
        self._monotonic = monotonic

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    def path(self, key: str) -> Path:
        """Where an object lies or would lie."""
        return self._root / check_key(key)

    async def get(self, key: str) -> Object:
        """See `Store.get`."""
        return await asyncio.to_thread(self._get, key)

    async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """See `Store.put`."""
        return await asyncio.to_thread(self._put, key, content, if_absent, if_match)

    async def list(self, folder: str) -> list[Entry]:
        """See `Store.list`. `modified_s` is the file server's time, which sets it at creation."""
        return [*await asyncio.to_thread(self._list, folder)]

    async def stat(self, key: str) -> Entry | None:
        """See `Store.stat`."""
        return await asyncio.to_thread(self._stat, self.path(key), key)

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        await asyncio.to_thread(self._delete, key)

    async def adopt(self, local: Path, key: str) -> bool:
        """Give a local file of the same file system the name of a new object, without a copy; durable on return.

        False where an object of this name is there already: it is kept, and made as young as a new one. Raises
        `CannotLink` where the directory is on another file system.
        """
        return await asyncio.to_thread(self._adopt, local, key)

    async def tidy(self, older_than_s: float) -> int:
        """Remove hidden files that interrupted puts left; returns how many. Ages are by the file server's clock."""
        return await asyncio.to_thread(self._tidy, older_than_s)

    def _get(self, key: str) -> Object:
        with translated(f"cannot read {self.path(key)}"):
            try:
                content = self.path(key).read_bytes()
            except FileNotFoundError:
                raise ObjectNotFound(f"there is no {self.path(key)}") from None
        return Object(content, _etag(content))

    def _put(self, key: str, content: bytes, if_absent: bool, if_match: str | None) -> str:
        path = self.path(key)
        with translated(f"cannot write {path}"):
            self._files.make_directory(path.parent)
            if if_absent:
                self._create(path, content)
            elif if_match is not None:
                self._replace_if(path, content, if_match)
            else:
                with self._temporary(path, content) as temporary:
                    self._files.rename(temporary, path)
            self._files.sync_directory(path.parent)
        return _etag(content)

    def _create(self, path: Path, content: bytes) -> None:
        with self._temporary(path, content) as temporary:
            try:
                self._files.link(temporary, path)
            except FileExistsError:
                if self._content(path) != content:
                    raise PreconditionFailed(f"{path} is there already") from None

    def _replace_if(self, path: Path, content: bytes, etag: str) -> None:
        with self._temporary(path, content) as temporary, self._locked(path) as work_until:
            there = self._content(path)
            if there == content:
                return
            if there is None or _etag(there) != etag:
                raise PreconditionFailed(f"{path} is not what it was")
            if self._monotonic() > work_until:
                raise StoreUnavailable(f"cannot write {path}: reading it took too long")
            self._files.rename(temporary, path)

    @contextmanager
    def _temporary(self, path: Path, content: bytes) -> Iterator[Path]:
        """A durable file of this content beside `path`. Gone afterwards unless it was renamed."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        try:
            self._files.write(temporary, content)
            self._files.sync(temporary)
            yield temporary
        finally:
            with suppress(FileNotFoundError):
                self._files.unlink(temporary)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[float]:
        """Hold the lock of one object; yields until when (monotonic) its holder may act."""
        lock, nonce = path.with_name(f".{path.name}.lock"), secrets.token_hex(8).encode()
        give_up = self._monotonic() + LOCK_WAIT_S_MAX
        seen, seen_at = b"", 0.0
        with self._temporary(lock, nonce) as mine:
            while True:
                asked_at = self._monotonic()
                try:
                    self._files.link(mine, lock)
                    break
                except FileExistsError:
                    holder = self._content(lock) or b""
                if holder != seen:
                    seen, seen_at = holder, asked_at
                elif asked_at - seen_at > LOCK_STALE_S:
                    self._break(lock, seen)
                if asked_at > give_up:
                    raise StoreUnavailable(f"{path} has been locked for {LOCK_WAIT_S_MAX:g} s")
                time.sleep(LOCK_POLL_S)
            try:
                yield asked_at + LOCK_WORK_S_MAX
            finally:
                if self._content(lock) == nonce:
                    self._files.unlink(lock)

    def _break(self, lock: Path, stale: bytes) -> None:
        """Take a dead holder's lock away. Two breakers must not take the lock of the first one's successor away."""
        aside = lock.with_name(f"{lock.name}.{secrets.token_hex(6)}")
        with suppress(FileNotFoundError):
            self._files.rename(lock, aside)
            if self._content(aside) != stale:
                with suppress(FileExistsError):
                    self._files.link(aside, lock)
            self._files.unlink(aside)

    @staticmethod
    def _content(path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def _list(self, folder: str) -> Sequence[Entry]:
        directory = self._root / check_folder(folder)
        with translated(f"cannot list {directory}"):
            try:
                names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
            except FileNotFoundError:
                return []
            entries = (self._stat(directory / name, folder + name) for name in names)
            return [entry for entry in entries if entry is not None]

    @staticmethod
    def _stat(path: Path, key: str) -> Entry | None:
        with translated(f"cannot look at {path}"):
            try:
                found = path.stat()
            except FileNotFoundError:
                return None
            if not modes.S_ISREG(found.st_mode):
                return None
            return Entry(key, found.st_size, found.st_mtime, min(found.st_size, found.st_blocks * _SECTOR_BYTES))

    def _delete(self, key: str) -> None:
        path = self.path(key)
        with translated(f"cannot delete {path}"), suppress(FileNotFoundError):
            self._files.unlink(path)
            self._files.sync_directory(path.parent)

    def _adopt(self, local: Path, key: str) -> bool:
        path = self.path(key)
        with translated(f"cannot add {path}"):
            self._files.make_directory(path.parent)
            self._files.sync(local)
            try:
                self._files.link(local, path)
            except FileExistsError:
                is_new = False
            except OSError as error:
                if error.errno in (errno.EXDEV, errno.EMLINK, errno.EPERM):
                    raise CannotLink(f"{local} cannot be linked into {path.parent}") from error
                raise
            else:
                is_new = True
            # A file may have lain in staging for hours: the grace of a collection begins now.
            self._files.touch(path)
            self._files.sync_directory(path.parent)
        return is_new

    def _tidy(self, older_than_s: float) -> int:
        removed = 0
        with translated(f"cannot tidy {self._root}"):
            if not self._root.is_dir():
                return 0
            probe = self._root / f".clock.{secrets.token_hex(6)}"
            self._files.write(probe, b"")
            now_s = probe.stat().st_mtime
            self._files.unlink(probe)
            for path in [*self._root.glob(".*"), *self._root.glob("*/.*")]:
                with suppress(FileNotFoundError):
                    if path.is_file() and now_s - path.stat().st_mtime >= older_than_s:
                        self._files.unlink(path)
                        removed += 1
        return removed


class CannotLink(OperationFailed):
    """The file cannot get a second name in the repository: another file system, or one without links."""


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
