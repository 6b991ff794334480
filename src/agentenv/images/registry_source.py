"""An image in a registry, as a `Source`."""

from __future__ import annotations

from pathlib import Path

from agentenv.errors import ImageNotFound
from agentenv.images.config import CONFIG_BYTES_MAX
from agentenv.images.manifest import LINUX_AMD64, Descriptor, Index, Manifest, Platform
from agentenv.images.reference import RegistryReference
from agentenv.images.registry import RegistryClient
from agentenv.images.source import Image, ImageLayer, OnBytes, resolve_image


class RegistrySource:
    """A name is resolved once: what it means later does not change an image that is being converted."""

    def __init__(self, client: RegistryClient, reference: RegistryReference, platform: Platform = LINUX_AMD64) -> None:
        self._client = client
        self._reference = reference
        self._platform = platform
        self._image: Image | None = None

    @property
    def reference(self) -> RegistryReference:
        return self._reference

    @property
    def client(self) -> RegistryClient:
        return self._client

    @property
    def platform(self) -> Platform:
        return self._platform

    async def image(self) -> Image:
        """See `Source.image`."""
        if self._image is None:
            named = await self._named()
            self._image = await resolve_image(self, named, str(self._reference), self._platform)
        return self._image

    async def _named(self) -> Manifest | Index:
        try:
            return await self._client.manifest(self._reference)
        except ImageNotFound as error:
            raise ImageNotFound(f"{self._reference}: no such image ({error})") from error

    async def fetch_layer(self, layer: ImageLayer, into: Path, on_bytes: OnBytes) -> Path:
        """See `Source.fetch_layer`."""
        assert layer.blob is not None, "a registry's layers have digests"
        await self._client.blob(self._reference, layer.blob, into, on_bytes)
        return into

    async def aclose(self) -> None:
        """The client is the caller's, who shares it."""

    async def manifest(self, digest: str) -> Manifest | Index:
        """See `Documents`."""
        return await self._client.manifest(self._reference.with_digest(digest))

    async def config(self, blob: Descriptor) -> bytes:
        """See `Documents`."""
        return await self._client.small_blob(self._reference, blob, CONFIG_BYTES_MAX)
