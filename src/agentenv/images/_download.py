"""One blob onto the disk: hashed as it comes, resumed where it broke off, bounded in size and time.

Owns the partial file and the hash over it. What is in the file and what was hashed are always the same bytes, so a
resume needs nothing but the offset; whatever a mirror said before, the digest at the end decides.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Final

import httpx

from agentenv.errors import ImageError, RegistryError, StorageFull
from agentenv.images._http import RegistryHttp, Request
from agentenv.images._retry import Transient
from agentenv.images._threads import to_its_end
from agentenv.images.manifest import Descriptor

# Written and hashed at once, in a worker thread: enough to make the change of threads cheap.
PIECE_BYTES: Final = 1 << 20
# A blob may take its size at this rate and a while on top; slower is as good as never.
SLOWEST_BYTES_PER_S: Final = 64 << 10
GRACE_S: Final = 300.0
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

# Bytes that arrived since the last call; negative when they turned out to be wrong and are fetched again.
OnBytes = Callable[[int], None]


class DigestMismatch(RegistryError):
    """The bytes are not those of the digest: a damaged or lying server."""


class BlobDownload:
    """The state of one download, kept across attempts and across mirrors. `open` it first, `close` it always."""

    def __init__(self, http: RegistryHttp, blob: Descriptor, into: Path, on_bytes: OnBytes) -> None:
        self._http = http
        self._blob = blob
        self._into = into
        self._on_bytes = on_bytes
        self._file: FileIO | None = None
        self._hash = hashlib.sha256()
        self._offset = 0
        self._etag: str | None = None
        # Whether the bytes so far are of one answer of one server: then it alone is to blame for a wrong digest.
        self._of_one_answer = True
        self._until = http.clock.monotonic() + GRACE_S + blob.size_bytes / SLOWEST_BYTES_PER_S

    async def open(self) -> None:
        """Take over what an earlier download left in the file. Raises `StorageFull`, `ImageError`."""
        await to_its_end(self._open_file)
        if self._offset:
            self._of_one_answer = False
            self._on_bytes(self._offset)

    async def close(self) -> None:
        await to_its_end(self._close_file)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    async def fetch(self, request: Request) -> None:
        """Get the rest from this place and verify the whole. Raises `DigestMismatch`, `RegistryError`,
        `ImageNotFound`, `StorageFull`; the state stays good for another place."""
        self._etag = None
        for is_last in (False, True):
            await self._fetch_rest(request)
            if "sha256:" + self._hash.hexdigest() == self._blob.digest:
                return
            blamed = self._of_one_answer or is_last
            await self._start_over()
            if blamed:
                raise DigestMismatch(f"{request.what}: the content has another digest")
            # Somebody's piece was wrong, perhaps an earlier server's: once more, all of it from here.

    async def _fetch_rest(self, request: Request) -> None:
        failures = 0
        while self._offset < self._blob.size_bytes:
            before = self._offset
            delay_wanted: float | None = None
            try:
                await self._attempt(request)
                if self._offset >= self._blob.size_bytes:
                    return
                cause = Transient(f"{request.what}: ended after {self._offset} of {self._blob.size_bytes} bytes")
            except Transient as error:
                cause, delay_wanted = error, error.retry_after_s
            # A connection that breaks every gigabyte is no reason to give up.
            failures = 1 if self._offset > before else failures + 1
            await self._wait(request, failures, delay_wanted, cause)

    async def _wait(self, request: Request, failures: int, delay_wanted: float | None, cause: Transient) -> None:
        policy = self._http.retry
        attempts = min(2, policy.attempts_max) if request.endpoint.is_mirror else policy.attempts_max
        delay_s = policy.delay_s(failures, delay_wanted)
        late = self._http.clock.monotonic() + delay_s > self._until
        if failures >= attempts or late or delay_s > policy.deadline_s:
            raise RegistryError(f"{cause} (given up after {failures} attempts without progress)") from cause
        await self._http.sleep(delay_s)

    async def _attempt(self, request: Request) -> None:
        headers = dict(request.headers)
        if self._offset:
            headers["Range"] = f"bytes={self._offset}-"
            # A weak tag says nothing about bytes. Without one the digest still tells.
            if self._etag is not None:
                headers["If-Range"] = self._etag
        asked = Request(request.endpoint, request.repository, request.url, headers)
        async with self._http.open(asked) as response:
            await self._take_position(response, request)
            tag = response.headers.get("etag")
            self._etag = tag if tag is not None and tag.startswith('"') else None
            await self._take_body(response, request)

    async def _take_position(self, response: httpx.Response, request: Request) -> None:
        """Whether the body begins where we are; a server without ranges sends everything again."""
        if response.status_code == 206:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
            if found is None or int(found[1]) != self._offset:
                raise RegistryError(f"{request.what}: answers a range from {self._offset} with another one")
            self._of_one_answer = False
        elif self._offset:
            await self._start_over()

    async def _take_body(self, response: httpx.Response, request: Request) -> None:
        piece = bytearray()
        try:
            async for part in response.aiter_raw():
                if self._offset + len(piece) + len(part) > self._blob.size_bytes:
                    raise RegistryError(f"{request.what}: sends more than the {self._blob.size_bytes} bytes it should")
                piece += part
                if self._http.clock.monotonic() > self._until:
                    raise RegistryError(f"{request.what}: slower than {SLOWEST_BYTES_PER_S >> 10} KiB/s; given up")
                if len(piece) >= PIECE_BYTES:
                    full, piece = piece, bytearray()
                    await self._append(full)
        finally:
            # What arrived before a break is kept: the next attempt goes on behind it. Not awaited, since this may be a
            # cancel; it is less than a piece.
            if piece:
                self._write(piece)
                self._on_bytes(len(piece))

    async def _append(self, piece: bytearray) -> None:
        await to_its_end(self._write, piece)
        self._on_bytes(len(piece))

    def _write(self, piece: bytearray) -> None:
        assert self._file is not None, "opened before"
        self._hash.update(piece)
        self._offset += len(piece)
        try:
            written = self._file.write(piece)
        except OSError as error:
            raise self._no_room(error) from error
        if written != len(piece):
            raise StorageFull(self._needs(self._free_bytes()))

    async def _start_over(self) -> None:
        lost, self._offset = self._offset, 0
        self._hash, self._of_one_answer, self._etag = hashlib.sha256(), True, None
        await to_its_end(self._truncate)
        self._on_bytes(-lost)

    def _truncate(self) -> None:
        assert self._file is not None, "opened before"
        self._file.seek(0)
        self._file.truncate(0)

    def _open_file(self) -> None:
        try:
            self._file = FileIO(os.open(self._into, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
        except OSError as error:
            raise self._no_room(error) from error
        self._take_over(self._file)
        if (free := self._free_bytes()) < self._blob.size_bytes - self._offset:
            raise StorageFull(self._needs(free))

    def _take_over(self, file: FileIO) -> None:
        there = file.seek(0, os.SEEK_END)
        file.seek(0)
        if there > self._blob.size_bytes:
            there = file.truncate(0)
        while piece := file.read(PIECE_BYTES):
            self._hash.update(piece)
        self._offset = there

    def _free_bytes(self) -> int:
        status = os.statvfs(self._into.parent)
        return status.f_bavail * status.f_frsize

    def _needs(self, free: int) -> str:
        missing = self._blob.size_bytes - self._offset
        return f"layer {self._blob.digest} needs {missing} bytes in {self._into.parent}, where {free} are free"

    def _no_room(self, error: OSError) -> ImageError | StorageFull:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFull(self._needs(self._free_bytes()))
        return ImageError(f"{self._into}: cannot be written: {error.strerror}")
