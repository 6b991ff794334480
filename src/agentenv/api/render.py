"""From the node's values to the shapes of `wire`. Pure."""

from __future__ import annotations

import datetime
from typing import Final

from msgspec import UNSET

from agentenv.api import wire
from agentenv.api.filters import public_state
from agentenv.api.names import snapshot_reference, without_tag
from agentenv.api.paging import micros
from agentenv.api.settings import ApiSettings
from agentenv.errors import SandboxNotFound
from agentenv.model import SandboxView, SnapshotManifest, Tombstone
from agentenv.node.interface import TemplateInfo

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def timestamp(seconds: float) -> str:
    """Unix seconds as RFC 3339 with microseconds and Z."""
    moment = _EPOCH + datetime.timedelta(microseconds=micros(seconds))
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def sandbox(view: SandboxView, settings: ApiSettings) -> wire.Sandbox:
    """A started sandbox, with its tokens."""
    return wire.Sandbox(
        template_id=view.template_id,
        sandbox_id=view.sandbox_id,
        client_id=settings.client_id,
        envd_version=settings.envd_version,
        domain=settings.domain,
        alias=view.alias or UNSET,
        envd_access_token=view.envd_access_token or UNSET,
        traffic_access_token=view.traffic_access_token or UNSET,
    )


def listed(view: SandboxView, settings: ApiSettings) -> wire.ListedSandbox:
    """One entry of a list; without tokens."""
    return wire.ListedSandbox(
        template_id=view.template_id,
        sandbox_id=view.sandbox_id,
        client_id=settings.client_id,
        started_at=timestamp(view.started_at),
        end_at=timestamp(view.end_at),
        cpu_count=view.resources.cpu_count,
        memory_mb=view.resources.memory_mib,
        disk_size_mb=view.resources.disk_mib,
        state=_shown_state(view),
        envd_version=settings.envd_version,
        metadata=view.spec.metadata,
        alias=view.alias or UNSET,
    )


def detail(view: SandboxView, settings: ApiSettings) -> wire.SandboxDetail:
    """One sandbox by its id. Raises `SandboxNotFound` for one that is not shown (being made or killed)."""
    state = _shown_state(view)
    return wire.SandboxDetail(
        template_id=view.template_id,
        sandbox_id=view.sandbox_id,
        client_id=settings.client_id,
        started_at=timestamp(view.started_at),
        end_at=timestamp(view.end_at),
        cpu_count=view.resources.cpu_count,
        memory_mb=view.resources.memory_mib,
        disk_size_mb=view.resources.disk_mib,
        state=state,
        envd_version=settings.envd_version,
        metadata=view.spec.metadata,
        alias=view.alias or UNSET,
        domain=settings.domain,
        allow_internet_access=view.spec.network.allow_internet,
        network=wire.NetworkAnswer(
            allow_public_traffic=view.spec.allow_public_traffic,
            mask_request_host=view.spec.mask_request_host or UNSET,
        ),
        lifecycle=_lifecycle(view),
        envd_access_token=view.envd_access_token or UNSET,
        # This version always saves memory and disk together.
        pause_mode="full" if state == "paused" else UNSET,
    )


def own(view: SandboxView) -> wire.OwnSandbox:
    """Our own view, with the true state."""
    return wire.OwnSandbox(
        sandbox_id=view.sandbox_id,
        template_id=view.template_id,
        state=view.state.value,
        pause_safety=view.pause_safety,
        started_at=timestamp(view.started_at),
        end_at=timestamp(view.end_at),
        cpu_count=view.resources.cpu_count,
        memory_mb=view.resources.memory_mib,
        disk_size_mb=view.resources.disk_mib,
        lifecycle=_lifecycle(view),
        metadata=view.spec.metadata,
        alias=view.alias,
    )


def tombstone(stone: Tombstone) -> wire.TombstoneAnswer:
    """Why a sandbox ended."""
    return wire.TombstoneAnswer(
        sandbox_id=stone.sandbox_id, ended_at=timestamp(stone.ended_at), reason=stone.reason, detail=stone.detail
    )


def snapshot(manifest: SnapshotManifest) -> wire.SnapshotAnswer:
    """A snapshot by its first name, or its id where it has none (any more)."""
    return wire.SnapshotAnswer(snapshot_id=snapshot_reference(manifest), names=list(manifest.names))


def template(info: TemplateInfo, settings: ApiSettings) -> wire.Template:
    """One template of the list."""
    manifest = info.manifest
    names = list(dict.fromkeys(without_tag(name) for name in manifest.names))
    created = timestamp(manifest.created_at)
    return wire.Template(
        template_id=manifest.snapshot_id,
        build_id=manifest.build_id,
        cpu_count=manifest.resources.cpu_count,
        memory_mb=manifest.resources.memory_mib,
        disk_size_mb=manifest.resources.disk_mib,
        public=False,
        aliases=[name.rpartition("/")[2] for name in names],
        names=names,
        created_at=created,
        updated_at=created,
        created_by=None,
        last_spawned_at=None,
        spawn_count=info.spawn_count,
        build_count=1,
        envd_version=settings.envd_version,
        build_status="ready",
    )


def _shown_state(view: SandboxView) -> str:
    state = public_state(view)
    if state is None:
        raise SandboxNotFound(f"sandbox {view.sandbox_id} is {view.state.value}")
    return state


def _lifecycle(view: SandboxView) -> wire.Lifecycle:
    return wire.Lifecycle(auto_resume=view.spec.auto_resume, on_timeout=view.spec.on_timeout.value)
