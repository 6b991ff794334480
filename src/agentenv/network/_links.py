"""Interfaces, addresses, routes and neighbours of one slot. Everything is static: no ARP, no IPv6, nothing to wait for.

Functions act in the network namespace of the calling thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from agentenv.network._steps import step
from agentenv.network.slot import (
    GATEWAY_CIDR,
    GATEWAY_MAC,
    GUEST_ADDRESS,
    GUEST_MAC,
    TAP,
    UPLINK,
    SlotPlan,
)

_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
# /31: two addresses and no network or broadcast address.
_PAIR_PREFIX = 31


def this_namespace() -> int:
    """A descriptor of the calling thread's namespace; the caller closes it."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def _open_tap() -> Iterator[int]:
    """Attach to the tap, making it when there is none. Raises OSError EBUSY while a VMM holds it."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", TAP.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
        yield descriptor
    finally:
        os.close(descriptor)


def tap_is_free() -> bool:
    """Whether no process holds the tap. Raises OSError for anything else that is wrong with it."""
    try:
        with _open_tap():
            return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise


def write_sysctl(name: str, value: str) -> None:
    """`name` is the path under /proc/sys. A missing entry (no IPv6 in the kernel) needs no switching off."""
    with suppress(FileNotFoundError):
        (Path("/proc/sys") / name).write_text(value)


def build_inside(plan: SlotPlan, index: int, host_namespace: int) -> None:
    """All interfaces of a new slot, called in its namespace; the host's end of the veth pair is put out, still down."""
    with step(f"switch on forwarding in slot {index}"):
        # Before any interface exists, so that none ever gets an IPv6 address.
        write_sysctl("net/ipv6/conf/all/disable_ipv6", "1")
        write_sysctl("net/ipv6/conf/default/disable_ipv6", "1")
        write_sysctl("net/ipv4/ip_forward", "1")
        write_sysctl("net/ipv4/conf/all/send_redirects", "0")
        write_sysctl("net/ipv4/conf/default/send_redirects", "0")
    with step(f"make the tap of slot {index}"), _open_tap() as tap:
        fcntl.ioctl(tap, _TUNSETPERSIST, 1)
    with IPRoute() as netlink:
        with step(f"make the veth pair of slot {index}"):
            peer = {"ifname": plan.veth(index), "net_ns_fd": host_namespace, "address": plan.host_mac(index)}
            mac = plan.slot_mac(index)
            netlink.link("add", ifname=UPLINK, kind="veth", address=mac, peer=peer)
        with step(f"set the addresses of slot {index}"):
            _address_inside(netlink, plan, index)


def _address_inside(netlink: Any, plan: SlotPlan, index: int) -> None:
    loopback, tap, uplink = (socket.if_nametoindex(name) for name in ("lo", TAP, UPLINK))
    netlink.link("set", index=loopback, state="up")
    netlink.link("set", index=tap, address=GATEWAY_MAC, state="up")
    netlink.link("set", index=uplink, state="up")
    address, _, prefix = GATEWAY_CIDR.partition("/")
    netlink.addr("add", index=tap, address=address, prefixlen=int(prefix))
    netlink.addr("add", index=uplink, address=str(plan.slot_address(index)), prefixlen=_PAIR_PREFIX)
    _permanent_neighbour(netlink, tap, GUEST_ADDRESS, GUEST_MAC)
    host = str(plan.host_address(index))
    _permanent_neighbour(netlink, uplink, host, plan.host_mac(index))
    netlink.route("add", dst="default", gateway=host)


def _permanent_neighbour(netlink: Any, interface: int, address: str, mac: str) -> None:
    netlink.neigh("replace", dst=address, lladdr=mac, ifindex=interface, state=0x80)


def build_outside(plan: SlotPlan, index: int) -> None:
    """The host's end of the veth pair, called in the host's namespace. The slot works when this returns."""
    veth = plan.veth(index)
    with step(f"set the address of {veth}"), IPRoute() as netlink:
        write_sysctl(f"net/ipv6/conf/{veth}/disable_ipv6", "1")
        interface = socket.if_nametoindex(veth)
        netlink.link("set", index=interface, state="up")
        netlink.addr("add", index=interface, address=str(plan.host_address(index)), prefixlen=_PAIR_PREFIX)
        _permanent_neighbour(netlink, interface, str(plan.slot_address(index)), plan.slot_mac(index))


def remove_outside(name: str) -> None:
    """Delete one veth pair by its host end; the other end goes with it. Repeating it is fine. Takes 25 ms (RCU)."""
    with step(f"delete {name}"):
        try:
            interface = socket.if_nametoindex(name)
        except OSError:
            # The only error that this call has: there is no such interface.
            return
        with IPRoute() as netlink:
            netlink.link("del", index=interface)


def interface_names(prefix: str) -> list[str]:
    """Interfaces of the calling thread's namespace whose name starts with `prefix`."""
    return sorted(name for _, name in socket.if_nameindex() if name.startswith(prefix))
