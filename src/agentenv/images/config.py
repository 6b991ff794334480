"""An image's configuration: what a machine made of it should run, as whom and where, and the JSON it came as.

Owns reading it. The raw JSON is kept, because an export must carry every field on, also those that nobody here knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv.errors import ImageError
from agentenv.images._json import json_object
from agentenv.images.reference import DIGEST

CONFIG_BYTES_MAX: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The fields that somebody here acts on, and `raw`, the whole document."""

    os: str
    architecture: str
    variant: str | None = None
    env: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    user: str = ""
    working_dir: str = ""
    # As `80/tcp`.
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    stop_signal: str = ""
    created: str = ""
    # sha256 of each layer's tar, bottom first.
    diff_ids: tuple[str, ...] = ()
    raw: bytes = b"{}"

    def environment(self) -> dict[str, str]:
        """`env` by name; an entry without '=' names a variable without a value, and a later entry wins."""
        pairs = (entry.partition("=") for entry in self.env)
        return {name: value for name, _, value in pairs if name}


def parse_config(raw: bytes, origin: str) -> ImageConfig:
    """Read a configuration document. Raises `ImageError` naming `origin` and the field that is wrong."""
    read = _Reader(json_object(raw, origin, CONFIG_BYTES_MAX), origin)
    inner = _Reader(read.mapping("config"), f"{origin}: config")
    rootfs = _Reader(read.mapping("rootfs"), f"{origin}: rootfs")
    diff_ids = rootfs.texts("diff_ids")
    for diff_id in diff_ids:
        if not DIGEST.fullmatch(diff_id):
            raise ImageError(f"{origin}: rootfs.diff_ids holds {diff_id[:80]!r}, which is no sha256 digest")
    return ImageConfig(
        os=read.text("os"),
        architecture=read.text("architecture"),
        variant=read.text("variant") or None,
        env=inner.texts("Env"),
        entrypoint=inner.texts("Entrypoint"),
        cmd=inner.texts("Cmd"),
        user=inner.text("User"),
        working_dir=inner.text("WorkingDir"),
        exposed_ports=tuple(sorted(inner.mapping("ExposedPorts"))),
        volumes=tuple(sorted(inner.mapping("Volumes"))),
        labels={str(name): str(value) for name, value in inner.mapping("Labels").items()},
        stop_signal=inner.text("StopSignal"),
        created=read.text("created"),
        diff_ids=diff_ids,
        raw=raw,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Fields by kind. Builders write null for what is empty, so null counts as absent everywhere."""

    body: Mapping[str, Any]
    origin: str

    def text(self, name: str) -> str:
        value = self.body.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ImageError(f"{self.origin}: {name} is not text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.body.get(name)
        if value is None:
            return ()
        # Dockerfiles in shell form gave a plain string in very old images.
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ImageError(f"{self.origin}: {name} is not a list of text")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ImageError(f"{self.origin}: {name} is not an object")
        return value
