"""The operations of blockd as methods, over one connection that is made again when blockd was replaced.

blockd may be killed and replaced at any time. A request whose answer was lost is sent again where that is harmless:

    hello, exports, stats, sync,     change nothing that a second time would change
    digest, cache, prefetch, fill,
    cache_evict, trace_start
    trace_finish                     a trace dies with its blockd: "not_found" by the next one
    export_memory, export_disk       equal fields are answered again
    seal_disk                        blockd keeps its last answer and gives it again for the same new upper
    unexport, abandon, capture_cancel  the end they bring about is reached, whoever came first

The others end with kind "outcome_unknown": a capture lives in the blockd that died, and a second `merge`,
`import_raw` or `compact` would find the file of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from agentenv.block import wire
from agentenv.block.connection import Connection, ConnectionLostError
from agentenv.block.wire import Hold
from agentenv.errors import BlockError, StorageFull

# How long a new blockd may take to listen; it takes milliseconds unless it keeps dying.
CONNECT_S_MAX: Final = 10.0
_RETRY_S_FIRST: Final = 0.002
_RETRY_S_MAX: Final = 0.1

# Seconds until an answer must be there, by operation. What copies data has the time for it.
DEADLINES_S: Final[Mapping[str, float]] = MappingProxyType(
    {
        "hello": 5.0,
        "export_memory": 30.0,
        "export_disk": 30.0,
        "unexport": 30.0,
        "abandon": 10.0,
        "exports": 10.0,
        "seal_disk": 60.0,
        "sync": 300.0,
        "capture_start": 60.0,
        "capture_finish": 600.0,
        "capture_cancel": 15.0,
        "merge": 3600.0,
        "import_raw": 3600.0,
        "digest": 3600.0,
        "compact": 3600.0,
        "trace_start": 10.0,
        "trace_finish": 30.0,
        "prefetch": 30.0,
        "fill": 30.0,
        "cache": 10.0,
        "cache_evict": 60.0,
        "stats": 10.0,
        "shutdown": 10.0,
    }
)

_NOT_REPEATABLE: Final = (
    wire.CaptureStart,
    wire.CaptureFinish,
    wire.Merge,
    wire.ImportRaw,
    wire.Compact,
    wire.Shutdown,
)

T = TypeVar("T", bound=msgspec.Struct)


class BlockClient:
    """blockd, as seen by the server. One event loop; methods may run side by side.

    Every method raises `StorageFull` when the disk has no room, else `BlockError` with its `kind`, and is safe to
    cancel (blockd may carry the operation out all the same).
    """

    def __init__(self, socket: Path, *, deadlines_s: Mapping[str, float] = DEADLINES_S) -> None:
        self._socket = socket
        self._deadlines_s = deadlines_s
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    async def hello(self) -> wire.Hello:
        """Who answers; succeeds once blockd serves."""
        return await self._ask(wire.HelloRequest(), wire.Hello)

    async def export_memory(self, name: str, size_bytes: int, layers: Sequence[str | Path]) -> Path:
        """Export a read-only image, layers bottom first (none: all zero). Repeating it with equal fields is fine."""
        asked = wire.ExportMemory(name, size_bytes, _paths(layers))
        return Path((await self._ask(asked, wire.Exported)).path)

    async def export_disk(self, name: str, size_bytes: int, layers: Sequence[str | Path], upper: str | Path) -> Path:
        """Export a writable disk; the upper is created if missing. Repeating it with equal fields is fine."""
        asked = wire.ExportDisk(name, size_bytes, _paths(layers), str(upper))
        return Path((await self._ask(asked, wire.Exported)).path)

    async def unexport(self, name: str) -> None:
        """Remove an export that no process maps or has open any more. Idempotent."""
        await self._end(wire.Unexport(name))

    async def abandon(self, name: str) -> int:
        """Answer everything of the export with an I/O error from now on; returns how many requests were waiting."""
        return (await self._ask(wire.Abandon(name), wire.Abandoned)).waiting

    async def exports(self) -> list[wire.ExportInfo]:
        """All exports, oldest first."""
        return list((await self._ask(wire.ListExports(), wire.ExportList)).exports)

    async def seal_disk(self, name: str, new_upper: str | Path | None) -> wire.SealResult:
        """Turn the upper into a layer at its path, under a new upper, or read-only (None). Not durable: see `sync`."""
        new = None if new_upper is None else str(new_upper)
        return await self._ask(wire.SealDisk(name, new), wire.SealResult)

    async def sync(self, paths: Sequence[str | Path]) -> None:
        """Make files and their directory entries survive a power loss."""
        await self._ask(wire.SyncPaths(_paths(paths)), wire.Done)

    async def capture_start(
        self,
        job: str,
        *,
        pid: int,
        address: int,
        length_bytes: int,
        parent: str,
        layer: str | Path,
        hold: Hold,
        base: Sequence[str | Path] | None = None,
    ) -> wire.CaptureStarted:
        """Find what a *stopped* process wrote to its private mapping of export `parent`, and reserve the disk space.

        hold "buffer": the pages are copied when this returns and the process may go on; "process": it must stay
        stopped until the capture ends. Kind "busy" where the capture buffer has no room.
        `base` are the layers of an earlier capture of this mapping, bottom first: where the answer says `based`, the
        new layer lies upon them and holds what differs; else it lies upon the image.
        """
        below = None if base is None else _paths(base)
        asked = wire.CaptureStart(job, pid, address, length_bytes, parent, str(layer), hold, below)
        return await self._ask(asked, wire.CaptureStarted)

    async def capture_finish(self, job: str) -> wire.CaptureFinished:
        """Write the layer, durably. The job is over afterwards, also when this fails (then there is no layer)."""
        return await self._ask(wire.CaptureFinish(job), wire.CaptureFinished)

    async def capture_cancel(self, job: str) -> None:
        """Stop a capture; when this returns the process's memory is not read any more. Idempotent."""
        await self._end(wire.CaptureCancel(job))

    async def merge(self, layers: Sequence[str | Path], into: str | Path) -> wire.MergeResult:
        """Make one layer that reads as consecutive `layers`, bottom first. `into` must not exist."""
        return await self._ask(wire.Merge(_paths(layers), str(into)), wire.MergeResult)

    async def import_raw(self, source: str | Path, into: str | Path) -> wire.ImportResult:
        """Make a layer of a plain file; runs of zeros are left out. `into` must not exist."""
        return await self._ask(wire.ImportRaw(str(source), str(into)), wire.ImportResult)

    async def digest(self, path: str | Path) -> wire.DigestResult:
        """Hash a layer's canonical bytes; equal content gives equal digests, whichever form the file has."""
        return await self._ask(wire.DigestLayer(str(path)), wire.DigestResult)

    async def compact(self, layer: str | Path, into: str | Path) -> wire.CompactResult:
        """Write a layer's canonical form, durably. `into` must not exist and appears whole or not at all."""
        return await self._ask(wire.Compact(str(layer), str(into)), wire.CompactResult)

    async def trace_start(self, trace: str, paths: Sequence[str | Path] = ()) -> None:
        """Begin to note the blocks of remote blobs as they are first read: of these descriptors, or (none) of all."""
        await self._ask(wire.TraceStart(trace, _paths(paths)), wire.Done)

    async def trace_finish(self, trace: str, into: str | Path) -> int:
        """End a trace and write it to a file for `prefetch`; returns how many blocks it holds."""
        return (await self._ask(wire.TraceFinish(trace, str(into)), wire.TraceFinished)).blocks

    async def prefetch(self, path: str | Path, blobs: Sequence[str | Path] = ()) -> str:
        """Fetch the blocks of a trace in the background, in its order.

        `blobs` are descriptors of blobs that no export may have open yet; of others only open ones are fetched.
        Kind "unsupported" where blockd was given no cache. Returns the job's name in blockd's log.
        """
        return (await self._ask(wire.Prefetch(str(path), _paths(blobs)), wire.PrefetchStarted)).job

    async def fill(self, paths: Sequence[str | Path], bytes_per_s_max: int) -> None:
        """Fetch whole blobs (descriptors) in the background. The rate holds for all fills; 0 stops them."""
        await self._ask(wire.Fill(_paths(paths), bytes_per_s_max), wire.Done)

    async def cache(self) -> wire.CacheState:
        """The cache of remote blobs; all zero where there is none."""
        return await self._ask(wire.ReadCache(), wire.CacheState)

    async def cache_evict(self, *, size_bytes: int | None = None, digest: str | None = None) -> int:
        """Give back at least `size_bytes` of the least used, or a whole blob; returns how many bytes were freed.

        What is being read at this moment stays. Kind "invalid" unless exactly one of both is given.
        """
        return (await self._ask(wire.CacheEvict(size_bytes, digest), wire.CacheEvicted)).freed_bytes

    async def stats(self) -> wire.Stats:
        """Counters since this blockd started."""
        return await self._ask(wire.ReadStats(), wire.Stats)

    async def shutdown(self) -> None:
        """Ask for the end of blockd and its keeper; returns before it is reached (`BlockDaemon.stop` waits)."""
        await self._ask(wire.Shutdown(), wire.Done)

    async def close(self) -> None:
        """Close the connection. Idempotent; a later call opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _end(self, operation: wire.Operation) -> None:
        """An operation whose purpose is that something is gone."""
        try:
            await self._ask(operation, wire.Done)
        except BlockError as error:
            if error.kind != "not_found":
                raise

    async def _ask(self, operation: wire.Operation, kind: type[T]) -> T:
        """One operation within its deadline. Every error of this package's callers is born here."""
        answer = await self._call(operation)
        if isinstance(answer.error, wire.Refusal):
            refused = f"blockd refused {wire.name_of(operation)}: {answer.error.message}"
            if answer.error.kind == "no_space":
                raise StorageFull(refused)
            raise BlockError(refused, answer.error.kind)
        if isinstance(answer.ok, msgspec.Raw):
            try:
                return wire.decode_ok(answer.ok, kind)
            except msgspec.DecodeError as error:
                raise BlockError(f"blockd answered {wire.name_of(operation)} with nonsense: {error}") from error
        raise BlockError(f"blockd answered {wire.name_of(operation)} with neither result nor error")

    async def _call(self, operation: wire.Operation) -> wire.Answer:
        """The answer, whichever it is. The fake replaces this method."""
        name = wire.name_of(operation)
        deadline_s = self._deadlines_s[name]
        asked = False
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    connection = await self._connected(asked)
                    asked = True
                    try:
                        return await connection.request(operation)
                    except ConnectionLostError as error:
                        if isinstance(operation, _NOT_REPEATABLE):
                            message = f"blockd was replaced while it carried out {name}; whether it did is unknown"
                            raise BlockError(message, "outcome_unknown") from error
        except TimeoutError as error:
            kind = "outcome_unknown" if asked else "unreachable"
            raise BlockError(f"blockd did not answer {name} within {deadline_s:g} s", kind) from error
        except ValueError as error:
            raise BlockError(f"{name} cannot be asked: {error}", "invalid") from error

    async def _connected(self, asked: bool) -> Connection:
        """The connection, made if need be. `asked` says whether the request went out before."""
        async with self._connecting:
            if self._connection is not None and not self._connection.is_closed:
                return self._connection
            await self.close()
            until = asyncio.get_running_loop().time() + CONNECT_S_MAX
            pause_s = _RETRY_S_FIRST
            while True:
                try:
                    self._connection = await Connection.open(self._socket)
                    return self._connection
                except OSError as error:
                    if asyncio.get_running_loop().time() >= until:
                        kind = "outcome_unknown" if asked else "unreachable"
                        raise BlockError(f"no blockd listens on {self._socket}: {error}", kind) from error
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _RETRY_S_MAX)


def _paths(paths: Sequence[str | Path]) -> tuple[str, ...]:
    return tuple(str(path) for path in paths)
