"""POST /aenv/templates: build a template from an OCI image, a Dockerfile's base, a raw ext4 image, or base packages.

Our own short way until E2B's build protocol is served: one request that answers when the template exists, or tells of
its progress until then. It takes minutes the first time, so it has a time budget of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec
from starlette.responses import Response

from agentenv.api import images, render, stored, wire
from agentenv.api.call import Call
from agentenv.api.errors import NotServed
from agentenv.api.images import DISK_MIB_MAX, DISK_MIB_MIN, image_reference, within
from agentenv.api.streams import with_progress
from agentenv.errors import InvalidRequest
from agentenv.model import Dockerfile, ImageReference, ImageSource, Progress, Report, Resources, SnapshotManifest
from agentenv.node.interface import TemplateInfo

BUILD_S_MAX: Final = images.PULL_S_MAX
CPU_COUNT_MAX: Final = 64
MEMORY_MIB_MIN: Final = 128
MEMORY_MIB_MAX: Final = 1 << 20


class NewTemplate(msgspec.Struct, frozen=True):
    """The body. `image` is an image reference or the absolute path of a raw ext4 image on the node; `dockerfile` is the
    text of one, whose FROM names the image; with neither the base packages are used.

    `name` may be left out with an image reference: it then follows from the image, and a template that was made of the
    same image with the same resources is answered again.
    """

    name: str | None = None
    image: str | None = None
    dockerfile: str | None = None
    build_args: dict[str, str] | None = msgspec.field(name="buildArgs", default=None)
    cpu_count: int | None = msgspec.field(name="cpuCount", default=None)
    memory_mb: int | None = msgspec.field(name="memoryMB", default=None)
    disk_size_mb: int | None = msgspec.field(name="diskSizeMB", default=None)


class TemplateBuilder(Protocol):
    """What builds templates of anything but images; wired by the server."""

    @property
    def defaults(self) -> Resources:
        """What a template gets where the request says nothing."""

    async def build(self, name: str, image: Path | None, resources: Resources) -> SnapshotManifest:
        """Raises `InvalidRequest`, `ImageError`, `OperationFailed`."""


Build = Callable[[Report], Awaitable[SnapshotManifest]]


async def build(call: Call[NewTemplate]) -> Response:
    """Build, boot once, snapshot, name. The newest template of a name owns it."""
    source = _source(call.body)
    chosen = _of_image(call, source) if isinstance(source, (ImageReference, Dockerfile)) else _raw(call, source)

    async def work(report: Report) -> wire.Template:
        return render.template(TemplateInfo(await chosen(report), 0), call.settings)

    what = call.body.name or call.body.image
    return await with_progress(call, work, 201, f"building {what}", lambda made: stored.TemplateLine(template=made))


def _of_image(call: Call[NewTemplate], source: ImageSource) -> Build:
    service = images.service(call)
    name, resources = call.body.name, _resources(call.body, service.defaults)
    if name is None and not isinstance(source, ImageReference):
        raise InvalidRequest("name: is needed with a dockerfile")

    async def run(report: Report) -> SnapshotManifest:
        return await service.build(source, name, resources, report)

    return run


def _raw(call: Call[NewTemplate], image: Path | None) -> Build:
    builder = call.context.builder
    if builder is None:
        raise NotServed("this server builds no templates")
    resources = _resources(call.body, builder.defaults)
    if call.body.name is None:
        raise InvalidRequest("name: is needed unless image is an image reference")
    name = call.body.name

    async def run(report: Report) -> SnapshotManifest:
        report(Progress(f"building {name}: layer, first boot, snapshot"))
        return await builder.build(name, image, resources)

    return run


def _source(body: NewTemplate) -> Path | ImageSource | None:
    """Raises `InvalidRequest` for a mix that means nothing."""
    if body.dockerfile is not None:
        if body.image is not None:
            raise InvalidRequest("dockerfile: cannot be given together with image")
        return Dockerfile(body.dockerfile, body.build_args or {})
    if body.build_args:
        raise InvalidRequest("buildArgs: can only be given with dockerfile")
    if body.image is None:
        return None
    return Path(body.image) if body.image.startswith("/") else image_reference(body.image, "image")


def _resources(body: NewTemplate, defaults: Resources) -> Resources:
    return Resources(
        cpu_count=within("cpuCount", body.cpu_count, defaults.cpu_count, 1, CPU_COUNT_MAX),
        memory_mib=within("memoryMB", body.memory_mb, defaults.memory_mib, MEMORY_MIB_MIN, MEMORY_MIB_MAX),
        disk_mib=within("diskSizeMB", body.disk_size_mb, defaults.disk_mib, DISK_MIB_MIN, DISK_MIB_MAX),
    )
