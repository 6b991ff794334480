"""Work that is over when its caller goes on, also after a cancel, and after a second one.

`asyncio.to_thread` and `asyncio.shield` let a cancelled caller go on while the work still runs: what the caller then
removes, the work makes again. Whatever makes files or processes that a cancel must remove goes through here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def all_over(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all are done, whatever came of them; a cancel is passed on only then. What they do must be bounded."""
    cancelled: asyncio.CancelledError | None = None
    while waiting := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        # Retrieved, or asyncio complains of an error that nobody saw.
        if not task.cancelled():
            task.exception()
    if cancelled is not None:
        raise cancelled


async def to_its_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, but a cancel waits for the function: it must be short."""
    return await until_stopped(threading.Event(), function, *args, **kwargs)


async def until_stopped(stop: threading.Event, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `to_its_end` for what takes long: a cancel sets `stop`, which the function looks at."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await all_over([working])
        raise
