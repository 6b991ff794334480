"""Memory images that VMMs map: exported once each, shared by all clones, kept while any VMM process still maps them.

The pins are in the sandboxes' records (a record names the image until its VMM process is gone); this module only
counts them. An image without pins stays exported for a while, because the next clone of a template comes soon.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from agentenv.errors import BlockError
from agentenv.model import MemoryStack
from agentenv.node.record import memory_export_name

IDLE_IMAGES_MAX: Final = 32


class MemoryExports(Protocol):
    """The part of blockd's client that this module needs."""

    async def export_memory(self, name: str, size_bytes: int, layers: list[str]) -> Path: ...

    async def unexport(self, name: str) -> None: ...


class LayerPaths(Protocol):
    """Where blockd finds layers; the real one is `layers.Layers`."""

    def paths(self, layer_ids: Iterable[str]) -> list[str]: ...


class MemoryImages:
    """Counts the users of each exported image. Not safe for threads; one event loop."""

    def __init__(self, exports: MemoryExports, layers: LayerPaths) -> None:
        self._exports = exports
        self._layers = layers
        self._users: Counter[str] = Counter()
        self._idle: OrderedDict[str, MemoryStack] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    def pin(self, image_id: str) -> None:
        """Count a user found after a restart, whose VMM maps the image already."""
        self._users[image_id] += 1

    def stacks_in_use(self) -> list[MemoryStack]:
        """Idle images that are still exported; their layers must not be collected."""
        return list(self._idle.values())

    async def acquire(self, stack: MemoryStack) -> Path:
        """Export the image if need be and count a user. The caller names it in its record first."""
        self._users[stack.image_id] += 1
        try:
            async with self._lock(stack.image_id):
                self._idle.pop(stack.image_id, None)
                layers = self._layers.paths(stack.layers)
                return await self._exports.export_memory(memory_export_name(stack.image_id), stack.size_bytes, layers)
        except BaseException:
            self._users[stack.image_id] -= 1
            raise

    async def release(self, stack: MemoryStack) -> None:
        """The VMM process is gone. Only then: a dying process may still map the image."""
        self._users[stack.image_id] -= 1
        if self._users[stack.image_id] > 0:
            return
        del self._users[stack.image_id]
        self._idle[stack.image_id] = stack
        self._idle.move_to_end(stack.image_id)
        while len(self._idle) > IDLE_IMAGES_MAX:
            await self._drop(next(iter(self._idle)))

    async def forget(self, image_ids: set[str]) -> None:
        """Unexport idle images whose snapshot was deleted or superseded."""
        for image_id in image_ids & set(self._idle):
            await self._drop(image_id)

    async def _drop(self, image_id: str) -> None:
        async with self._lock(image_id):
            if self._users[image_id] > 0 or self._idle.pop(image_id, None) is None:
                return
            try:
                await self._exports.unexport(memory_export_name(image_id))
            except BlockError:
                # Still known to blockd; the sweep at the next start of the server removes it.
                return
        self._locks.pop(image_id, None)

    def _lock(self, image_id: str) -> asyncio.Lock:
        return self._locks.setdefault(image_id, asyncio.Lock())
