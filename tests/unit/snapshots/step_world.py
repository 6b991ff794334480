"""Tasks over one store, stepped one operation at a time in an order that a test chooses.

Every operation of a task's store stands still before it is carried out, and so does every sleep. A `Schedule` says
which of the standing tasks goes on; time passes only when a sleeping one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.clock import FakeClock
from agentenv.errors import StoreUnavailable
from agentenv.snapshots.gclock import Timing
from agentenv.snapshots.stores import Entry, MemoryStore, Object
from agentenv.snapshots.stores.oss import OPERATION_S_MAX

# Longer runs are a bug of the test: nobody waits for ever here.
STEPS_MAX = 2_000


@dataclass(slots=True)
class _Standing:
    what: str
    go: asyncio.Future[None]
    sleep_s: float = 0.0


class Steps:
    """The scheduler. `choose` gets the names of tasks that stand still, sorted, and returns one."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.trace: list[str] = []
        self._standing: dict[str, _Standing] = {}

    async def stand(self, task: str, what: str, sleep_s: float = 0.0) -> None:
        """Wait for one's turn."""
        standing = _Standing(what, asyncio.get_running_loop().create_future(), sleep_s)
        former = self._standing.get(task)
        assert former is None or former.go.cancelled(), f"{task} does two things at once"
        self._standing[task] = standing
        try:
            await standing.go
        except asyncio.CancelledError:
            # Given up by the task itself: it is not carried out.
            if self._standing.get(task) is standing:
                del self._standing[task]
            raise

    async def run(
        self, tasks: dict[str, Coroutine[Any, Any, Any]], choose: Callable[[Sequence[str]], str]
    ) -> dict[str, Any]:
        """Run all to their ends; returns what each returned or raised."""
        running = {name: asyncio.create_task(work, name=name) for name, work in tasks.items()}
        try:
            for _ in range(STEPS_MAX):
                await self._settle(running)
                if not self._standing:
                    break
                name = choose(sorted(self._standing))
                standing = self._standing.pop(name)
                if standing.go.cancelled():
                    continue
                self.clock.advance(standing.sleep_s)
                self.trace.append(f"{name}: {standing.what}")
                standing.go.set_result(None)
            else:
                raise AssertionError("no end:\n" + "\n".join(self.trace[-50:]))
            results = await asyncio.gather(*running.values(), return_exceptions=True)
        finally:
            for task in running.values():
                task.cancel()
        return dict(zip(running, results, strict=True))

    async def _settle(self, running: dict[str, asyncio.Task[Any]]) -> None:
        """Let every task run until it stands still or is over."""
        for _ in range(STEPS_MAX):
            if all(task.done() or name in self._standing for name, task in running.items()):
                return
            await asyncio.sleep(0)
        raise AssertionError("a task waits for something outside of the schedule")

    def timing(self, task: str) -> Timing:
        """The clock and the sleep of one task's node."""

        async def sleep(seconds: float) -> None:
            await self.stand(task, f"sleep {seconds:g}", seconds)

        return Timing(self.clock.monotonic, sleep)


class SteppedStore:
    """One task's way to a store: as many operations at once as it likes are carried out one per turn.

    One that stands for longer than a store's deadline fails, as a real one does, and is not carried out.
    """

    def __init__(self, steps: Steps, task: str, store: MemoryStore) -> None:
        self._steps = steps
        self._task = task
        self._store = store
        self._one = asyncio.Lock()
        # Off while a test looks at the outcome.
        self.is_stepped = True

    async def _turn(self, what: str, operation: Callable[[], Awaitable[Any]]) -> Any:
        if not self.is_stepped:
            return await operation()
        async with self._one:
            asked_at = self._steps.clock.monotonic()
            await self._steps.stand(self._task, what)
            if self._steps.clock.monotonic() - asked_at > OPERATION_S_MAX:
                raise StoreUnavailable(f"{what}: no answer in time")
            return await operation()

    async def get(self, key: str) -> Object:
        return await self._turn(f"get {key}", lambda: self._store.get(key))  # type: ignore[no-any-return]

    async def put(self, key: str, content: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        put = self._store.put
        return await self._turn(  # type: ignore[no-any-return]
            f"put {key}", lambda: put(key, content, if_absent=if_absent, if_match=if_match)
        )

    async def list(self, folder: str) -> list[Entry]:
        return await self._turn(f"list {folder}", lambda: self._store.list(folder))  # type: ignore[no-any-return]

    async def stat(self, key: str) -> Entry | None:
        return await self._turn(f"stat {key}", lambda: self._store.stat(key))  # type: ignore[no-any-return]

    async def delete(self, key: str) -> None:
        await self._turn(f"delete {key}", lambda: self._store.delete(key))
