"""What an image is to users of this package: where one comes from, what became of it, and signs of life of long work.

Values only. Parsing of references and Dockerfiles is in `images`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Progress:
    """One sign of life of a long operation, for a person: what is being done, and how far that step is.

    A step that cannot be counted has no total; a new `text` begins a new step, whose bytes count from 0.
    """

    text: str
    done_bytes: int = 0
    total_bytes: int | None = None


# Takes signs of life. Called on the event loop's own thread, any number of times a second; never blocks nor raises.
Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An OCI image by name (`python:3.12`, `docker.io/library/x@sha256:...`) or on the node's own disk
    (`oci:/dir:tag`, `oci-archive:/f.tar`, `docker-archive:/f.tar`). Not parsed yet.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """The text of a Dockerfile, whose FROM names the image, and the values of its ARGs. Not parsed yet."""

    text: str
    build_args: Mapping[str, str] = field(default_factory=dict)


ImageSource = ImageReference | Dockerfile


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One converted image. An image that was converted for two disk sizes is two of these with one digest."""

    # As they were asked for, the newest first; several names may mean one digest.
    references: tuple[str, ...]
    # "sha256:" and 64 hexadecimal digits: the manifest of the platform that was chosen.
    digest: str
    # Layer ids, bottom first; images with the same lower layers name the same ids. They are of the repository, but for
    # those that are read from a registry on demand.
    layers: tuple[str, ...]
    # Stored bytes of these layers, wherever. Those that other images have too count in full here.
    size_bytes: int
    disk_mib: int
    # Unix seconds.
    created_at: float


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How the disk of a snapshot becomes an OCI archive."""

    # "none", "gzip" or "zstd": of the layers inside.
    compression: str = "gzip"
    # The name in the archive's index (`org.opencontainers.image.ref.name`); None: the snapshot's own.
    reference: str | None = None
