"""Long work that several callers may ask for at once and that is done once: pulls, conversions, builds.

A caller that is cancelled only stops waiting. The work goes on for the others and ends when the last one has left, so
that a client which gave up does not keep the node busy, and one which is impatient does not spoil it for the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentenv.model import Progress, Report

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    task: asyncio.Task[T] | None = None
    reports: list[Report] = field(default_factory=list)
    last: Progress | None = None

    def tell(self, progress: Progress) -> None:
        self.last = progress
        for report in self.reports:
            report(progress)


class SharedWork(Generic[T]):
    """Jobs by key. One event loop."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job[T]] = {}

    async def run(self, key: str, report: Report, work: Callable[[Report], Awaitable[T]]) -> T:
        """The result of the job of this key, begun by `work` unless it runs already. Raises what the job raises."""
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job()
            job.task = asyncio.create_task(self._carry_out(key, job, work), name=f"shared work {key[:64]}")
        elif job.last is not None:
            report(job.last)
        task = job.task
        assert task is not None
        job.reports.append(report)
        try:
            return await asyncio.shield(task)
        finally:
            job.reports.remove(report)
            if not job.reports and not task.done():
                # The next caller of this key must not join a job that is ending.
                self._forget(key, job)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """End everything; the server stops."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, key: str, job: _Job[T], work: Callable[[Report], Awaitable[T]]) -> T:
        try:
            return await work(job.tell)
        finally:
            self._forget(key, job)

    def _forget(self, key: str, job: _Job[T]) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]
