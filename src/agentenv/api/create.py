"""From the body of a create request to a `SandboxSpec`: defaults, limits, and features that are refused by name.

A feature that we know and do not have is refused rather than ignored: a sandbox without the egress rules or the
identity that its owner asked for would be a different thing than they believe they have. Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

from agentenv.api.names import template_reference
from agentenv.api.settings import TIMEOUT_S_V1, ApiSettings
from agentenv.api.wire import NetworkOptions, NewSandbox, NewSandboxV1
from agentenv.errors import InvalidRequest, Unsupported
from agentenv.model import ExpiryAction, NetworkPolicy, SandboxSpec

ALL_IPV4: Final = "0.0.0.0/0"
# Only what a Host header may hold, so that a mask cannot smuggle a second header into a guest.
_HOST_MASK: Final = re.compile(r"[A-Za-z0-9._-]{1,253}(?::(?:[0-9]{1,5}|\$\{PORT\}))?|\$\{PORT\}[A-Za-z0-9._-]{1,253}")
_ENV_NAME_MAX_BYTES: Final = 4_096


def spec_v2(body: NewSandbox, settings: ApiSettings) -> SandboxSpec:
    """POST /v2/sandboxes: always secured."""
    return _spec(body, secure=True, timeout_s_default=settings.timeout_s_default, settings=settings)


def spec_v1(body: NewSandboxV1, settings: ApiSettings) -> SandboxSpec:
    """POST /sandboxes: secured only when asked for, and a shorter default lifetime."""
    return _spec(body, secure=bool(body.secure), timeout_s_default=TIMEOUT_S_V1, settings=settings)


def lifetime_s(
    value: float | None, default_s: float, settings: ApiSettings, *, field: str = "timeout", zero_means: str = ""
) -> float:
    """A time to live in seconds.

    Zero is refused where a run would begin and end at once (clients that mean "no limit" or "default" send it);
    `zero_means`, where given, is the documented meaning that makes it valid. Raises `InvalidRequest`, naming `field`.
    """
    if value is None:
        return default_s
    lowest = 0 if zero_means else 1
    if not lowest <= value <= settings.timeout_s_max:
        unit = f"seconds from {lowest} to {settings.timeout_s_max}"
        hint = "" if zero_means or value != 0 else "; leave it out for the default"
        raise InvalidRequest(f"{field}: must be {unit}{hint}")
    return float(value)


def expiry_action(auto_pause: bool | None, settings: ApiSettings) -> ExpiryAction:
    """Absent and null leave it to `sandbox.on_timeout`; only an explicit false deletes."""
    if auto_pause is None:
        return settings.on_timeout
    return ExpiryAction.PAUSE if auto_pause else ExpiryAction.KILL


def refuse_without_memory(memory: bool | None, field: str = "memory") -> None:
    """`memory: false` asks to drop memory and boot again from disk."""
    if memory is False:
        raise Unsupported(f"{field}: false (filesystem only) is not in this version; memory is always kept")


def _spec(body: NewSandbox, *, secure: bool, timeout_s_default: int, settings: ApiSettings) -> SandboxSpec:
    _refuse_features(body)
    network = body.network or NetworkOptions()
    public = network.allow_public_traffic is not False
    if not public and not secure:
        raise InvalidRequest("network.allowPublicTraffic: false needs a secured sandbox (secure: true)")
    timeout_s = lifetime_s(body.timeout, min(timeout_s_default, settings.timeout_s_max), settings)
    env_vars = body.env_vars if body.env_vars is not None else body.envs
    return SandboxSpec(
        template=template_reference(body.template_id, "templateID"),
        timeout_s=timeout_s,
        on_timeout=expiry_action(body.auto_pause, settings),
        auto_resume=body.auto_resume is not None and bool(body.auto_resume.enabled),
        secure=secure,
        allow_public_traffic=public,
        mask_request_host=_host_mask(network.mask_request_host),
        network=NetworkPolicy(allow_internet=_allows_internet(body.allow_internet_access, network)),
        metadata=_pairs(body.metadata, "metadata", settings.metadata_bytes_max),
        env_vars=_environment(env_vars, settings.env_vars_bytes_max),
    )


def _refuse_features(body: NewSandbox) -> None:
    refuse_without_memory(body.auto_pause_memory, "autoPauseMemory")
    network = body.network or NetworkOptions()
    denied_all = network.deny_out == [ALL_IPV4]
    asked: dict[str, Any] = {
        "mcp": body.mcp,
        "iam": (body.iam or {}).get("tokens"),
        "volumeMounts": body.volume_mounts,
        "network.allowOut": network.allow_out,
        # Denying everything is `allow_internet_access: false`, which we have.
        "network.denyOut": None if denied_all else network.deny_out,
        "network.dnsServers": network.dns_servers,
        "network.egressProxy": network.egress_proxy,
        "network.httpsPorts": network.https_ports,
        "network.rules": network.rules,
    }
    for feature, value in asked.items():
        # SDKs send empty collections for options that their user left alone.
        if value:
            raise Unsupported(f"{feature} is not in this version")


def _allows_internet(allow: bool | None, network: NetworkOptions) -> bool:
    return allow is not False and network.deny_out != [ALL_IPV4]


def _host_mask(mask: str | None) -> str | None:
    if not mask:
        return None
    if _HOST_MASK.fullmatch(mask) is None:
        raise InvalidRequest("network.maskRequestHost: must be a host name, optionally with :port or :${PORT}")
    return mask


def _pairs(given: dict[str, str | None] | None, field: str, bytes_max: int) -> dict[str, str]:
    pairs = {key: value for key, value in (given or {}).items() if value is not None}
    size = sum(len(key.encode()) + len(value.encode()) for key, value in pairs.items())
    if size > bytes_max:
        raise InvalidRequest(f"{field}: {size} bytes of names and values, more than {bytes_max}")
    return pairs


def _environment(given: dict[str, str | None] | None, bytes_max: int) -> dict[str, str]:
    """Refuses what execve cannot carry, instead of letting every later command fail."""
    pairs = _pairs(given, "envVars", bytes_max)
    for name, value in pairs.items():
        if not name or "=" in name or "\0" in name or len(name.encode()) > _ENV_NAME_MAX_BYTES:
            raise InvalidRequest(f"envVars: {name[:64]!a} is not a name of an environment variable")
        if "\0" in value:
            raise InvalidRequest(f"envVars: the value of {name[:64]!a} holds a NUL")
    return pairs
