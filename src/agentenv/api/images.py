"""Handlers of /aenv/images and of the export of a snapshot, and what they need of the server.

Owns limits and shapes. References and Dockerfiles are parsed behind the interface, which alone knows their grammar.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

from starlette.responses import Response

from agentenv.api import stored
from agentenv.api.call import Call, NoBody, json_response, no_content
from agentenv.api.errors import NotServed
from agentenv.api.names import shown, template_reference
from agentenv.api.streams import ArchiveStream, with_progress
from agentenv.errors import InvalidRequest
from agentenv.model import (
    ExportOptions,
    ImageInfo,
    ImageReference,
    ImageSource,
    Report,
    Resources,
    SnapshotManifest,
)

REFERENCE_CHARS_MAX: Final = 1_024
DISK_MIB_MIN: Final = 64
DISK_MIB_MAX: Final = 1 << 20
# A pull of tens of gigabytes over a slow line, and the making and sending of an archive of that size.
PULL_S_MAX: Final = 6 * 3600.0
EXPORT_S_MAX: Final = 6 * 3600.0
OCI_ARCHIVE: Final = "application/x-tar"
COMPRESSIONS: Final = ("none", "gzip", "zstd")
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
# Of a relative path, a home directory or an option, none of which can begin a reference.
_NO_REFERENCE_BEGINS: Final = (".", "~", "-", "/")


class ImageService(Protocol):
    """What the API needs for images; wired by the server.

    Every method raises only `AenvError`s. The same image or template at the same time is made once. A caller that is
    cancelled only stops waiting: others who wait for the same thing get it all the same, and when nobody is left the
    work ends and leaves nothing behind but what is whole.
    """

    @property
    def defaults(self) -> Resources:
        """What a template or image gets where the request says nothing."""

    async def build(
        self, source: ImageSource, name: str | None, resources: Resources, report: Report
    ) -> SnapshotManifest:
        """A template whose root file system is the image: pull and convert what is missing, boot once, snapshot.

        Without a name the name follows from image and resources, and a template that has it is answered as it is.
        Raises `InvalidRequest` (reference, Dockerfile or name), `NotFound` (no such image), `ImageError`,
        `StorageFull`, `OperationFailed`.
        """

    async def pull(self, reference: ImageReference, disk_mib: int, report: Report) -> ImageInfo:
        """Pull and convert only, for disks of this size. Raises as `build`."""

    async def images(self) -> list[ImageInfo]:
        """All converted images, in no particular order."""

    async def remove(self, digest: str) -> None:
        """Forget what was converted of an image (`sha256:` and 64 hexadecimal digits), for every disk size.

        Templates made of it stay, and layers that something needs. Raises `NotFound`.
        """

    def export(self, snapshot: str, options: ExportOptions) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The disk of a snapshot or template (id or name) as one OCI archive, in pieces of at most 1 MiB.

        Entering makes the archive, leaving removes what was made for it, also when it is left early or by a cancel.
        Entering raises `NotFound`, `InvalidRequest`, `StorageFull`, `OperationFailed`.
        """


async def list_images(call: Call[NoBody]) -> Response:
    """GET /aenv/images: what was converted here, newest first."""
    found = await service(call).images()
    found.sort(key=lambda info: (info.created_at, info.digest), reverse=True)
    return json_response(200, [stored.image(info) for info in found])


async def pull(call: Call[stored.NewImage]) -> Response:
    """POST /aenv/images: pull and convert an image, without making a template of it."""
    images = service(call)
    reference = image_reference(call.body.reference, "reference")
    disk_mib = within("diskSizeMB", call.body.disk_size_mb, images.defaults.disk_mib, DISK_MIB_MIN, DISK_MIB_MAX)

    async def work(report: Report) -> stored.Image:
        return stored.image(await images.pull(reference, disk_mib, report))

    return await with_progress(
        call, work, 201, f"pulling {reference.text}", lambda image: stored.ImageLine(image=image)
    )


async def delete(call: Call[NoBody]) -> Response:
    """DELETE /aenv/images/{digest}: forget a converted image; templates made of it stay."""
    images = service(call)
    match = _DIGEST.fullmatch(call.params["digest"])
    if match is None:
        raise InvalidRequest(f"digest: {shown(call.params['digest'])} is not sha256:<64 hexadecimal digits>")
    await images.remove(f"sha256:{match[1]}")
    return no_content()


async def export(call: Call[stored.ExportRequest]) -> Response:
    """POST /aenv/snapshots/{id}/export: the disk of a snapshot as an OCI archive, a tar."""
    images = service(call)
    snapshot = template_reference(call.params["snapshot_id"], "snapshotID")
    compression = call.body.compression or ExportOptions().compression
    if compression not in COMPRESSIONS:
        raise InvalidRequest(f"compression: {shown(compression)} is not one of {', '.join(COMPRESSIONS)}")
    reference = call.body.reference
    name = None if reference is None else image_reference(reference, "reference").text
    return ArchiveStream(images.export(snapshot, ExportOptions(compression, name)), OCI_ARCHIVE)


def service(call: Call[Any]) -> ImageService:
    """Raises `NotServed` on a server that has no images."""
    if call.context.images is None:
        raise NotServed("this server handles no images")
    return call.context.images


def image_reference(raw: str, field: str) -> ImageReference:
    """`raw` if it may be a reference at all. Raises `InvalidRequest` naming `field`."""
    if not raw or len(raw) > REFERENCE_CHARS_MAX or not raw.isascii() or not raw.isprintable() or " " in raw:
        raise InvalidRequest(f"{field}: must be 1 to {REFERENCE_CHARS_MAX} printable ASCII characters without spaces")
    if raw.startswith(_NO_REFERENCE_BEGINS):
        raise InvalidRequest(f"{field}: {shown(raw)} is not an image reference, like python:3.12 or oci:/dir:tag")
    return ImageReference(raw)


def within(name: str, value: int | None, default: int, least: int, most: int) -> int:
    """`value` or the default. Raises `InvalidRequest` naming the field of a value out of range."""
    if value is None:
        return default
    if not least <= value <= most:
        raise InvalidRequest(f"{name}: {value} is not from {least} to {most}")
    return value
