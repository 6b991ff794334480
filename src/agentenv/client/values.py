"""What the API and the guest daemon answer, as values. Each keeps the JSON object it was made from in `raw`.

Only fields that the contract requires are required here; a missing one is a `ProtocolError`, an unknown one is kept
in `raw` and otherwise ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentenv.client.errors import ApiError, ProtocolError, from_answer

Json = Mapping[str, Any]


def as_object(value: Any, what: str) -> Json:
    """`value` if it is a JSON object. Raises `ProtocolError`."""
    if not isinstance(value, dict):
        raise ProtocolError(f"{what}: expected a JSON object")
    return value


def as_list(value: Any, what: str) -> list[Any]:
    """`value` if it is a JSON array. Raises `ProtocolError`."""
    if not isinstance(value, list):
        raise ProtocolError(f"{what}: expected a JSON array")
    return value


def text(data: Json, name: str) -> str:
    """A required string. Raises `ProtocolError`."""
    value = data.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"the answer lacks the text field {name!r}")
    return value


def integer(data: Json, name: str, default: int | None = None) -> int:
    """An integer, also in its string form (proto3 JSON writes 64-bit numbers so). Raises `ProtocolError`."""
    value = data.get(name, default)
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"the answer lacks the number field {name!r}") from error


def moment(data: Json, name: str) -> datetime | None:
    """A time in RFC 3339; None when absent or empty. Raises `ProtocolError`."""
    value = data.get(name)
    if not value:
        return None
    try:
        return datetime.fromisoformat(str(value))
    except ValueError as error:
        raise ProtocolError(f"the field {name!r} is not a time: {value!r}") from error


def _optional(data: Json, name: str) -> str | None:
    value = data.get(name)
    return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as list and get show it. The access token is only in the answer of get."""

    sandbox_id: str
    template_id: str
    state: str
    alias: str | None
    cpu_count: int
    memory_mib: int
    disk_mib: int
    started_at: datetime | None
    end_at: datetime | None
    metadata: dict[str, str]
    envd_access_token: str | None
    auto_resume: bool
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, value: Any) -> SandboxInfo:
        """Raises `ProtocolError`."""
        data = as_object(value, "sandbox")
        lifecycle = data.get("lifecycle")
        return cls(
            sandbox_id=text(data, "sandboxID"),
            template_id=text(data, "templateID"),
            state=text(data, "state"),
            alias=_optional(data, "alias"),
            cpu_count=integer(data, "cpuCount", 0),
            memory_mib=integer(data, "memoryMB", 0),
            disk_mib=integer(data, "diskSizeMB", 0),
            started_at=moment(data, "startedAt"),
            end_at=moment(data, "endAt"),
            metadata=dict(data.get("metadata") or {}),
            envd_access_token=_optional(data, "envdAccessToken"),
            auto_resume=isinstance(lifecycle, dict) and lifecycle.get("autoResume") is True,
            raw=data,
        )


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A committed snapshot; `snapshot_id` is a valid template for `create`."""

    snapshot_id: str
    names: tuple[str, ...]
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, value: Any) -> SnapshotInfo:
        """Raises `ProtocolError`."""
        data = as_object(value, "snapshot")
        names = tuple(str(name) for name in data.get("names") or ())
        return cls(snapshot_id=text(data, "snapshotID"), names=names, raw=data)


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """A template, which is a snapshot with names."""

    template_id: str
    names: tuple[str, ...]
    build_status: str | None
    cpu_count: int
    memory_mib: int
    disk_mib: int
    spawn_count: int
    created_at: datetime | None
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, value: Any) -> TemplateInfo:
        """Raises `ProtocolError`."""
        data = as_object(value, "template")
        return cls(
            template_id=text(data, "templateID"),
            names=tuple(str(name) for name in data.get("names") or data.get("aliases") or ()),
            build_status=_optional(data, "buildStatus"),
            cpu_count=integer(data, "cpuCount", 0),
            memory_mib=integer(data, "memoryMB", 0),
            disk_mib=integer(data, "diskSizeMB", 0),
            spawn_count=integer(data, "spawnCount", 0),
            created_at=moment(data, "createdAt"),
            raw=data,
        )


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One file or directory of a sandbox. `kind` is "file", "directory" or "other", of a symlink's target."""

    name: str
    path: str
    kind: str
    size_bytes: int
    mode: int
    permissions: str
    owner: str
    group: str
    modified_at: datetime | None
    symlink_target: str | None
    raw: Json = field(repr=False)

    @classmethod
    def of(cls, value: Any) -> EntryInfo:
        """Raises `ProtocolError`."""
        data = as_object(value, "file entry")
        kinds = {"FILE_TYPE_FILE": "file", "FILE_TYPE_DIRECTORY": "directory"}
        return cls(
            name=text(data, "name"),
            path=text(data, "path"),
            kind=kinds.get(str(data.get("type")), "other"),
            size_bytes=integer(data, "size", 0),
            mode=integer(data, "mode", 0),
            permissions=str(data.get("permissions", "")),
            owner=str(data.get("owner", "")),
            group=str(data.get("group", "")),
            modified_at=moment(data, "modifiedTime"),
            symlink_target=_optional(data, "symlinkTarget"),
            raw=data,
        )


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that the guest daemon started and that has not ended."""

    pid: int
    command: str
    args: tuple[str, ...]
    cwd: str | None
    tag: str | None

    @classmethod
    def of(cls, value: Any) -> ProcessInfo:
        """Raises `ProtocolError`."""
        data = as_object(value, "process")
        config = as_object(data.get("config", {}), "process config")
        return cls(
            pid=integer(data, "pid"),
            command=str(config.get("cmd", "")),
            args=tuple(str(arg) for arg in config.get("args") or ()),
            cwd=_optional(config, "cwd"),
            tag=_optional(data, "tag"),
        )


def fork_error(value: Any) -> ApiError:
    """The error that one child of a fork met."""
    data = as_object(value, "fork error")
    return from_answer(integer(data, "code", 500), str(data.get("message", "")), _optional(data, "error_code"))
