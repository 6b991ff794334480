"""What the API needs of the configuration, as one value that is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agentenv.config import Config
from agentenv.model import ExpiryAction

# The envd version whose features our guest daemon has; SDKs switch features by it.
ENVD_VERSION: Final = "0.6.13"
# E2B's v1 create, resume and fork promise this lifetime to requests that name none, whatever our default is.
TIMEOUT_S_V1: Final = 15


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """See `config` for the meaning of each; the defaults are those of an unconfigured server."""

    domain: str = "localhost:8000"
    # Old clients append it to sandbox ids; it names no client.
    client_id: str = "aenv"
    envd_version: str = ENVD_VERSION
    timeout_s_default: int = 300
    timeout_s_max: int = 30 * 86_400
    on_timeout: ExpiryAction = ExpiryAction.PAUSE
    fork_count_max: int = 100
    body_bytes_max: int = 1 << 20
    body_read_s_max: float = 30.0
    request_s_max: float = 120.0
    metadata_bytes_max: int = 64 << 10
    env_vars_bytes_max: int = 256 << 10
    idempotency_entries_max: int = 10_000
    idempotency_ttl_s: float = 86_400.0
    # Of a progress stream: the least time between two looks for news, and the silence after which a line is repeated
    # so that neither side nor a proxy between them takes the other for dead.
    progress_interval_s: float = 0.2
    progress_heartbeat_s: float = 10.0

    @classmethod
    def from_config(cls, config: Config) -> ApiSettings:
        """The settings of a configured server."""
        sandbox, limits = config.sandbox, config.limits
        return cls(
            domain=config.domain,
            timeout_s_default=sandbox.timeout_s_default,
            timeout_s_max=sandbox.timeout_s_max,
            on_timeout=ExpiryAction(sandbox.on_timeout),
            fork_count_max=sandbox.fork_count_max,
            body_bytes_max=limits.body_bytes_max,
            body_read_s_max=limits.body_read_s_max,
            request_s_max=limits.request_s_max,
            metadata_bytes_max=limits.metadata_bytes_max,
            env_vars_bytes_max=limits.env_vars_bytes_max,
            idempotency_entries_max=limits.idempotency_entries_max,
            idempotency_ttl_s=limits.idempotency_ttl_s,
        )
