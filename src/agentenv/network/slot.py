"""What a slot is: its names and addresses. Pure.

A node has a tag (6 hex digits) and a block of addresses. Slot `n` takes the `n`-th pair of the block: the even address
is the host's end of the veth pair, the odd one is the slot's address, by which the host reaches the guest. Inside its
namespace every guest has the same address and MAC, so that a restored guest needs no new configuration.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

GUEST_MAC = "02:ae:00:00:00:02"
GUEST_ADDRESS = "10.11.0.2"
GUEST_CIDR = f"{GUEST_ADDRESS}/30"
# The namespace's end of the tap.
GATEWAY_MAC = "02:ae:00:00:00:01"
GATEWAY_ADDRESS = "10.11.0.1"
GATEWAY_CIDR = f"{GATEWAY_ADDRESS}/30"
TAP = "tap0"
# The namespace's end of the veth pair.
UPLINK = "eth0"

NETNS_PREFIX = "aenv-"
VETH_PREFIX = "av"


@dataclass(frozen=True, slots=True)
class Slot:
    """One sandbox's place on the network. The host reaches every port of the guest at `address`."""

    index: int
    netns: str
    tap: str
    address: str
    guest_mac: str
    guest_cidr: str
    gateway: str
    gateway_mac: str
    dns: tuple[str, ...]


def node_tag(run_dir: Path) -> str:
    """The tag in all names of one node on this machine: the first 6 hex digits of the hash of its run directory."""
    return hashlib.sha256(os.fsencode(os.path.realpath(run_dir))).hexdigest()[:6]


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """All names and addresses of one node's slots, computed from its tag and its block."""

    tag: str
    block: IPv4Network
    dns: tuple[str, ...]

    @property
    def netns_prefix(self) -> str:
        return f"{NETNS_PREFIX}{self.tag}-"

    @property
    def veth_prefix(self) -> str:
        return f"{VETH_PREFIX}{self.tag}-"

    def netns(self, index: int) -> str:
        return f"{self.netns_prefix}{index}"

    def veth(self, index: int) -> str:
        """The host's end; at most 14 bytes (the kernel allows 15) as a block has fewer than 100,000 slots."""
        return f"{self.veth_prefix}{index}"

    def host_address(self, index: int) -> IPv4Address:
        return self.block[2 * index]

    def slot_address(self, index: int) -> IPv4Address:
        return self.block[2 * index + 1]

    def host_mac(self, index: int) -> str:
        return f"02:ae:01:00:{index >> 8:02x}:{index & 0xFF:02x}"

    def slot_mac(self, index: int) -> str:
        return f"02:ae:02:00:{index >> 8:02x}:{index & 0xFF:02x}"

    def slot(self, index: int) -> Slot:
        return Slot(
            index=index,
            netns=self.netns(index),
            tap=TAP,
            address=str(self.slot_address(index)),
            guest_mac=GUEST_MAC,
            guest_cidr=GUEST_CIDR,
            gateway=GATEWAY_ADDRESS,
            gateway_mac=GATEWAY_MAC,
            dns=self.dns,
        )

    def index_of(self, name: str) -> int | None:
        """The slot that a namespace or veth name belongs to, or None when it is not one of this node's."""
        for prefix in (self.netns_prefix, self.veth_prefix):
            number = name.removeprefix(prefix)
            if number != name and number.isascii() and number.isdigit():
                return int(number)
        return None
