"""Names each step of host work, so that every failure says what was being done to which slot.

The one place where foreign errors (system calls, netlink, libnftables) become `NetworkError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyroute2.netlink.exceptions import NetlinkError

from agentenv.errors import NetworkError


class NftError(Exception):
    """libnftables refused a transaction; nothing of it was applied."""


@contextmanager
def step(what: str) -> Iterator[None]:
    """Run one step; `what` completes the sentence "cannot ...". Raises `NetworkError` with the cause kept."""
    try:
        yield
    except (OSError, NetlinkError, NftError) as error:
        raise NetworkError(f"cannot {what}: {error}") from error
