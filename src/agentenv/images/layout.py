"""An OCI image layout directory, as a `Source`.

Owns reading the directory. Blobs are verified where they are read; layers are handed out in place, and whoever unpacks
them verifies them (their digest is in the descriptor).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from agentenv.errors import ImageError
from agentenv.images import media
from agentenv.images._files import regular_size
from agentenv.images.config import CONFIG_BYTES_MAX
from agentenv.images.manifest import (
    LINUX_AMD64,
    MANIFEST_BYTES_MAX,
    Descriptor,
    Index,
    Manifest,
    Platform,
    digest_of,
    parse_manifest,
)
from agentenv.images.reference import LocalReference
from agentenv.images.source import Image, ImageLayer, OnBytes, check_config_size, one_of, resolve_image

INDEX_FILE: Final = "index.json"


def blob_path(digest: str) -> str:
    """Where a layout has a blob, relative to it."""
    algorithm, _, encoded = digest.partition(":")
    return f"blobs/{algorithm}/{encoded}"


class LayoutSource:
    """The directory may be written by others meanwhile: every document is verified by the digest that named it."""

    def __init__(self, reference: LocalReference, platform: Platform = LINUX_AMD64) -> None:
        self._reference = reference
        self._root = Path(reference.path)
        self._platform = platform
        self._image: Image | None = None

    async def image(self) -> Image:
        """See `Source.image`."""
        if self._image is None:
            raw = await asyncio.to_thread(self._read, INDEX_FILE, MANIFEST_BYTES_MAX)
            index = parse_manifest(raw, media.OCI_INDEX, str(self._reference))
            if not isinstance(index, Index):
                raise ImageError(f"{self._reference}: {INDEX_FILE} is no index")
            entry = one_of(index, self._reference.name, self._reference.digest, str(self._reference))
            named = await self.manifest(entry.digest)
            self._image = await resolve_image(self, named, str(self._reference), self._platform)
        return self._image

    async def fetch_layer(self, layer: ImageLayer, into: Path, on_bytes: OnBytes) -> Path:
        """See `Source.fetch_layer`: the layout's own file, since it is there already."""
        path = self._root / blob_path(layer.key)
        size = await asyncio.to_thread(regular_size, path)
        if size != layer.size_bytes:
            raise ImageError(f"{path}: {size} bytes; the manifest says {layer.size_bytes}")
        on_bytes(size)
        return path

    async def aclose(self) -> None:
        """Nothing is open."""

    async def manifest(self, digest: str) -> Manifest | Index:
        """See `Documents`."""
        raw = await asyncio.to_thread(self._verified, digest, MANIFEST_BYTES_MAX)
        return parse_manifest(raw, "", str(self._reference))

    async def config(self, blob: Descriptor) -> bytes:
        """See `Documents`."""
        check_config_size(blob, str(self._reference))
        return await asyncio.to_thread(self._verified, blob.digest, CONFIG_BYTES_MAX)

    def _verified(self, digest: str, bytes_max: int) -> bytes:
        raw = self._read(blob_path(digest), bytes_max)
        if digest_of(raw) != digest:
            raise ImageError(f"{self._root / blob_path(digest)}: the content has another digest")
        return raw

    def _read(self, name: str, bytes_max: int) -> bytes:
        path = self._root / name
        try:
            size = regular_size(path)
            if size > bytes_max:
                raise ImageError(f"{path}: more than {bytes_max} bytes")
            return path.read_bytes()
        except OSError as error:
            raise ImageError(f"{path}: cannot be read: {error.strerror}") from error
