"""What a sandbox is, as its owner asked for it and as others see it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from agentenv.model.snapshot import Resources


class ExpiryAction(enum.StrEnum):
    """What happens when the time to live ends."""

    PAUSE = "pause"
    KILL = "kill"


class SandboxState(enum.StrEnum):
    """The public states. The finer ones (capturing, committing) are in `lifecycle`."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    KILLING = "killing"


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """Egress of one sandbox. Host, other guests, link-local and private ranges are denied whatever it says."""

    allow_internet: bool = True


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What the owner asked for at create. `timeout_s` counts running time only."""

    template: str
    timeout_s: float
    on_timeout: ExpiryAction = ExpiryAction.PAUSE
    auto_resume: bool = False
    secure: bool = True
    allow_public_traffic: bool = True
    mask_request_host: str | None = None
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    metadata: dict[str, str] = field(default_factory=dict)
    env_vars: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SandboxView:
    """One sandbox as the API shows it. Times are Unix seconds (UTC)."""

    sandbox_id: str
    template_id: str
    alias: str | None
    state: SandboxState
    spec: SandboxSpec
    resources: Resources
    started_at: float
    end_at: float
    # None for a sandbox without `secure`.
    envd_access_token: str | None
    # None unless ingress is private.
    traffic_access_token: str | None
    # "held" while a pause lives in memory, "durable" once it survives power loss, None when not paused.
    pause_safety: str | None = None


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Why a sandbox no longer exists; kept for a day."""

    sandbox_id: str
    ended_at: float
    # One of: deleted, expired, guest_shutdown, vmm_died, create_failed, resume_failed, storage_lost, host_lost.
    reason: str
    detail: str = ""
