"""The file operations of the repository, one method each: the seam at which tests crash it or cut the power.

Owns what must happen for a file's content and its name to survive a power loss. Blocking; callers use threads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentenv.errors import OperationFailed, StorageFull, StoreUnavailable

# What a network file system answers while its server is away: the same request works later.
_AWAY = (errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOTCONN, errno.ESTALE)


class Files:
    """The real operations. Each either happens or raises `OSError`; `translated` makes that one of ours."""

    def write(self, path: Path, content: bytes) -> None:
        """Create a file that must not exist. Neither its content nor its name is durable yet."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        """Make a file's content survive a power loss."""
        self._fsync(path, os.O_RDONLY)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory survive a power loss."""
        self._fsync(path, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` by `source`, atomically."""
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; `FileExistsError` if that is taken. Atomic on NFS too."""
        os.link(source, target)

    def touch(self, path: Path) -> None:
        """Make a file as young as it can be, by the clock of the file system."""
        os.utime(path)

    def unlink(self, path: Path) -> None:
        """Remove a name; `FileNotFoundError` if it is not there."""
        path.unlink()

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents, durably. Idempotent."""
        if path.is_dir():
            return
        self.make_directory(path.parent)
        path.mkdir(exist_ok=True)
        self.sync_directory(path.parent)

    @staticmethod
    def _fsync(path: Path, flags: int) -> None:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """The one place where a file operation's error becomes one of ours; `what` was being done."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{what}: the disk is full") from error
        if error.errno in _AWAY:
            raise StoreUnavailable(f"{what}: {error.strerror}") from error
        raise OperationFailed(f"{what}: {error.strerror}") from error
