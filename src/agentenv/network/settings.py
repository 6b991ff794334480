"""What can be set about the network. Values are checked here, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from agentenv.errors import ConfigError
from agentenv.network.blocks import RUN_ROOT

DEFAULT_SUBNET = IPv4Network("10.12.0.0/16")
# A /16 holds no more pairs of addresses.
SLOT_COUNT_LIMIT = 32768


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How many slots are kept ready, and how many exist at most."""

    slot_pool_idle_count_min: int = 8
    slot_pool_idle_count_max: int = 32
    slot_count_max: int = 2048

    def __post_init__(self) -> None:
        if not 1 <= self.slot_count_max <= SLOT_COUNT_LIMIT:
            raise ConfigError(f"slot_count_max is {self.slot_count_max}, not 1 to {SLOT_COUNT_LIMIT}")
        if not 0 <= self.slot_pool_idle_count_min <= self.slot_pool_idle_count_max <= self.slot_count_max:
            raise ConfigError(
                f"slot_pool_idle_count_min ({self.slot_pool_idle_count_min}), slot_pool_idle_count_max"
                f" ({self.slot_pool_idle_count_max}) and slot_count_max ({self.slot_count_max}) must not decrease"
            )


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Where slots live.

    `dns` are IPv4 addresses; a private one gets an exception for port 53 of exactly that address.
    """

    tag: str
    dns: tuple[str, ...]
    subnet: IPv4Network = DEFAULT_SUBNET
    pool: PoolSettings = field(default_factory=PoolSettings)
    run_root: Path = RUN_ROOT

    def __post_init__(self) -> None:
        for text in self.dns:
            try:
                address = IPv4Address(text)
            except ValueError as error:
                raise ConfigError(f"the name server {text!r} is not an IPv4 address") from error
            if address.is_loopback:
                raise ConfigError(f"the name server {text} is a loopback address, which no guest can reach")
