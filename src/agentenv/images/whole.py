"""Layers of a registry that must not be read on demand: fetched whole, and kept in the repository like converted ones.

They are those whose form has no checksums of its blocks: what a guest would get of them by ranges could not be
verified. Fetched whole they are verified by their digest, written as a plain layer, published, and remembered by
`ConvertedLayers`, so that this is done once. Owns the fetch and its single flight; which layers it is for,
`accelerated` finds out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from agentenv.errors import BlockError, ImageError
from agentenv.images._claims import Claims
from agentenv.images._staging import staging_folder
from agentenv.images.accelerated import RegistryBlob
from agentenv.images.convert import ConvertedLayer, ConvertedLayers
from agentenv.images.manifest import Descriptor
from agentenv.images.registry_source import RegistrySource
from agentenv.model import Progress, Report

# What blockd says of a file that is no layer, or a damaged one.
_NO_LAYER: Final = frozenset({"corrupt", "invalid", "unsupported"})


class WholeLayers:
    """For one event loop."""

    def __init__(
        self, layers: ConvertedLayers, compact: Callable[[Path, Path], Awaitable[object]], staging_dir: Path
    ) -> None:
        """`compact` is blockd's: it reads a layer in every wrapping and writes the plain one. `staging_dir` is the
        conversions'; a fetch under way has a folder of its own there."""
        self._layers = layers
        self._compact = compact
        self._staging_dir = staging_dir
        self._claims = Claims()

    async def layer_id(self, source: RegistrySource, blob: RegistryBlob, report: Report) -> str:
        """The layer as one of the repository, which stays as `ConvertedLayers` promises.

        Raises what the registry raises, `ImageError` for a blob that is no layer, `StorageFull`. Safe to cancel.
        """
        key = _key(blob)
        while not self._claims.take([key]):
            await self._claims.wait(key)
        try:
            found = await self._layers.get(key) or await self._fetch(key, source, blob, report)
        finally:
            self._claims.release([key])
        return found.layer_id

    async def _fetch(self, key: str, source: RegistrySource, blob: RegistryBlob, report: Report) -> ConvertedLayer:
        text = f"fetching {source.reference}: layer {blob.digest[:19]} has no checksums to be read on demand by"
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            report(Progress(text, min(max(done, 0), blob.size_bytes), blob.size_bytes))

        async with staging_folder(self._staging_dir) as folder:
            stored, plain = folder / "stored", folder / "plain.lsmt"
            await source.client.blob(source.reference, Descriptor("", blob.digest, blob.size_bytes), stored, on_bytes)
            try:
                await self._compact(stored, plain)
            except BlockError as error:
                if error.kind not in _NO_LAYER:
                    raise
                raise ImageError(f"{source.reference}: layer {blob.digest} is no overlaybd layer: {error}") from error
            return await self._layers.put(key, plain, None)


def _key(blob: RegistryBlob) -> str:
    """In the place of a chain key: the layer is what it is whatever is below it."""
    return hashlib.sha256(f"aenv-whole 1\n{blob.digest}\n".encode()).hexdigest()
