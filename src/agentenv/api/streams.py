"""Answers that are sent while the work goes on: progress as NDJSON with the result as its last line, and archives.

Owns pacing, heart beats and what happens when the client goes away, stops reading, or the work fails half-way. Owns no
work: what runs here is an awaitable of the caller, which is always cancelled and awaited when its client is gone, so
what must go on for others (a build that several wait for) has to be held behind the interface that it came from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from msgspec import UNSET
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentenv.api import errors
from agentenv.api.call import Call, Streamed, beside_client, either, internal_error, json_response, settled
from agentenv.api.settings import ApiSettings
from agentenv.api.stored import ProgressLine
from agentenv.api.wire import encode
from agentenv.errors import AenvError
from agentenv.model import Progress, Report

NDJSON: Final = "application/x-ndjson"
# Steps that wait for a client which reads slowly; the oldest are dropped, because only the last one matters.
LINES_WAITING_MAX: Final = 64
# A client that takes no byte for so long is given up like one that is gone.
SEND_S_MAX: Final = 120.0

Work = Callable[[Report], Awaitable[Any]]


async def with_progress(
    call: Call[Any], work: Work, status: int, first: str, last: Callable[[Any], ProgressLine]
) -> Response:
    """The result of `work` as JSON with `status`, or, to a client that accepts NDJSON, a 200 stream of progress.

    `first` is what the stream says at once, `last` wraps the result for its last line. Raises what `work` raises, but
    not from inside a stream, whose last line then holds the error.
    """
    if not accepts_ndjson(call.headers):
        return json_response(status, await work(lambda progress: None))
    return ProgressStream(work, first, last, call.settings)


def accepts_ndjson(headers: Headers) -> bool:
    """Whether the client names NDJSON; `*/*` does not, as every client sends it."""
    ranges = (part for value in headers.getlist("accept") for part in value.split(","))
    return any(part.partition(";")[0].strip().lower() == NDJSON for part in ranges)


class _News:
    """Progress that was reported and not sent yet. Of each step only the latest sign counts."""

    def __init__(self) -> None:
        self._waiting: deque[Progress] = deque(maxlen=LINES_WAITING_MAX)

    def report(self, progress: Progress) -> None:
        if self._waiting and self._waiting[-1].text == progress.text:
            self._waiting.pop()
        self._waiting.append(progress)

    def taken(self) -> list[Progress]:
        items = list(self._waiting)
        self._waiting.clear()
        return items


class ProgressStream(Streamed):
    """Lines of `{"progress": ...}` and one last line with the result, or with `{"error": {code, message}}`.

    The status is 200 whatever the outcome: it is sent before the work is done.
    """

    media_type = NDJSON

    def __init__(self, work: Work, first: str, last: Callable[[Any], ProgressLine], settings: ApiSettings) -> None:
        super().__init__()
        # The length that an empty body would have.
        del self.headers["content-length"]
        self._work = work
        self._last = last
        self._settings = settings
        self._said = Progress(first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do the work and tell of it. Safe to cancel: the work has ended then, too."""
        news = _News()
        failure: BaseException | None = None
        async with beside_client(self._work(news.report), receive) as (work, gone):
            try:
                await _send(send, _start(self))
                await self._tell(news, work, gone, send)
                line = self._last(await settled(work, gone, self.budget_s))
            except errors.ClientGone as error:
                self.ended(_status(error), error)
                return
            except AenvError as error:
                failure, line = error, ProgressLine(error=errors.error_body(error))
            except Exception as error:
                failure = internal_error(self.operation, error)
                line = ProgressLine(error=errors.error_body(failure))
        try:
            await _send(send, _body(_encoded(line), more=False))
        except errors.ClientGone as error:
            failure = failure or error
        self.ended(200 if failure is None else _status(failure), failure)

    async def _tell(self, news: _News, work: asyncio.Future[Any], gone: asyncio.Future[None], send: Send) -> None:
        """Send lines until the work is done, the client is gone, or the budget is used up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.budget_s
        await self._say(self._said, send)
        said_at = loop.time()
        while not work.done() and not gone.done() and loop.time() < deadline:
            await either(work, gone, self._settings.progress_interval_s)
            lines = news.taken()
            if not lines and loop.time() - said_at >= self._settings.progress_heartbeat_s:
                lines = [self._said]
            for progress in lines:
                await self._say(progress, send)
                said_at = loop.time()

    async def _say(self, progress: Progress, send: Send) -> None:
        self._said = progress
        line = ProgressLine(
            progress=progress.text,
            done_bytes=progress.done_bytes or UNSET,
            total_bytes=UNSET if progress.total_bytes is None else progress.total_bytes,
        )
        await _send(send, _body(_encoded(line), more=True))


class ArchiveStream(Streamed):
    """A file that is made while the client waits and then sent in pieces.

    Entering `source` makes it and iterating reads it. An error before the first piece is answered as everywhere; after
    it the answer is cut off without its end, which no client can take for a whole file.
    """

    def __init__(self, source: AbstractAsyncContextManager[AsyncIterator[bytes]], media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._source = source
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make and send it. Safe to cancel: the source has been left then, too."""
        failure: AenvError | None = None
        async with beside_client(self._pieces(send), receive) as (work, gone):
            await either(work, gone, self.budget_s)
            try:
                await settled(work, gone, self.budget_s)
            except AenvError as error:
                failure = error
            except Exception as error:
                failure = internal_error(self.operation, error)
        if failure is None:
            # Only now, after the source was left: its end is what tells the client that the file is whole.
            await _send(send, _body(b"", more=False))
        elif not self._started:
            await errors.error_response(failure)(scope, receive, send)
        self.ended(200 if failure is None else _status(failure), failure)

    async def _pieces(self, send: Send) -> None:
        async with self._source as pieces:
            async for piece in pieces:
                if not self._started:
                    self._started = True
                    await _send(send, _start(self))
                await _send(send, _body(piece, more=True))
        if not self._started:
            self._started = True
            await _send(send, _start(self))


def _status(error: BaseException) -> int:
    return errors.answer_for(error).status if isinstance(error, AenvError) else 500


def _encoded(line: ProgressLine) -> bytes:
    return encode(line) + b"\n"


def _start(response: Response) -> dict[str, Any]:
    return {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _send(send: Send, message: dict[str, Any]) -> None:
    """Send one message. Raises `ClientGone` when the client takes nothing for `SEND_S_MAX`, or has gone."""
    try:
        async with asyncio.timeout(SEND_S_MAX):
            await send(message)
    except (TimeoutError, OSError) as error:
        raise errors.ClientGone(f"the client took no byte for {SEND_S_MAX:g} seconds, or has gone") from error
