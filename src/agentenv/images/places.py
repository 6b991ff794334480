"""From a reference to the source that holds it. The one place that knows all kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from agentenv.images.archive import DockerArchiveSource, OciArchiveSource
from agentenv.images.layout import LayoutSource
from agentenv.images.manifest import LINUX_AMD64, Platform
from agentenv.images.reference import LocalReference, RegistryReference, Transport
from agentenv.images.registry import RegistryClient
from agentenv.images.registry_source import RegistrySource
from agentenv.images.source import Source

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
