"""The JSON shapes of the public API, as E2B's clients send and read them.

Values only: decoding and limits are in `body`, meaning is in the handlers. In requests a null means "absent" and
unknown keys are ignored (newer clients send more than we know); features that we know and do not have are fields
here, so that `create` can refuse them by name. In answers an optional field that has no value is left out.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType, field

_ENCODER: Final = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """JSON in UTF-8, without white space."""
    return _ENCODER.encode(value)


class Request(msgspec.Struct):
    """Base of what clients send."""


class Answer(msgspec.Struct):
    """Base of what we send."""


# Seconds. Whole in every SDK; fractions are taken too.
Seconds = int | float


class AutoResume(Request):
    """Whether traffic to a paused sandbox resumes it."""

    enabled: bool | None = None


class NetworkOptions(Request):
    """Ingress options, and egress rules of which this version has only "all" and "none"."""

    allow_public_traffic: bool | None = field(name="allowPublicTraffic", default=None)
    mask_request_host: str | None = field(name="maskRequestHost", default=None)
    allow_out: list[str] | None = field(name="allowOut", default=None)
    deny_out: list[str] | None = field(name="denyOut", default=None)
    dns_servers: list[str] | None = field(name="dnsServers", default=None)
    egress_proxy: dict[str, Any] | None = field(name="egressProxy", default=None)
    https_ports: list[int] | None = field(name="httpsPorts", default=None)
    rules: dict[str, Any] | None = None


class NewSandbox(Request):
    """Body of POST /v2/sandboxes. `envs` is an older name of `envVars`."""

    template_id: str = field(name="templateID")
    timeout: Seconds | None = None
    auto_pause: bool | None = field(name="autoPause", default=None)
    auto_pause_memory: bool | None = field(name="autoPauseMemory", default=None)
    auto_resume: AutoResume | None = field(name="autoResume", default=None)
    allow_internet_access: bool | None = None
    network: NetworkOptions | None = None
    metadata: dict[str, str | None] | None = None
    env_vars: dict[str, str | None] | None = field(name="envVars", default=None)
    envs: dict[str, str | None] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[dict[str, Any]] | None = field(name="volumeMounts", default=None)


class NewSandboxV1(NewSandbox):
    """Body of POST /sandboxes: only here may a sandbox be unsecured."""

    secure: bool | None = None


class ConnectRequest(Request):
    """Body of both connect routes."""

    timeout: Seconds | None = None
    memory: bool | None = None


class TimeoutRequest(Request):
    """Body of POST timeout."""

    timeout: Seconds


class PauseRequest(Request):
    """Body of POST pause."""

    memory: bool | None = None
    require_healthy_guest: bool | None = field(name="requireHealthyGuest", default=None)


class ResumeRequest(Request):
    """Body of POST resume."""

    timeout: Seconds | None = None
    auto_pause: bool | None = field(name="autoPause", default=None)
    memory: bool | None = None


class RefreshRequest(Request):
    """Body of POST refreshes."""

    duration: Seconds | None = None


class ForkRequest(Request):
    """Body of POST fork."""

    timeout: Seconds | None = None
    count: int | None = None


class SnapshotRequest(Request):
    """Body of POST snapshots."""

    name: str | None = None
    memory: bool | None = None


class ErrorBody(Answer):
    """Every error. `code` repeats the HTTP status, because the JS SDK reads it from here."""

    code: int
    message: str
    error_code: str | UnsetType = UNSET


class Sandbox(Answer):
    """A started, connected or forked sandbox."""

    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    client_id: str = field(name="clientID")
    envd_version: str = field(name="envdVersion")
    domain: str
    alias: str | UnsetType = UNSET
    envd_access_token: str | UnsetType = field(name="envdAccessToken", default=UNSET)
    traffic_access_token: str | UnsetType = field(name="trafficAccessToken", default=UNSET)


class ListedSandbox(Answer):
    """One sandbox of a list."""

    template_id: str = field(name="templateID")
    sandbox_id: str = field(name="sandboxID")
    client_id: str = field(name="clientID")
    started_at: str = field(name="startedAt")
    end_at: str = field(name="endAt")
    cpu_count: int = field(name="cpuCount")
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    state: str
    envd_version: str = field(name="envdVersion")
    metadata: dict[str, str]
    alias: str | UnsetType = UNSET


class NetworkAnswer(Answer):
    """The network options in force."""

    allow_public_traffic: bool = field(name="allowPublicTraffic")
    mask_request_host: str | UnsetType = field(name="maskRequestHost", default=UNSET)


class Lifecycle(Answer):
    """What expiry does and whether traffic resumes."""

    auto_resume: bool = field(name="autoResume")
    on_timeout: str = field(name="onTimeout")


class SandboxDetail(ListedSandbox, kw_only=True):
    """One sandbox by its id."""

    domain: str
    allow_internet_access: bool = field(name="allowInternetAccess")
    network: NetworkAnswer
    lifecycle: Lifecycle
    envd_access_token: str | UnsetType = field(name="envdAccessToken", default=UNSET)
    pause_mode: str | UnsetType = field(name="pauseMode", default=UNSET)


class ForkEntry(Answer):
    """One requested child: exactly one of the two."""

    sandbox: Sandbox | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET


class SnapshotAnswer(Answer):
    """A snapshot, by an id that create, the list filters and DELETE /templates take."""

    snapshot_id: str = field(name="snapshotID")
    names: list[str]


class TemplateAlias(Answer):
    """What an alias resolves to."""

    template_id: str = field(name="templateID")
    public: bool


class Template(Answer):
    """One template of a list."""

    template_id: str = field(name="templateID")
    build_id: str = field(name="buildID")
    cpu_count: int = field(name="cpuCount")
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    public: bool
    aliases: list[str]
    names: list[str]
    created_at: str = field(name="createdAt")
    updated_at: str = field(name="updatedAt")
    created_by: None = field(name="createdBy")
    last_spawned_at: None = field(name="lastSpawnedAt")
    spawn_count: int = field(name="spawnCount")
    build_count: int = field(name="buildCount")
    envd_version: str = field(name="envdVersion")
    build_status: str = field(name="buildStatus")


class OwnSandbox(Answer):
    """Our own view of a sandbox: the true state, and how safe a pause is ("held", "durable" or null)."""

    sandbox_id: str = field(name="sandboxID")
    template_id: str = field(name="templateID")
    state: str
    pause_safety: str | None = field(name="pauseSafety")
    started_at: str = field(name="startedAt")
    end_at: str = field(name="endAt")
    cpu_count: int = field(name="cpuCount")
    memory_mb: int = field(name="memoryMB")
    disk_size_mb: int = field(name="diskSizeMB")
    lifecycle: Lifecycle
    metadata: dict[str, str]
    alias: str | None


class TombstoneAnswer(Answer):
    """Why a sandbox no longer exists."""

    sandbox_id: str = field(name="sandboxID")
    ended_at: str = field(name="endedAt")
    reason: str
    detail: str
