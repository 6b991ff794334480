"""Long calls of the control plane that tell of their progress: NDJSON lines in, `Progress` values and a result out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from agentenv.client.api import Api
from agentenv.client.errors import ConnectionLost, ProtocolError, from_answer
from agentenv.client.transport import peer_of
from agentenv.client.values import Json, as_object, integer, text

T = TypeVar("T")

NDJSON: Final = "application/x-ndjson"
# The server repeats itself every 10 s.
LINE_WAIT_S_MAX: Final = 60.0
# The last line may hold a report of many thousand damages.
LINE_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """What the server does just now, and how far it is with that step; without a total it cannot be counted."""

    text: str
    done_bytes: int
    total_bytes: int | None

    @classmethod
    def of(cls, data: Json) -> Progress:
        """Raises `ProtocolError`."""
        total = integer(data, "totalBytes") if "totalBytes" in data else None
        return cls(text(data, "progress"), integer(data, "doneBytes", 0), total)


async def events(
    api: Api, path: str, body: Mapping[str, Any] | None, field: str, of: Callable[[Any], T]
) -> AsyncGenerator[Progress | T, None]:
    """POST, then yield each sign of progress and, last, the result, which `of` makes of `field` of the last line.

    Leaving early closes the connection; the server then stops what nobody else waits for. Raises `ApiError` classes
    also for an error in the stream, `TransportError` classes, `ProtocolError`.
    """
    async with api.post(path, body=body, accept=NDJSON, read_timeout_s=LINE_WAIT_S_MAX) as pieces:
        async for line in _lines(pieces):
            data = _decoded(line, path)
            if "error" in data:
                raise _error_of(data["error"])
            if field in data:
                yield of(data[field])
                return
            yield Progress.of(data)
    raise ConnectionLost(f"{peer_of(api.base_url)} ended its answer to {path} before the result")


async def result_of(stream: AsyncGenerator[Progress | T, None], progress: Callable[[Progress], None] | None) -> T:
    """The result at the end of `events`; `progress` is called with every sign before it."""
    async with contextlib.aclosing(stream) as items:
        async for item in items:
            if not isinstance(item, Progress):
                return item
            if progress is not None:
                progress(item)
    raise AssertionError("events end with a result or raise")


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines without their ends. Raises `ProtocolError` for one that is too long."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        if b"\n" in piece:
            *whole, tail = bytes(rest).split(b"\n")
            for line in whole:
                yield line
            rest = bytearray(tail)
        if len(rest) > LINE_BYTES_MAX:
            raise ProtocolError(f"a line of the answer is longer than {LINE_BYTES_MAX} bytes")


def _decoded(line: bytes, path: str) -> Json:
    try:
        return as_object(json.loads(line), path)
    except ValueError as error:
        raise ProtocolError(f"{path}: a line of the answer is not JSON") from error


def _error_of(value: Any) -> Exception:
    data = as_object(value, "error")
    word = data.get("error_code")
    return from_answer(integer(data, "code", 500), text(data, "message"), word if isinstance(word, str) else None)
