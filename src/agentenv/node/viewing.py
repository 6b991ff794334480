"""How one sandbox looks from outside: to the API, and to the proxy. Reads an owner and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agentenv.lifecycle import Phase
from agentenv.model import SandboxView
from agentenv.node.interface import RouteTarget
from agentenv.node.owner import Owner

PAUSE_SAFETY: Final[Mapping[Phase, str]] = MappingProxyType(
    {
        Phase.HELD_CAPTURING: "held",
        Phase.HELD_CAPTURED: "held",
        Phase.HELD_WAITING: "held",
        # It would survive a power loss, but "durable" also says that the host has its memory back.
        Phase.LINGERING: "held",
        Phase.PAUSED: "durable",
    }
)


def view(owner: Owner) -> SandboxView:
    """The sandbox as the API shows it, with the secrets that its owner may see."""
    record, tokens = owner.record, owner.host.tokens
    private = not record.spec.allow_public_traffic
    return SandboxView(
        sandbox_id=record.sandbox_id,
        template_id=record.template_id,
        alias=record.alias,
        state=owner.state,
        spec=record.spec,
        resources=record.resources,
        started_at=record.started_at,
        end_at=record.end_at,
        envd_access_token=tokens.envd(record.sandbox_id) if record.spec.secure else None,
        traffic_access_token=tokens.traffic(record.sandbox_id) if private else None,
        pause_safety=PAUSE_SAFETY.get(owner.phase),
    )


def route_target(owner: Owner, port: int) -> RouteTarget:
    """Where the proxy sends traffic of one port. The sandbox serves, so it has a slot."""
    assert owner.slot is not None
    spec = owner.record.spec
    token = None if spec.allow_public_traffic else owner.host.tokens.traffic(owner.sandbox_id)
    return RouteTarget(owner.slot.address, port, owner.record.generation, token, spec.mask_request_host)
