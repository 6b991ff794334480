"""Which block of the subnet belongs to which node of this machine.

Several nodes (state directories) may run on one machine. Each claims an aligned block in `network.json` of the run
root (/run/aenv, gone after a reboot as are the slots), under a file lock. A live node holds `node-<tag>.lock`; a claim
whose lock is free and which has no namespace left is stale and is given to others. The block is also compared with the
host's routes: an address that is already used by somebody else is never taken.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from agentenv.errors import NetworkError
from agentenv.network._steps import step

RUN_ROOT = Path("/run/aenv")
_LOCK_ATTEMPTS = 5
_LOCK_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class HostRoute:
    """One IPv4 route of the host that is not ours."""

    network: IPv4Network
    interface: str
    has_gateway: bool


def block_prefix(slot_count_max: int) -> int:
    """The prefix length of a block with two addresses for each slot."""
    return 32 - (2 * slot_count_max - 1).bit_length()


def _is_taken(block: IPv4Network, routes: list[HostRoute]) -> HostRoute | None:
    """The route that a block would collide with. A wider one through a gateway (a VPC's 10.0.0.0/8) only loses the
    block's addresses, which is what a private subnet of our own means.
    """
    for route in routes:
        wider = route.network.prefixlen < block.prefixlen and route.has_gateway
        if route.network.prefixlen > 0 and route.network.overlaps(block) and not wider:
            return route
    return None


def choose_block(subnet: IPv4Network, prefix: int, others: list[IPv4Network], routes: list[HostRoute]) -> IPv4Network:
    """The first free block. Raises `NetworkError` that names what is in the way."""
    if prefix < subnet.prefixlen:
        raise NetworkError(f"the subnet {subnet} is too small: this node's slots alone need a /{prefix}")
    obstacle: HostRoute | None = None
    for block in subnet.subnets(new_prefix=prefix):
        if any(block.overlaps(other) for other in others):
            continue
        obstacle = _is_taken(block, routes) or obstacle
        if _is_taken(block, routes) is None:
            return block
    if obstacle is not None:
        raise NetworkError(
            f"the subnet {subnet} is in use on this host by the route {obstacle.network} of {obstacle.interface};"
            " configure another one"
        )
    raise NetworkError(f"the subnet {subnet} has no free /{prefix} left: other nodes of this machine hold all of it")


@contextmanager
def _locked(root: Path) -> Iterator[Path]:
    """The claims file, held alone. Waits for other nodes, which hold it for milliseconds."""
    path = root / "network.lock"
    while True:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The last node to go removes the file; who waited for it holds a lock that others cannot see.
            if not path.exists() or path.stat().st_ino != os.fstat(lock.fileno()).st_ino:
                continue
            yield root / "network.json"
            return


def _read(claims: Path) -> dict[str, IPv4Network]:
    try:
        return {tag: IPv4Network(block) for tag, block in json.loads(claims.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError) as error:
        raise NetworkError(f"{claims} is damaged; stop all nodes of this machine and remove it: {error}") from error


def _write(claims: Path, blocks: dict[str, IPv4Network]) -> None:
    partial = claims.with_suffix(".partial")
    partial.write_text(json.dumps({tag: str(block) for tag, block in blocks.items()}))
    partial.rename(claims)


def hold_node(tag: str, root: Path = RUN_ROOT) -> int:
    """Take the lock that says "this node lives"; the descriptor holds it until it is closed or the process ends.

    Raises `NetworkError` when another process runs this node.
    """
    with step(f"lock the node {tag}"):
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(root / f"node-{tag}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Tried again for a moment: another node that looks for stale claims takes the lock for microseconds.
        for attempt in range(_LOCK_ATTEMPTS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S if attempt + 1 < _LOCK_ATTEMPTS else 0)
        os.close(descriptor)
    raise NetworkError(f"another process already runs the node with the tag {tag}")


def _is_live(tag: str, root: Path) -> bool:
    try:
        os.close(hold_node(tag, root))
    except NetworkError:
        return True
    return False


def claim_block(
    tag: str,
    subnet: IPv4Network,
    slot_count_max: int,
    routes: list[HostRoute],
    has_slots: Callable[[str], bool],
    root: Path = RUN_ROOT,
) -> IPv4Network:
    """This node's block: the one that it had if it still fits, else a new one.

    `has_slots` says whether a tag has namespaces. Raises `NetworkError`.
    """
    prefix = block_prefix(slot_count_max)
    with step("claim a block of addresses"), _locked(root) as claims:
        blocks = _read(claims)
        own = blocks.pop(tag, None)
        if own is not None and (own.prefixlen > prefix or not own.subnet_of(subnet)):
            if has_slots(tag):
                raise NetworkError(
                    f"slots of this node still use {own}, which does not fit the configured {subnet} with"
                    f" {slot_count_max} slots; clean the node first"
                )
            own = None
        blocks = {other: block for other, block in blocks.items() if has_slots(other) or _is_live(other, root)}
        own = own or choose_block(subnet, prefix, list(blocks.values()), routes)
        _write(claims, {**blocks, tag: own})
    return own


def forget_block(tag: str, root: Path = RUN_ROOT) -> None:
    """Give the block back; called when all slots of the node are gone."""
    with step("release the block of addresses"), _locked(root) as claims:
        blocks = _read(claims)
        if blocks.pop(tag, None) is not None:
            _write(claims, blocks)
        (root / f"node-{tag}.lock").unlink(missing_ok=True)
        if not blocks:
            claims.unlink(missing_ok=True)
            (root / "network.lock").unlink(missing_ok=True)
