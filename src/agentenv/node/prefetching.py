"""First starts over remote blobs: the blocks that one reads are noted, and fetched ahead at the next node's.

Owns when a trace is made, replayed and kept (in the repository, so that every node has it), and that the rest of a
started sandbox's blobs is fetched in the background. Does not own the blocks (blockd's cache). Nothing here may fail a
start: a trace is worth a second, not a sandbox. Where layers are plain files there is nothing to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from agentenv.block import BlockClient
from agentenv.errors import AenvError
from agentenv.model import BLOB_DESCRIPTOR_SUFFIX, SnapshotManifest
from agentenv.node.layers import Layers
from agentenv.snapshots import Store
from agentenv.snapshots.blobs import TRACES
from agentenv.snapshots.stores.interface import ObjectNotFound

log = logging.getLogger(__name__)

# What the guest does just after it answered belongs to a start too: the first command is what its user waits for.
TRACE_AFTER_S: Final = 2.0
TRACE_BYTES_MAX: Final = 16 << 20
# Snapshots whose first start on this node is remembered as done.
SEEN_MAX: Final = 4096


class FirstStarts:
    """One event loop. `fill_bytes_per_s_max` 0: only what is read is fetched."""

    def __init__(
        self, block: BlockClient, layers: Layers, store: Store, directory: Path, fill_bytes_per_s_max: int
    ) -> None:
        """`directory` holds traces on their way between blockd and the repository's `store`."""
        self._block = block
        self._layers = layers
        self._store = store
        self._directory = directory
        self._fill_bytes_per_s_max = fill_bytes_per_s_max
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def of(self, manifest: SnapshotManifest) -> AsyncIterator[None]:
        """Around a start: replay what an earlier start noted, or note what this one reads."""
        remote = self._remote(manifest)
        if not remote or manifest.snapshot_id in self._seen:
            yield
            return
        self._remember(manifest.snapshot_id)
        traced = not await self._replay(manifest, remote) and await self._trace(manifest, remote)
        try:
            yield
        except BaseException:
            self._seen.pop(manifest.snapshot_id, None)
            raise
        finally:
            self._later(self._finish(manifest, remote, traced))

    async def stop(self) -> None:
        """The server stops; a trace that is not finished is lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _remote(self, manifest: SnapshotManifest) -> list[str]:
        """The blobs of the snapshot that come from a store: memory first, for the VMM waits for it first."""
        ids = dict.fromkeys((*manifest.memory.layers, *manifest.disk.layers))
        return [path for path in self._layers.paths(ids) if path.endswith(BLOB_DESCRIPTOR_SUFFIX)]

    def _remember(self, snapshot_id: str) -> None:
        self._seen[snapshot_id] = None
        while len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)

    async def _replay(self, manifest: SnapshotManifest, remote: list[str]) -> bool:
        """Whether there was a trace, which is being fetched now."""
        try:
            trace = await self._store.get(_key(manifest))
            path = self._path(manifest)
            await asyncio.to_thread(path.write_bytes, trace.content)
            await self._block.prefetch(path, remote)
        except ObjectNotFound:
            return False
        except (AenvError, OSError) as error:
            log.info("snapshot %s starts without prefetch: %s", manifest.snapshot_id, error)
            return False
        return True

    async def _trace(self, manifest: SnapshotManifest, remote: list[str]) -> bool:
        try:
            await self._block.trace_start(manifest.snapshot_id, remote)
        except AenvError as error:
            log.info("the start of snapshot %s is not traced: %s", manifest.snapshot_id, error)
            return False
        return True

    async def _finish(self, manifest: SnapshotManifest, remote: list[str], traced: bool) -> None:
        path = self._path(manifest)
        try:
            await asyncio.sleep(TRACE_AFTER_S)
            if traced:
                await self._block.trace_finish(manifest.snapshot_id, path)
                trace = await asyncio.to_thread(path.read_bytes)
                if 0 < len(trace) <= TRACE_BYTES_MAX:
                    await self._store.put(_key(manifest), trace)
            if self._fill_bytes_per_s_max:
                await self._block.fill(remote, self._fill_bytes_per_s_max)
        except (AenvError, OSError) as error:
            log.info("after the start of snapshot %s: %s", manifest.snapshot_id, error)
        finally:
            path.unlink(missing_ok=True)

    def _path(self, manifest: SnapshotManifest) -> Path:
        return self._directory / f"{manifest.snapshot_id}.trace"

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="after a first start")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _key(manifest: SnapshotManifest) -> str:
    return f"{TRACES}{manifest.snapshot_id}.trace"
