"""Files in a sandbox: content as streams over /files, everything else over the daemon's Filesystem RPC.

Paths are the guest's: absolute, relative to the user's home, or beginning with `~`. Any character may be in them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

from agentenv.client.errors import AlreadyExists, ProtocolError, TransferIncomplete
from agentenv.client.rpc import GuestChannel
from agentenv.client.transport import WRITE_TIMEOUT_S, received
from agentenv.client.values import EntryInfo, as_list

# A file that does not move for this long will not move at all; the whole transfer has no limit.
TRANSFER_IDLE_TIMEOUT_S: Final = 120.0
CHUNK_BYTES: Final = 256 * 1024


class Files:
    """The file system of one sandbox. `user` of each method is the guest's user whose rights and home count."""

    def __init__(self, channel: GuestChannel) -> None:
        self._channel = channel

    def _params(self, path: str, user: str | None) -> dict[str, str]:
        return {"path": path} if user is None else {"path": path, "username": user}

    @contextlib.asynccontextmanager
    async def open(self, path: str, *, user: str | None = None) -> AsyncIterator[AsyncIterator[bytes]]:
        """The content of a file as pieces. Raises `NotFound`, `BadRequest` (a directory), `TransferIncomplete`."""
        async with self._channel.transport.stream(
            "GET",
            f"{self._channel.base_url}/files",
            params=self._params(path, user),
            headers=self._channel.headers(),
            read_timeout_s=TRANSFER_IDLE_TIMEOUT_S,
        ) as answer:
            length = answer.headers.get("content-length")
            yield _checked(received(answer, CHUNK_BYTES), int(length) if length else None, path)

    async def read(self, path: str, *, user: str | None = None) -> bytes:
        """The whole content, in memory. Raises like `open`."""
        async with self.open(path, user=user) as pieces:
            return b"".join([piece async for piece in pieces])

    async def write(
        self,
        path: str,
        content: bytes | AsyncIterator[bytes],
        *,
        size_bytes: int | None = None,
        user: str | None = None,
    ) -> EntryInfo:
        """Write a file, making missing directories, and check its size afterwards.

        `size_bytes` is what an iterator will deliver, if known; the daemon then refuses a shorter body. Raises
        `BadRequest` (a directory is in the way), `StorageFull`, `TransferIncomplete`.
        """
        known_size = len(content) if isinstance(content, bytes) else size_bytes
        counter = _Counter(content, known_size, path)
        headers = {**self._channel.headers(), "Content-Type": "application/octet-stream"}
        if known_size is not None:
            headers["Content-Length"] = str(known_size)
        async with self._channel.transport.stream(
            "POST",
            f"{self._channel.base_url}/files",
            params=self._params(path, user),
            headers=headers,
            content=counter.pieces(),
            read_timeout_s=TRANSFER_IDLE_TIMEOUT_S,
            write_timeout_s=max(WRITE_TIMEOUT_S, TRANSFER_IDLE_TIMEOUT_S),
        ) as answer:
            written = _written_path(await answer.aread())
        entry = await self.stat(written, user=user)
        # /dev/stdout and the like have no size of their own, so only regular files are compared.
        if entry.kind == "file" and entry.size_bytes != counter.bytes_sent:
            raise TransferIncomplete(f"{path}: {counter.bytes_sent} bytes sent, {entry.size_bytes} bytes arrived")
        return entry

    async def stat(self, path: str, *, user: str | None = None) -> EntryInfo:
        """Raises `NotFound`."""
        answer = await self._channel.call("filesystem.Filesystem/Stat", {"path": path}, user=user)
        return EntryInfo.of(answer.get("entry"))

    async def list(self, path: str, *, depth: int = 1, user: str | None = None) -> list[EntryInfo]:
        """The entries below a directory, `depth` levels of them. Raises `NotFound`, `BadRequest` (not a directory)."""
        message = {"path": path, "depth": depth}
        answer = await self._channel.call("filesystem.Filesystem/ListDir", message, user=user)
        return [EntryInfo.of(item) for item in as_list(answer.get("entries", []), "entries")]

    async def make_directory(self, path: str, *, user: str | None = None) -> bool:
        """Make it and its parents; False when it is there already. Raises `BadRequest` when a file is in the way."""
        try:
            await self._channel.call("filesystem.Filesystem/MakeDir", {"path": path}, user=user)
        except AlreadyExists:
            return False
        return True

    async def move(self, source: str, destination: str, *, user: str | None = None) -> EntryInfo:
        """Rename. Raises `NotFound`."""
        message = {"source": source, "destination": destination}
        answer = await self._channel.call("filesystem.Filesystem/Move", message, user=user)
        return EntryInfo.of(answer.get("entry"))

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """Remove a file, or a directory with all below it; a missing path is fine."""
        await self._channel.call("filesystem.Filesystem/Remove", {"path": path}, user=user)


class _Counter:
    """Passes the content through, counts it, and holds it to the announced size."""

    def __init__(self, content: bytes | AsyncIterator[bytes], announced: int | None, path: str) -> None:
        self._content = content
        self._announced = announced
        self._path = path
        self.bytes_sent = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        if isinstance(self._content, bytes):
            for start in range(0, len(self._content), CHUNK_BYTES):
                piece = self._content[start : start + CHUNK_BYTES]
                self.bytes_sent += len(piece)
                yield piece
            return
        async for piece in self._content:
            self.bytes_sent += len(piece)
            if self._announced is not None and self.bytes_sent > self._announced:
                raise self._changed("more")
            yield piece
        if self._announced is not None and self.bytes_sent < self._announced:
            raise self._changed("fewer")

    def _changed(self, word: str) -> TransferIncomplete:
        return TransferIncomplete(
            f"{self._path}: {word} than the announced {self._announced} bytes; the source changed while it was sent"
        )


async def _checked(pieces: AsyncIterator[bytes], length: int | None, path: str) -> AsyncIterator[bytes]:
    """The pieces, and an error at the end when their sum is not the announced length."""
    received = 0
    async for piece in pieces:
        received += len(piece)
        yield piece
    if length is not None and received != length:
        raise TransferIncomplete(f"{path}: {length} bytes announced, {received} bytes arrived")


def _written_path(body: bytes) -> str:
    """The absolute path that the daemon wrote to. Raises `ProtocolError`."""
    try:
        entries: Any = json.loads(body)
        path = entries[0]["path"]
    except (ValueError, LookupError, TypeError) as error:
        raise ProtocolError("the answer to an upload does not name the file") from error
    if not isinstance(path, str):
        raise ProtocolError("the answer to an upload does not name the file")
    return path
