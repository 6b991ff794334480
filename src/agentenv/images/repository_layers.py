"""The repository's memory of converted layers, as a conversion sees it.

Joins two parts that do not know each other: `snapshots` (records and blobs) and `block` (reads a blob wherever it is).
Imports neither; the composition root hands them in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from agentenv.images.convert import ConvertedLayer
from agentenv.model import BLOB_DESCRIPTOR_SUFFIX


class StoredBlob(Protocol):
    """A published layer."""

    @property
    def digest(self) -> str: ...


class Record(Protocol):
    """`snapshots.Converted`."""

    @property
    def blob(self) -> StoredBlob: ...

    @property
    def parent(self) -> str | None: ...


class Records(Protocol):
    """`snapshots.ConvertedLayers`."""

    async def get(self, chain_key: str) -> Record | None: ...

    async def put(self, chain_key: str, layer: Path, parent: str | None) -> Record: ...


class RepositoryLayers:
    """`ConvertedLayers` over the repository."""

    def __init__(
        self, records: Records, path: Callable[[str], Path], compact: Callable[[Path, Path], Awaitable[object]]
    ) -> None:
        """`path` is the repository's (a plain file, or a blob's descriptor); `compact` blockd's, which reads either."""
        self._records = records
        self._path = path
        self._compact = compact

    async def get(self, chain_key: str) -> ConvertedLayer | None:
        """See `ConvertedLayers.get`."""
        found = await self._records.get(chain_key)
        return None if found is None else ConvertedLayer(found.blob.digest, found.parent)

    async def put(self, chain_key: str, layer: Path, parent_id: str | None) -> ConvertedLayer:
        """See `ConvertedLayers.put`."""
        made = await self._records.put(chain_key, layer, parent_id)
        return ConvertedLayer(made.blob.digest, made.parent)

    async def local_file(self, layer_id: str, folder: Path) -> Path:
        """See `ConvertedLayers.local_file`. A blob of a store is fetched whole: converting reads all of its parents'
        directories, in no order that a cache could foresee."""
        path = self._path(layer_id)
        if path.suffix != BLOB_DESCRIPTOR_SUFFIX:
            return path
        copy = folder / f"parent-{layer_id}.lsmt"
        await self._compact(path, copy)
        return copy
