"""Tar archives as streams: written from a local directory, read member by member. GNU format, no compression.

The standard library's reader takes a damaged header in the middle of a stream for the end of the archive, and the
archive comes from a guest that nobody needs to trust; so headers are read here one by one and any doubt is an error.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.client.errors import ProtocolError

BLOCK_BYTES: Final = 512
READ_BYTES: Final = 256 * 1024
# Longest path, link target or PAX header that is accepted.
EXTENSION_BYTES_MAX: Final = 64 * 1024
_END: Final = bytes(2 * BLOCK_BYTES)

Report = Callable[[str, str], None]


async def written(root: Path, report: Report) -> AsyncIterator[bytes]:
    """The archive of everything below `root`. What cannot be read is reported as (path, reason) and left out."""
    yield _header(tarfile.TarInfo("."), os.stat(root), tarfile.DIRTYPE)
    for folder, directories, files in os.walk(root, onerror=lambda error: _report_os(report, error)):
        for name in sorted(directories) + sorted(files):
            path = os.path.join(folder, name)
            info = tarfile.TarInfo("./" + os.path.relpath(path, root))
            try:
                async for piece in _member(info, path, report):
                    yield piece
            except OSError as error:
                _report_os(report, error)
    yield _END


def _report_os(report: Report, error: OSError) -> None:
    report(str(error.filename), error.strerror or type(error).__name__)


async def _member(info: tarfile.TarInfo, path: str, report: Report) -> AsyncIterator[bytes]:
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        yield _header(info, status, tarfile.DIRTYPE)
    elif stat.S_ISLNK(status.st_mode):
        info.linkname = os.readlink(path)
        yield _header(info, status, tarfile.SYMTYPE)
    elif stat.S_ISREG(status.st_mode):
        async for piece in _regular(info, path, report):
            yield piece
    else:
        report(path, "is neither a file, a directory nor a symlink; left out")


async def _regular(info: tarfile.TarInfo, path: str, report: Report) -> AsyncIterator[bytes]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        info.size = status.st_size
        yield _header(info, status, tarfile.REGTYPE)
        left = info.size
        while left > 0:
            data = file.read(min(READ_BYTES, left))
            if not data:
                # The header has promised the length, so the rest must be filled.
                report(path, f"became {left} bytes shorter while it was read")
                data = bytes(min(READ_BYTES, left))
            left -= len(data)
            yield data
        yield bytes(-info.size % BLOCK_BYTES)


def _header(info: tarfile.TarInfo, status: os.stat_result, kind: bytes) -> bytes:
    info.type = kind
    info.mode = stat.S_IMODE(status.st_mode) & 0o777
    info.mtime = int(status.st_mtime)
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


class PieceReader:
    """Exact amounts out of pieces of any size."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._buffer = bytearray()

    async def exactly(self, count: int) -> bytes:
        """`count` bytes (small). Raises `ProtocolError` when the stream ends before."""
        while len(self._buffer) < count:
            piece = await anext(self._pieces, None)
            if piece is None:
                raise ProtocolError("the archive from the sandbox is cut off")
            self._buffer += piece
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    async def drain(self) -> bool:
        """Read to the end; whether all of the rest was zero bytes."""
        is_zero = not any(self._buffer)
        async for piece in self._pieces:
            is_zero = is_zero and not any(piece)
        return is_zero


@dataclass(frozen=True, slots=True)
class Member:
    """One header; for regular files its content follows in the stream and must be read with `content`."""

    name: str
    kind: bytes
    mode: int
    mtime_s: int
    size: int
    link: str


async def members(reader: PieceReader) -> AsyncIterator[Member]:
    """Every member until the end mark; the caller reads each regular file's content before it goes on.

    Raises `ProtocolError` for a damaged header or anything but zeros after the end mark.
    """
    longer: dict[str, str] = {}
    while True:
        block = await reader.exactly(BLOCK_BYTES)
        if not any(block):
            if not await reader.drain():
                raise ProtocolError("the archive from the sandbox goes on after its end mark")
            return
        info = _parsed(block)
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            value = (await _extension(reader, info)).split(b"\0", 1)[0]
            field = "path" if info.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
            longer[field] = value.decode("utf-8", "surrogateescape")
        elif info.type == tarfile.XHDTYPE:
            longer.update(_pax(await _extension(reader, info)))
        elif info.type == tarfile.XGLTYPE:
            await _extension(reader, info)
        else:
            yield _member_of(info, longer)
            longer = {}


def _parsed(block: bytes) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise ProtocolError(f"the archive from the sandbox is damaged: {error}") from error


def _member_of(info: tarfile.TarInfo, longer: dict[str, str]) -> Member:
    kind = tarfile.REGTYPE if info.type in tarfile.REGULAR_TYPES else info.type
    size = int(longer.get("size", info.size)) if kind == tarfile.REGTYPE else 0
    if kind != tarfile.REGTYPE and info.size:
        raise ProtocolError(f"the archive from the sandbox has a member of unknown kind {info.type!r}")
    return Member(
        name=longer.get("path", info.name),
        kind=kind,
        mode=info.mode & 0o777,
        mtime_s=int(info.mtime),
        size=size,
        link=longer.get("linkpath", info.linkname),
    )


async def _extension(reader: PieceReader, info: tarfile.TarInfo) -> bytes:
    if not 0 <= info.size <= EXTENSION_BYTES_MAX:
        raise ProtocolError(f"the archive from the sandbox has a header of {info.size} bytes")
    data = await reader.exactly(info.size + -info.size % BLOCK_BYTES)
    return data[: info.size]


def _pax(data: bytes) -> dict[str, str]:
    """The records `LENGTH KEY=VALUE\\n` of a PAX header that matter here."""
    found = {}
    try:
        while data:
            length = int(data[: data.index(b" ")])
            key, _, value = data[data.index(b" ") + 1 : length - 1].partition(b"=")
            if length < 5 or data[length - 1 : length] != b"\n":
                raise ValueError("record without end")
            if key in (b"path", b"linkpath", b"size"):
                found[key.decode()] = value.decode("utf-8", "surrogateescape")
            data = data[length:]
        int(found.get("size", "0"))
    except ValueError as error:
        raise ProtocolError(f"the archive from the sandbox has a damaged PAX header: {error}") from error
    return found


async def content(reader: PieceReader, member: Member) -> AsyncIterator[bytes]:
    """The bytes of a regular member, padding removed."""
    left = member.size
    while left > 0:
        data = await reader.exactly(min(READ_BYTES, left))
        left -= len(data)
        yield data
    await reader.exactly(-member.size % BLOCK_BYTES)
