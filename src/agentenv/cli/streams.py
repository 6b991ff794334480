"""Local standard input as asynchronous pieces, and local signals as callbacks.

Reads by readiness where the kernel offers it, so that no thread is left behind in a read that nothing will end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Final

READ_BYTES: Final = 64 * 1024
# PIPE_BUF: 4096 on Linux, 512 on macOS.
PIPE_BYTES: Final = 4096 if sys.platform == "linux" else 512
BUFFER_BYTES_MAX: Final = 64 * 1024 * 1024


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

    A signal that is ignored stays ignored: nohup and shells that start background jobs mean it so. Outside the main
    thread (a test's) signals cannot be received, and the handlers are never called.
    """
    loop = asyncio.get_running_loop()
    installed = []
    try:
        for number, handler in handlers.items():
            previous = signal.getsignal(number)
            if previous is signal.SIG_IGN:
                continue
            with contextlib.suppress(RuntimeError, ValueError):
                loop.add_signal_handler(number, handler)
                installed.append((number, previous))
        yield
    finally:
        for number, previous in installed:
            loop.remove_signal_handler(number)
            # asyncio.run has its own handler for ctrl-C, which remove_signal_handler does not bring back.
            signal.signal(number, previous)


async def write(descriptor: int, data: bytes) -> None:
    """Write all of `data` without blocking the loop. Raises `BrokenPipeError` when nobody reads any more.

    The descriptor is not made non-blocking, because that would show in every process which shares it; instead each
    write is small enough that a pipe which is ready for writing takes it whole.
    """
    view = memoryview(data)
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    while view:
        if not is_file and not _is_writable(descriptor):
            await _writable(descriptor)
        view = view[os.write(descriptor, view if is_file else view[:PIPE_BYTES]) :]


def _is_writable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


async def _writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(descriptor)


class LocalOutput:
    """Our standard output and error, written behind a buffer.

    The daemon drops output for a client that reads nothing for ten seconds, so a pager that waits for its user must
    not stop the reading; up to `BUFFER_BYTES_MAX` wait here for it.
    """

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._size = 0
        self._room = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    async def put(self, descriptor: int, data: bytes) -> None:
        """Write to descriptor 1 or 2, after what was put before. Raises what an earlier write raised."""
        while self._size > BUFFER_BYTES_MAX and not self._writer.done():
            self._room.clear()
            await self._room.wait()
        if self._writer.done():
            await self._writer
        self._size += len(data)
        self._waiting.put_nowait((descriptor, data))

    async def flush(self) -> None:
        """Wait until all is written. Raises what a write raised."""
        self._waiting.put_nowait(None)
        await self._writer

    async def _write(self) -> None:
        try:
            while (item := await self._waiting.get()) is not None:
                await _write_to(*item)
                self._size -= len(item[1])
                self._room.set()
        finally:
            # Also after a failure, so that a waiting `put` finds it.
            self._room.set()


async def _write_to(descriptor: int, data: bytes) -> None:
    stream = sys.stdout if descriptor == 1 else sys.stderr
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        # Not a file but a test's capture.
        stream.buffer.write(data)
        stream.flush()
    else:
        await write(number, data)
