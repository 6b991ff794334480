"""Who may start now. A bounded, fair queue in front of a few concurrent starts, and the limits of the node.

Pure counting and one semaphore; what the node has (memory available) is handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentenv.errors import AtCapacity, InvalidRequest
from agentenv.model import Resources


@dataclass(frozen=True, slots=True)
class Limits:
    """The node's limits, from its configuration."""

    live_count_max: int
    start_concurrency_max: int
    start_queue_length_max: int
    start_wait_s_max: float
    memory_total_mib: int
    memory_reserve_mib: int
    cpu_count: int


class Admission:
    """Admits starts and resumes. What the node has is asked when a start is about to begin."""

    def __init__(self, limits: Limits, memory_available_mib: Callable[[], int]) -> None:
        self._limits = limits
        # How many sandboxes hold or are about to hold a VMM; the node knows, and says so when it is made.
        self.live_count: Callable[[], int] = lambda: 0
        self._memory_available_mib = memory_available_mib
        self._slots = asyncio.Semaphore(limits.start_concurrency_max)
        self._waiting = 0

    def is_busy(self) -> bool:
        """Whether starts are waiting for their turn or all turns are taken: no time for background work."""
        return self._waiting > 0 or self._slots.locked()

    def has_memory_to_spare(self) -> bool:
        """Whether memory may be kept for convenience: well above what new sandboxes are refused for."""
        return self._memory_available_mib() > 2 * self._limits.memory_reserve_mib

    def check_fits(self, resources: Resources) -> None:
        """Raises `InvalidRequest` for a machine that this node could never run."""
        usable = self._limits.memory_total_mib - self._limits.memory_reserve_mib
        if resources.memory_mib > usable:
            raise InvalidRequest(
                f"the template needs {resources.memory_mib} MiB of memory; this node can give a sandbox {usable} MiB"
            )

    @asynccontextmanager
    async def start(self, resources: Resources) -> AsyncIterator[None]:
        """Hold one of the concurrent starts. Raises `AtCapacity` when the queue is full or the wait too long."""
        self.check_fits(resources)
        if self._waiting >= self._limits.start_queue_length_max:
            raise AtCapacity(f"{self._waiting} starts are waiting already; try again later")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._limits.start_wait_s_max):
                await self._slots.acquire()
        except TimeoutError as error:
            raise AtCapacity(
                f"no start became free within {self._limits.start_wait_s_max:g} s; try again later"
            ) from error
        finally:
            self._waiting -= 1
        try:
            self._check_room()
            yield
        finally:
            self._slots.release()

    def _check_room(self) -> None:
        live = self.live_count()
        # The sandbox that asks is counted already.
        if live > self._limits.live_count_max:
            raise AtCapacity(f"the node runs its maximum of {self._limits.live_count_max} sandboxes")
        available = self._memory_available_mib()
        if available < self._limits.memory_reserve_mib:
            raise AtCapacity(
                f"the node has {available} MiB of memory available and keeps {self._limits.memory_reserve_mib} MiB free"
            )


def memory_mib(field: str) -> int:
    """One field of /proc/meminfo (`MemTotal`, `MemAvailable`) in MiB."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) // 1024
    raise AtCapacity(f"/proc/meminfo has no {field}")
