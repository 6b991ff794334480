"""`Idempotency-Key` on create: a repeat gets the first answer instead of a second sandbox.

The store is in memory, bounded, and forgets after a time. Only successes are kept: a create that failed left
nothing behind, so its repeat may try again (the SDKs repeat a 429 with the same key). It does not survive a
restart of the server; a repeat across one starts a second sandbox.

A keyed create does not end with its client's connection: it runs in a task of its own, so that the retry of a
client whose connection broke finds the sandbox rather than making another.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response

from agentenv.api import errors
from agentenv.clock import Clock
from agentenv.errors import AtCapacity, InvalidRequest, NodeStopping

KEY_PATTERN: Final = re.compile(r"[a-z0-9-]{1,255}")


@dataclass(frozen=True, slots=True)
class _Running:
    digest: bytes
    task: asyncio.Task[Response]


@dataclass(frozen=True, slots=True)
class _Answered:
    digest: bytes
    status: int
    body: bytes
    expires_at: float


class Idempotency:
    """The store of one app. Belongs to one event loop."""

    def __init__(self, clock: Clock, entries_max: int, ttl_s: float) -> None:
        self._clock = clock
        self._entries_max = entries_max
        self._ttl_s = ttl_s
        # Insertion order is order of expiry: an entry is inserted anew when it is answered.
        self._entries: dict[str, _Running | _Answered] = {}

    async def once(self, key: str, scope: str, body: bytes, work: Callable[[], Awaitable[Response]]) -> Response:
        """Run `work` for the first request with `key`, replay its answer to later ones.

        Raises `InvalidRequest` (malformed key), `IdempotencyMismatch`, `IdempotencyInProgress`, `AtCapacity` when
        the store is full of running requests, `NodeStopping` after `close`, and what `work` raises. Cancelling it
        does not cancel `work`.
        """
        if KEY_PATTERN.fullmatch(key) is None:
            raise InvalidRequest("Idempotency-Key: must be 1 to 255 characters of a-z, 0-9 and -")
        self._forget_expired()
        digest = hashlib.sha256(scope.encode() + b"\0" + body).digest()
        match self._entries.get(key):
            case None:
                return await self._first(key, digest, work)
            case entry if entry.digest != digest:
                raise errors.IdempotencyMismatch("Idempotency-Key: was used before with another request")
            case _Running():
                raise errors.IdempotencyInProgress("the first request with this Idempotency-Key is still running")
            case _Answered(status=status, body=answer):
                return Response(answer, status, media_type="application/json")

    async def close(self) -> None:
        """Cancel what still runs and wait for it; the node finishes or undoes it."""
        tasks = [entry.task for entry in self._entries.values() if isinstance(entry, _Running)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _first(self, key: str, digest: bytes, work: Callable[[], Awaitable[Response]]) -> Response:
        self._make_room()
        task = asyncio.ensure_future(_call(work))
        self._entries[key] = _Running(digest, task)
        task.add_done_callback(lambda done: self._settle(key, digest, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if task.cancelled() and waiter is not None and not waiter.cancelling():
                # Not we were cancelled, but the work, by close().
                raise NodeStopping("the server is shutting down; the create was given up") from None
            raise

    def _settle(self, key: str, digest: bytes, task: asyncio.Task[Response]) -> None:
        del self._entries[key]
        if task.cancelled() or task.exception() is not None:
            return
        # Errors are raised, so an answer is a success.
        response = task.result()
        expires_at = self._clock.monotonic() + self._ttl_s
        self._entries[key] = _Answered(digest, response.status_code, bytes(response.body), expires_at)

    def _forget_expired(self) -> None:
        now = self._clock.monotonic()
        expired: list[str] = []
        for key, entry in self._entries.items():
            if isinstance(entry, _Answered):
                if entry.expires_at > now:
                    break
                expired.append(key)
        for key in expired:
            del self._entries[key]

    def _make_room(self) -> None:
        if len(self._entries) < self._entries_max:
            return
        oldest = next((key for key, entry in self._entries.items() if isinstance(entry, _Answered)), None)
        if oldest is None:
            raise AtCapacity(f"{self._entries_max} requests with an Idempotency-Key are running already")
        del self._entries[oldest]


async def _call(work: Callable[[], Awaitable[Response]]) -> Response:
    return await work()
