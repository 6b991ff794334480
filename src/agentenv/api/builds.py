"""POST /aenv/templates: build a template from the base packages or from a raw ext4 image on the node's disk.

Our own short way until E2B's build protocol is served: one request that answers when the template exists. It takes
minutes the first time, so it has a time budget of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

import msgspec
from starlette.responses import Response

from agentenv.api import render
from agentenv.api.call import Call, json_response
from agentenv.errors import InvalidRequest, Unsupported
from agentenv.model import Resources, SnapshotManifest
from agentenv.node.interface import TemplateInfo

BUILD_S_MAX: Final = 3600.0
CPU_COUNT_MAX: Final = 64
MEMORY_MIB_MIN: Final = 128
DISK_MIB_MIN: Final = 64
DISK_MIB_MAX: Final = 1 << 20


class NewTemplate(msgspec.Struct, frozen=True):
    """The body. `image` is the path of a raw ext4 image on the node; without it the base packages are used."""

    name: str
    image: str | None = None
    cpu_count: int | None = msgspec.field(name="cpuCount", default=None)
    memory_mb: int | None = msgspec.field(name="memoryMB", default=None)
    disk_size_mb: int | None = msgspec.field(name="diskSizeMB", default=None)


class TemplateBuilder(Protocol):
    """What builds templates; wired by the server."""

    @property
    def defaults(self) -> Resources:
        """What a template gets where the request says nothing."""

    async def build(self, name: str, image: Path | None, resources: Resources) -> SnapshotManifest:
        """Raises `InvalidRequest`, `ImageError`, `OperationFailed`."""


async def build(call: Call[NewTemplate]) -> Response:
    """Build, boot once, snapshot, name. The newest template of a name owns it."""
    builder = call.context.builder
    if builder is None:
        raise Unsupported("this server builds no templates")
    body, defaults = call.body, builder.defaults
    resources = Resources(
        cpu_count=_within("cpuCount", body.cpu_count, defaults.cpu_count, 1, CPU_COUNT_MAX),
        memory_mib=_within("memoryMB", body.memory_mb, defaults.memory_mib, MEMORY_MIB_MIN, 1 << 20),
        disk_mib=_within("diskSizeMB", body.disk_size_mb, defaults.disk_mib, DISK_MIB_MIN, DISK_MIB_MAX),
    )
    image = None if body.image is None else Path(body.image)
    if image is not None and not image.is_absolute():
        raise InvalidRequest(f"image: {body.image!r} is not an absolute path on the node")
    manifest = await builder.build(body.name, image, resources)
    return json_response(201, render.template(TemplateInfo(manifest, 0), call.settings))


def _within(name: str, value: int | None, default: int, least: int, most: int) -> int:
    if value is None:
        return default
    if not least <= value <= most:
        raise InvalidRequest(f"{name}: {value} is not from {least} to {most}")
    return value
