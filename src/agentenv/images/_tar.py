"""Members of an archive by name: documents read whole, large ones copied out. Nothing is unpacked by its own name.

Owns the index of the tar. Compressed archives work, but each step back in them reads from the start again.
"""

from __future__ import annotations

import errno
import posixpath
import tarfile
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from agentenv.errors import ImageError, StorageFull
from agentenv.images._files import regular_size

MEMBERS_MAX: Final = 20_000
_LINKS_MAX: Final = 8
_PIECE_BYTES: Final = 1 << 20


class TarIndex:
    """The regular members of a tar file. Blocking: call it from a worker thread. Safe for several threads."""

    def __init__(self, path: Path, stopped: Callable[[], bool]) -> None:
        """Reads all headers, until `stopped`. Raises `ImageNotFound`, `ImageError`."""
        self._path = path
        # One file position: two threads must not move it at once.
        self._lock = threading.Lock()
        regular_size(path)
        try:
            self._tar = tarfile.open(path, "r:*")  # noqa: SIM115 - kept open, see `close`
        except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
            raise ImageError(f"{path}: not a tar archive ({error})") from error
        self._members: dict[str, tarfile.TarInfo] = {}
        try:
            self._index(stopped)
        except BaseException:
            self._tar.close()
            raise

    def close(self) -> None:
        self._tar.close()

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def size(self, name: str) -> int:
        """Bytes of a member. Raises `ImageError`."""
        return self._member(name).size

    def read(self, name: str, bytes_max: int) -> bytes:
        """A small member. Raises `ImageError`."""
        member = self._member(name)
        if member.size > bytes_max:
            raise ImageError(f"{self._path}: {name} has {member.size} bytes; the limit is {bytes_max}")
        with self._lock, _translated(self._path):
            content = self._open(member).read()
        if len(content) != member.size:
            raise ImageError(f"{self._path}: ends inside of {name}")
        return content

    def copy(self, name: str, into: Path, stopped: Callable[[], bool], on_piece: Callable[[int], None]) -> None:
        """A large member to a file, until `stopped`. Raises `ImageError`, `StorageFull`."""
        member = self._member(name)
        left = member.size
        with self._lock, _translated(self._path), into.open("wb", buffering=0) as out:
            source = self._open(member)
            while left and not stopped():
                piece = source.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise ImageError(f"{self._path}: ends inside of {name}")
                if _written(out, piece, into, left) != len(piece):
                    raise StorageFull(f"{name} needs {left} more bytes in {into.parent}")
                left -= len(piece)
                on_piece(len(piece))

    def _index(self, stopped: Callable[[], bool]) -> None:
        with _translated(self._path):
            for count, member in enumerate(self._tar):
                if stopped():
                    raise ImageError(f"{self._path}: nobody waits for it any more")
                if count >= MEMBERS_MAX:
                    raise ImageError(f"{self._path}: more than {MEMBERS_MAX} members; this is no archive of images")
                # The later of two members of one name counts, as for every tar.
                self._members[posixpath.normpath(member.name)] = member

    def _find(self, name: str) -> tarfile.TarInfo | None:
        """Docker writes equal layers as symlinks to each other."""
        name = posixpath.normpath(name)
        for _ in range(_LINKS_MAX):
            member = self._members.get(name)
            if member is None or member.isreg():
                return member
            if member.issym():
                name = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
            elif member.islnk():
                name = posixpath.normpath(member.linkname)
            else:
                return None
        return None

    def _member(self, name: str) -> tarfile.TarInfo:
        found = self._find(name)
        if found is None:
            raise ImageError(f"{self._path}: there is no {name[:200]!r} in it")
        return found

    def _open(self, member: tarfile.TarInfo) -> IO[bytes]:
        opened = self._tar.extractfile(member)
        assert opened is not None, "only regular members are found"
        return opened


def _written(out: IO[bytes], piece: bytes, into: Path, left: int) -> int:
    try:
        return out.write(piece)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"a layer needs {left} more bytes in {into.parent}") from error
        raise


class _translated:  # noqa: N801 - reads as the context manager that it is
    """Errors of tarfile and its decompressors as `ImageError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError | tarfile.TarError | EOFError | zlib.error):
            raise ImageError(f"{self._path}: damaged or unreadable ({error})") from error
