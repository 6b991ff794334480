"""Media types of manifests, configurations and layers, and which of them this package takes.

Owns the words, not the documents (`manifest`). A type that is not here is refused by its name.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import Final

OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
OCI_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
DOCKER_INDEX: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG: Final = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER: Final = "application/vnd.docker.image.rootfs.diff.tar"

INDEXES: Final = frozenset({OCI_INDEX, DOCKER_INDEX})
MANIFESTS: Final = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})
CONFIGS: Final = frozenset({OCI_CONFIG, DOCKER_CONFIG})
SCHEMA_1: Final = frozenset(
    {
        "application/vnd.docker.distribution.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
    }
)
# Asked for in this order. Schema 1 is not asked for, so that a registry which has both gives the other.
ACCEPTED_MANIFESTS: Final = (OCI_INDEX, OCI_MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST)


class Compression(enum.StrEnum):
    """How a layer's tar is packed. AUTO (docker archives do not say): found out from its first bytes."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"
    AUTO = "auto"


LAYERS: Final = MappingProxyType(
    {
        OCI_LAYER: Compression.NONE,
        f"{OCI_LAYER}+gzip": Compression.GZIP,
        f"{OCI_LAYER}+zstd": Compression.ZSTD,
        DOCKER_LAYER: Compression.NONE,
        f"{DOCKER_LAYER}.gzip": Compression.GZIP,
        # Written by old buildkit, though Docker never defined it.
        f"{DOCKER_LAYER}.zstd": Compression.ZSTD,
    }
)
# Layers that may not be redistributed: a registry has only their addresses elsewhere.
_FOREIGN_PREFIXES: Final = (
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
)

# Annotations of a layer that holds an overlaybd layer, or (turbo) only points into the blocks of an ordinary one.
OVERLAYBD_DIGEST: Final = "containerd.io/snapshot/overlaybd/blob-digest"
TURBO_DIGEST: Final = "containerd.io/snapshot/overlaybd/turbo-oci/target-digest"


def is_foreign(media_type: str) -> bool:
    """Whether the type is one of those that registries do not hold."""
    return media_type.startswith(_FOREIGN_PREFIXES)
