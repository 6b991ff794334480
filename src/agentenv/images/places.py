"""From a reference to the source that holds it. The one place that knows all kinds, and `scratch`, which is nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from agentenv.errors import ImageError
from agentenv.images.archive import DockerArchiveSource, OciArchiveSource
from agentenv.images.config import parse_config
from agentenv.images.layout import LayoutSource
from agentenv.images.manifest import LINUX_AMD64, Platform, digest_of
from agentenv.images.reference import LocalReference, RegistryReference, Transport
from agentenv.images.registry import RegistryClient
from agentenv.images.registry_source import RegistrySource
from agentenv.images.source import Image, ImageLayer, OnBytes, Source

_LOCAL: Final[Mapping[Transport, Callable[[LocalReference, Platform], Source]]] = {
    Transport.OCI: LayoutSource,
    Transport.OCI_ARCHIVE: OciArchiveSource,
    Transport.DOCKER_ARCHIVE: DockerArchiveSource,
}


def open_source(
    reference: RegistryReference | LocalReference, client: RegistryClient, platform: Platform = LINUX_AMD64
) -> Source:
    """The source of a parsed reference. Touches nothing yet: what is wrong shows at `Source.image`."""
    if isinstance(reference, RegistryReference):
        return RegistrySource(client, reference, platform)
    return _LOCAL[reference.transport](reference, platform)


class ScratchSource:
    """The empty image that a Dockerfile's `FROM scratch` means: no layers and a plain configuration."""

    def __init__(self, platform: Platform = LINUX_AMD64) -> None:
        self._platform = platform

    async def image(self) -> Image:
        """See `Source.image`. Its digest is that of its configuration."""
        body = {"architecture": self._platform.architecture, "os": self._platform.os, "rootfs": {"type": "layers"}}
        raw = json.dumps(body, separators=(",", ":")).encode()
        digest = digest_of(raw)
        return Image("scratch", digest, digest, parse_config(raw, "scratch"), ())

    async def fetch_layer(self, layer: ImageLayer, into: Path, on_bytes: OnBytes) -> Path:
        """See `Source.fetch_layer`."""
        raise ImageError("scratch has no layers")

    async def aclose(self) -> None:
        """Nothing is open."""
