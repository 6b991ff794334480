"""Local standard input as asynchronous pieces, and local signals as callbacks.

Reads by readiness where the kernel offers it, so that no thread is left behind in a read that nothing will end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Final

READ_BYTES: Final = 64 * 1024


def input_descriptor() -> int | None:
    """The descriptor of standard input; None when it is closed or is not a file (in tests)."""
    try:
        return sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def has_piped_input() -> bool:
    """Whether somebody feeds standard input: a pipe, a file or a socket, not a terminal or /dev/null."""
    descriptor = input_descriptor()
    if descriptor is None:
        return False
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


async def pieces(descriptor: int) -> AsyncIterator[bytes]:
    """What arrives at `descriptor`, until its end."""
    while True:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            await _readable(descriptor)
        # A regular file never blocks for long, and neither epoll nor kqueue can wait for one.
        data = os.read(descriptor, READ_BYTES)
        if not data:
            return
        yield data


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:
        # Devices such as /dev/zero cannot be waited for and are always ready.
        return
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


@contextlib.contextmanager
def signals(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Call the handlers on the event loop while the context lasts.

    Outside the main thread (a test's) signals cannot be received, and the handlers are never called.
    """
    loop = asyncio.get_running_loop()
    installed = []
    try:
        for number, handler in handlers.items():
            with contextlib.suppress(RuntimeError, ValueError):
                previous = signal.getsignal(number)
                loop.add_signal_handler(number, handler)
                installed.append((number, previous))
        yield
    finally:
        for number, previous in installed:
            loop.remove_signal_handler(number)
            # asyncio.run has its own handler for ctrl-C, which remove_signal_handler does not bring back.
            signal.signal(number, previous)
