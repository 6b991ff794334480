"""Gives out network slots, kept ready in a pool, and takes them back.

Owns which slot is where; `host` does the work, in threads. Every slot index is in exactly one place:

```text
          make                acquire                release
  free ---------> idle ----------------> given ----------------> resetting ---> idle (or a waiting acquire)
   ^  `--> making                                                    | failed, or enough are idle
   +---------------------- removing <--------------------------------+
                              | failed            unknown: found at start, until adopt() says whether it is in use
                              v
                            dirty (never given out again by this process)
```

A slot in `idle` has all egress refused and no tracked connection. One event loop owns the object.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from agentenv.errors import AtCapacity, NetworkError, NodeStopping
from agentenv.model import NetworkPolicy
from agentenv.network.host import SlotHost
from agentenv.network.settings import PoolSettings
from agentenv.network.slot import Slot

T = TypeVar("T")

log = logging.getLogger(__name__)

# A step takes milliseconds; longer means a stuck kernel lock. The slot is then dirty, since its thread may still act.
STEP_DEADLINE_S = 10.0
# Makes and removals mostly wait for one kernel lock (rtnl): more of them at a time only delays policy changes.
MAKE_CONCURRENCY = 2
STEP_CONCURRENCY = 4
# After a failed make in the background; one that somebody waits for is tried at once and fails him.
MAKE_RETRY_DELAY_S = 5.0


class SlotPool:
    """See the module. All methods are safe to cancel: what was begun ends in the background and no slot is lost."""

    def __init__(self, host: SlotHost, settings: PoolSettings | None = None) -> None:
        self._host = host
        self._settings = settings or PoolSettings()
        self._free = list(range(self._settings.slot_count_max))
        self._idle: deque[int] = deque()
        self._given: set[int] = set()
        self._making: set[int] = set()
        self._resetting: set[int] = set()
        self._removing: set[int] = set()
        self._dirty: set[int] = set()
        self._unknown: set[int] = set()
        self._waiters: deque[asyncio.Future[int]] = deque()
        self._steps: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._make_pause: asyncio.TimerHandle | None = None
        self._is_open = False
        self._is_closed = False
        self._makers = ThreadPoolExecutor(MAKE_CONCURRENCY, "network-make")
        self._steppers = ThreadPoolExecutor(STEP_CONCURRENCY, "network-step")

    # The life of the pool

    async def start(self) -> None:
        """Set up the host and fill the pool in the background. Slots of an earlier server wait for `adopt`.

        Raises `NetworkError`.
        """
        await self._in_thread(self._steppers, self._host.prepare)
        self._unknown = await self._in_thread(self._steppers, self._host.existing)
        self._free = [index for index in self._free if index not in self._unknown]
        self._is_open = True
        self._balance()

    async def adopt(self, in_use: Set[int]) -> dict[int, Slot]:
        """Keep the slots of running VMMs as given out, and reset or remove all others that an earlier server left.

        Returns the kept ones. An index that the answer lacks has no whole slot any more: its VMM has no network.
        """
        kept = {}
        for index in sorted(self._unknown & in_use):
            if await self._in_thread(self._steppers, self._host.is_whole, index):
                self._unknown.discard(index)
                self._given.add(index)
                kept[index] = self._host.slot(index)
        for index in sorted(self._unknown):
            self._resetting.add(index)
            self._unknown.discard(index)
            self._spawn(self._recycle_or_remove(index))
        return kept

    async def close(self) -> None:
        """Stop working on slots and leave them all in place for the next server. Waiting callers get `NodeStopping`."""
        self._is_open = False
        if self._make_pause is not None:
            self._make_pause.cancel()
        while self._waiters:
            _refuse(self._waiters.popleft(), NodeStopping("the server is shutting down"))
        loop = asyncio.get_running_loop()
        end = loop.time() + STEP_DEADLINE_S
        # Tasks may start others: a failed reset becomes a removal.
        while self._tasks and (left := end - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=left)
        self._is_closed = True
        self._makers.shutdown(wait=False)
        self._steppers.shutdown(wait=False)
        self._host.release()

    def counts(self) -> dict[str, int]:
        """How many slots are in each place, for health pages."""
        return {
            "free": len(self._free),
            "idle": len(self._idle),
            "given": len(self._given),
            "making": len(self._making),
            "resetting": len(self._resetting),
            "removing": len(self._removing),
            "unknown": len(self._unknown),
            "dirty": len(self._dirty),
        }

    # What callers do

    async def acquire(self, policy: NetworkPolicy) -> Slot:
        """A slot with this policy in force. Raises `AtCapacity` when all are in use, `NetworkError`, `NodeStopping`."""
        if not self._is_open:
            raise NodeStopping("the network is not running")
        index = self._idle.popleft() if self._idle else await self._wait_for_slot()
        self._given.add(index)
        self._balance()
        try:
            await self._step(index, f"set the policy of slot {index}", self._host.set_policy, index, policy)
        except BaseException:
            self._given.discard(index)
            self._resetting.add(index)
            self._spawn(self._recycle_or_remove(index))
            raise
        return self._host.slot(index)

    async def release(self, slot: Slot) -> None:
        """Take a slot back; its VMM must be gone. Raises `NetworkError` while a process still holds its tap.

        A slot that cannot be reset is removed instead, and is not the caller's any more.
        """
        index = slot.index
        if index not in self._given:
            raise NetworkError(f"slot {index} is not in use")
        self._given.discard(index)
        self._resetting.add(index)
        if not await asyncio.shield(self._spawn(self._recycle(index))):
            raise NetworkError(f"cannot take back slot {index}: a process still holds {slot.tap} in {slot.netns}")

    async def set_policy(self, slot: Slot, policy: NetworkPolicy) -> None:
        """Replace the policy of a slot in use; a tightened one cuts the guest's connections. Raises `NetworkError`."""
        index = slot.index
        if index not in self._given:
            raise NetworkError(f"slot {index} is not in use")
        what = f"set the policy of slot {index}"
        await asyncio.shield(self._spawn(self._step(index, what, self._host.set_policy, index, policy)))

    # Waiting for a slot

    async def _wait_for_slot(self) -> int:
        coming = len(self._making) + len(self._resetting) + len(self._removing) + len(self._free)
        if len(self._waiters) >= coming:
            raise AtCapacity(f"all {self._settings.slot_count_max} network slots of this node are in use")
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._balance()
        try:
            return await waiter
        except asyncio.CancelledError:
            # The slot may have been handed over in the same turn of the loop in which we were cancelled.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._offer(waiter.result())
            raise

    def _offer(self, index: int) -> None:
        """A clean slot goes to whoever waited longest, else to the idle ones."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(index)
                return
        self._idle.append(index)

    # Making

    def _balance(self) -> None:
        """Start as many makes as the waiters and the idle minimum need, up to the limits."""
        if not self._is_open:
            return
        waiting = sum(not waiter.done() for waiter in self._waiters)
        spare = 0 if self._make_pause else self._settings.slot_pool_idle_count_min
        missing = waiting + spare - len(self._idle) - len(self._making) - len(self._resetting)
        for _ in range(min(missing, MAKE_CONCURRENCY - len(self._making), len(self._free))):
            index = heapq.heappop(self._free)
            self._making.add(index)
            self._spawn(self._make(index))

    async def _make(self, index: int) -> None:
        try:
            await self._step(index, f"make slot {index}", self._host.create, index, makes=True)
        except NetworkError as error:
            self._making.discard(index)
            log.warning("%s", error)
            self._pause_makes()
            self._fail_one_waiter(error)
            await self._remove(index)
        else:
            self._making.discard(index)
            self._offer(index)
        self._balance()

    def _fail_one_waiter(self, error: NetworkError) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                _refuse(waiter, error)
                return

    def _pause_makes(self) -> None:
        """No makes ahead of need for a while, or a broken host is asked hundreds of times a second."""

        def over() -> None:
            self._make_pause = None
            self._balance()

        if self._make_pause is None and self._is_open:
            self._make_pause = asyncio.get_running_loop().call_later(MAKE_RETRY_DELAY_S, over)

    # Taking back

    async def _recycle(self, index: int) -> bool:
        """Reset a slot of `_resetting`, for the next guest or for removal. False: still held, so still given out."""
        try:
            is_clean = await self._step(index, f"reset slot {index}", self._host.reset, index)
        except NetworkError as error:
            # A slot whose connections could not be forgotten must not meet another guest.
            log.warning("%s; it is removed", error)
            self._resetting.discard(index)
            self._remove_later(index)
            return True
        self._resetting.discard(index)
        if not is_clean:
            self._given.add(index)
            return False
        if len(self._idle) >= self._settings.slot_pool_idle_count_max and not self._waiters:
            self._remove_later(index)
        else:
            self._offer(index)
        return True

    async def _recycle_or_remove(self, index: int) -> None:
        """For a slot that nobody owns: if a process holds it, the slot goes and the process loses its network."""
        if not await self._recycle(index):
            log.warning("slot %d is held by a process that nobody owns; it is removed", index)
            self._given.discard(index)
            await self._remove(index)

    def _remove_later(self, index: int) -> None:
        self._removing.add(index)
        self._spawn(self._remove(index))

    async def _remove(self, index: int) -> None:
        self._removing.add(index)
        try:
            await self._step(index, f"remove slot {index}", self._host.remove, index, makes=True)
        except NetworkError as error:
            log.error("%s; it stays out of use until the server restarts", error)
            self._dirty.add(index)
        else:
            # One beyond the limit is left from a configuration that allowed more.
            if index < self._settings.slot_count_max:
                heapq.heappush(self._free, index)
        finally:
            self._removing.discard(index)
        self._balance()

    # Threads

    async def _step(self, index: int, what: str, work: Callable[..., T], *args: object, makes: bool = False) -> T:
        """One call into the host for one slot, after any earlier call for it has ended: threads cannot be cancelled.

        Raises `NetworkError`, also when it is not done within the deadline.
        """
        while (earlier := self._steps.get(index)) is not None and not earlier.done():
            done, _ = await asyncio.wait({earlier}, timeout=STEP_DEADLINE_S)
            if not done:
                raise NetworkError(f"cannot {what}: an earlier step hangs for over {STEP_DEADLINE_S:g} s")
        if self._is_closed:
            raise NetworkError(f"cannot {what}: the network was closed")
        executor = self._makers if makes else self._steppers
        future = asyncio.get_running_loop().run_in_executor(executor, lambda: work(*args))
        future.add_done_callback(_retrieve)
        self._steps[index] = future
        done, _ = await asyncio.wait({future}, timeout=STEP_DEADLINE_S)
        if not done:
            raise NetworkError(f"cannot {what}: not done within {STEP_DEADLINE_S:g} s")
        return future.result()

    async def _in_thread(self, executor: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> T:
        future = asyncio.get_running_loop().run_in_executor(executor, work, *args)
        try:
            return await asyncio.wait_for(future, STEP_DEADLINE_S)
        except TimeoutError as error:
            raise NetworkError(f"the host's network did not answer within {STEP_DEADLINE_S:g} s") from error

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_retrieve)
        return task


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Look at the error of work whose caller may be gone, or asyncio reports it as forgotten."""
    if not done.cancelled():
        done.exception()


def _refuse(waiter: asyncio.Future[int], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)
