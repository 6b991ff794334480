"""Runs `aenv-image`, the process that turns a layer's tar into a layer of a disk, and a disk into a tar.

Owns its command lines, its progress lines and its errors as ours. Does not know what becomes of the files. The program
works in the folder it is given; ended at any moment it leaves partial files there, which the caller removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from agentenv.errors import HostUnsuitable, ImageError, InvalidRequest, StorageFull
from agentenv.images._threads import all_over
from agentenv.images.media import Compression

# A layer takes its packed size at this rate and a while on top; what takes longer hangs.
SLOWEST_BYTES_PER_S: Final = 100_000
GRACE_S: Final = 600.0
# Between SIGTERM and SIGKILL.
END_S_MAX: Final = 5.0
_LINE_BYTES_MAX: Final = 64 << 10
_ANSWER_BYTES_MAX: Final = 1 << 20
_TAIL_LINES: Final = 8
# The program finds mke2fs and e2fsck by itself; nothing else of our environment is its business.
_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
_NO_SPACE: Final = "no_space"

# Bytes done and bytes in all.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerTask:
    """One layer to be made: the packed tar over its parents (local plain files, bottom first)."""

    size_bytes: int
    parents: tuple[Path, ...]
    tar: Path
    compression: Compression
    diff_id: str
    # None where the packed form has no known digest.
    blob_digest: str | None
    packed_bytes: int
    out: Path
    # Of the layer, and of the file system where there is no parent: equal tasks give equal bytes.
    uuid: str


class LayerMaker(Protocol):
    """What a conversion needs of the program."""

    async def apply(self, task: LayerTask, on_progress: OnProgress) -> None:
        """Write `task.out`. Raises `ImageError` (also for a wrong digest), `InvalidRequest` (the disk is too small for
        the files), `StorageFull` (the host's), `HostUnsuitable`."""


class ImageProgram:
    """The real one."""

    def __init__(self, program: Path) -> None:
        self._program = program

    async def apply(self, task: LayerTask, on_progress: OnProgress) -> None:
        """See `LayerMaker.apply`. A cancel ends the process before it returns."""
        blob = ["--expect-blob", task.blob_digest] if task.blob_digest is not None else []
        command = [
            *("apply", "--size-bytes", str(task.size_bytes)),
            *(word for parent in task.parents for word in ("--parent", str(parent))),
            *("--tar", str(task.tar), "--compression", task.compression.value),
            *("--expect-diff-id", task.diff_id, *blob),
            *("--out", str(task.out), "--uuid", task.uuid),
        ]
        deadline_s = GRACE_S + task.packed_bytes / SLOWEST_BYTES_PER_S
        async with _running(self._program, command, on_progress) as run:
            await run.finish(deadline_s, f"convert layer {task.diff_id}")

    @asynccontextmanager
    async def dump(
        self, layers: Sequence[Path], size_bytes: int, scratch: Path, deadline_s: float
    ) -> AsyncIterator[asyncio.StreamReader]:
        """The tar of a disk's files, read from the stream while the block lasts. A stream that ended is complete only
        when the block ended without an error. `scratch` is a folder for files without a name. Raises as `apply`."""
        command = ["dump", *(word for layer in layers for word in ("--layer", str(layer)))]
        command += ["--size-bytes", str(size_bytes), "--out-tar", "-", "--scratch", str(scratch)]
        async with _running(self._program, command, lambda _done, _total: None) as run:
            yield run.stdout
            await run.finish(deadline_s, "read the disk's files")


class _Run:
    """One running process: its stderr is followed from the start, so that it never blocks on a full pipe."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, on_progress: OnProgress) -> None:
        assert process.stdout is not None, "asked for a pipe"
        self.stdout = process.stdout
        self.process = process
        self._name = name
        self._on_progress = on_progress
        self._error: dict[str, Any] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.following = asyncio.ensure_future(self._follow())

    async def finish(self, deadline_s: float, what: str) -> None:
        """Wait for a good end; `what` completes "cannot ...". Raises as `LayerMaker.apply`."""
        try:
            async with asyncio.timeout(deadline_s):
                await _drain(self.stdout)
                await self.following
                code = await self.process.wait()
        except TimeoutError as error:
            raise ImageError(f"cannot {what}: {self._name} took more than {deadline_s:.0f} s") from error
        if code != 0:
            raise self._failure(code, what)

    def _failure(self, code: int, what: str) -> ImageError | InvalidRequest | StorageFull:
        if self._error is None:
            ended = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
            said = f": {' | '.join(self._tail)}" if self._tail else ""
            return ImageError(f"cannot {what}: {self._name} {ended}{said}")
        message = f"cannot {what}: {self._error.get('message')}"
        if self._error.get("kind") != _NO_SPACE:
            return ImageError(message)
        # With this field it is the disk that was asked for, which is too small, and not the host's.
        if isinstance(missing := self._error.get("missing_bytes"), int):
            return InvalidRequest(f"{message} (a disk larger by {-(-missing >> 20)} MiB would do)")
        return StorageFull(message)

    async def _follow(self) -> None:
        assert self.process.stderr is not None, "asked for a pipe"
        while True:
            try:
                line = await self.process.stderr.readline()
            except ValueError:
                # A line beyond the limit is only output.
                continue
            if not line:
                return
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if isinstance(said, dict) and isinstance(said.get("error"), dict):
            self._error = said["error"]
        elif isinstance(said, dict) and isinstance(said.get("done_bytes"), int):
            total = said.get("total_bytes")
            self._on_progress(said["done_bytes"], total if isinstance(total, int) else 0)
        elif line.strip():
            self._tail.append(line.decode(errors="replace").strip())


@asynccontextmanager
async def _running(program: Path, arguments: Sequence[str], on_progress: OnProgress) -> AsyncIterator[_Run]:
    """The process for the length of the block; gone afterwards, whatever happened."""
    try:
        process = await asyncio.create_subprocess_exec(
            str(program),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LINE_BYTES_MAX,
            env=_ENVIRONMENT,
        )
    except OSError as error:
        raise HostUnsuitable(f"cannot run {program}: {error.strerror}; scripts/setup.sh builds it") from error
    run = _Run(process, program.name, on_progress)
    try:
        yield run
    finally:
        await all_over([asyncio.ensure_future(_end(run))])


async def _end(run: _Run) -> None:
    if run.process.returncode is None:
        _signal_group(run.process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S_MAX):
                await run.process.wait()
        except TimeoutError:
            _signal_group(run.process.pid, signal.SIGKILL)
            await run.process.wait()
    run.following.cancel()
    await asyncio.gather(run.following, return_exceptions=True)
    # Read to its end, or asyncio keeps the pipe until the loop closes.
    await _drain(run.stdout)


def _signal_group(pid: int, number: int) -> None:
    """The process leads a group, which has mke2fs in it too; it is not reaped yet, so the number is still its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


async def _drain(stream: asyncio.StreamReader) -> None:
    left = _ANSWER_BYTES_MAX
    while piece := await stream.read(_LINE_BYTES_MAX):
        left -= len(piece)
        if left < 0:
            raise ImageError(f"aenv-image answered more than {_ANSWER_BYTES_MAX} bytes")
