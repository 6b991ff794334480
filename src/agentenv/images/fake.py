"""What a conversion needs of others, without them: layers remembered in a folder, and a maker that only checks digests.

A fake layer's content is its task in words, so that a test reads from it what was put over what.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentenv.errors import ImageError
from agentenv.images.convert import ConvertedLayer
from agentenv.images.media import Compression
from agentenv.images.program import LayerTask, OnProgress

_GZIP_MAGIC = b"\x1f\x8b"


class FakeConvertedLayers:
    """`ConvertedLayers` in a folder. A layer's id is the hash of its content, as in the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, ConvertedLayer] = {}
        folder.mkdir(parents=True, exist_ok=True)

    async def get(self, chain_key: str) -> ConvertedLayer | None:
        """See `ConvertedLayers.get`."""
        await asyncio.sleep(0)
        return self.records.get(chain_key)

    async def put(self, chain_key: str, layer: Path, parent_id: str | None) -> ConvertedLayer:
        """See `ConvertedLayers.put`."""
        content = await asyncio.to_thread(layer.read_bytes)
        layer_id = hashlib.sha256(content).hexdigest()
        await asyncio.to_thread((self.folder / layer_id).write_bytes, content)
        self.records[chain_key] = ConvertedLayer(layer_id, parent_id)
        return self.records[chain_key]

    async def local_file(self, layer_id: str, folder: Path) -> Path:
        """See `ConvertedLayers.local_file`."""
        return self.folder / layer_id


class FakeLayerMaker:
    """`LayerMaker` that writes no file system. `before` runs first and may wait or raise."""

    def __init__(self, before: Callable[[LayerTask], Awaitable[None]] | None = None) -> None:
        self.tasks: list[LayerTask] = []
        self._before = before

    async def apply(self, task: LayerTask, on_progress: OnProgress) -> None:
        """See `LayerMaker.apply`."""
        self.tasks.append(task)
        if self._before is not None:
            await self._before(task)
        packed = await asyncio.to_thread(task.tar.read_bytes)
        _check(packed, task.blob_digest, "blob")
        if task.compression is Compression.GZIP or packed.startswith(_GZIP_MAGIC):
            packed = zlib.decompress(packed, 31)
        _check(packed, task.diff_id, "diff id")
        below = " ".join(hashlib.sha256(parent.read_bytes()).hexdigest() for parent in task.parents)
        task.out.write_text(f"{task.size_bytes} {task.uuid} {task.diff_id} over [{below}]")
        on_progress(task.packed_bytes, task.packed_bytes)


def _check(content: bytes, digest: str | None, what: str) -> None:
    if digest is not None and digest != "sha256:" + hashlib.sha256(content).hexdigest():
        raise ImageError(f"the {what} is not {digest}")
