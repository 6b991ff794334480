"""One connection to the control socket: many requests at a time, answers in any order.

Owns the stream and who waits for which answer. Does not own reconnecting nor what an error means.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from agentenv.block.wire import FRAME_BYTES_MAX, HEADER, Answer, Operation, decode, encode, frame


class ConnectionLostError(Exception):
    """The stream ended or broke; requests that were sent may have been carried out."""


class Connection:
    """A live stream. Once `is_closed` it never works again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._next_id = 1
        self._closed = False
        self._receiver = asyncio.create_task(self._receive(), name="blockd answers")

    @classmethod
    async def open(cls, socket: Path) -> Connection:
        """Connects. Raises `OSError`."""
        return cls(*await asyncio.open_unix_connection(socket))

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended."""
        return self._closed

    async def request(self, operation: Operation) -> Answer:
        """Send and wait. Raises `ConnectionLostError`, or `ValueError` for a request that fits no frame.

        Safe to cancel; the operation may be carried out all the same, and its answer is dropped.
        """
        if self._closed:
            raise ConnectionLostError("the connection is closed")
        request_id, self._next_id = self._next_id, self._next_id + 1
        body = encode(request_id, operation)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        try:
            self._writer.write(frame(body))
            await self._writer.drain()
            return await answer
        except OSError as error:
            raise ConnectionLostError(str(error)) from error
        finally:
            self._waiting.pop(request_id, None)

    async def close(self) -> None:
        """End the stream and whoever waits on it. Idempotent."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._end(ConnectionLostError("the client was closed"))
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _receive(self) -> None:
        """Hands answers out until the stream ends."""
        try:
            while True:
                length = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
                if length > FRAME_BYTES_MAX:
                    raise ConnectionLostError(f"an answer of {length} bytes is over the limit")
                answer = decode(await self._reader.readexactly(length))
                future = self._waiting.get(answer.id)
                if future is not None and not future.done():
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError, ConnectionLostError) as error:
            self._end(ConnectionLostError(f"the connection ended: {error}"))

    def _end(self, error: ConnectionLostError) -> None:
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
