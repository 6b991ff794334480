"""A small internet of network namespaces around real slots, so that tests touch neither the machine's own rules nor
any real address.

```text
 guest ==frames== tap0 [slot's namespace] --veth-- [host] 203.0.113.1 --veth-- 203.0.113.2 [outside]
```

"host" is a namespace that plays the machine: the code under test runs in threads that are in it. "guest" is a second
kernel stack whose tap is joined to the slot's by copying frames, as a VMM does. "outside" has a public address and many
that no guest may reach.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from agentenv.network import NamespaceHost, NetworkSettings, PoolSettings, Slot, _namespace, destroy_all
from agentenv.network.slot import GATEWAY_MAC

T = TypeVar("T")

UPSTREAM = "203.0.113.2"
HOST_ADDRESS = "203.0.113.1"
PUBLIC = "198.51.100.10"
PRIVATE_RESOLVER = "10.255.0.53"
FORBIDDEN = ("10.200.0.1", "172.16.5.5", "192.168.77.1", "169.254.169.254", "100.64.0.1", "198.18.0.1")
# A refusal comes at once; only a dropped packet waits this long.
CONNECT_DEADLINE_S = 0.5
EXCHANGE_DEADLINE_S = 5.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def tap_descriptor(name: str) -> int:
    """A descriptor on the tap of the calling thread's namespace."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1002))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Cable:
    """Copies frames between two taps until it is cut."""

    def __init__(self, left: int, right: int) -> None:
        self._ends = {left: right, right: left}
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="cable")
        self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for end in (*self._ends, self._wake_reader):
                selector.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._wake_reader:
                        return
                    with contextlib.suppress(BlockingIOError):
                        os.write(self._ends[key.fd], os.read(key.fd, 65536))

    def cut(self) -> None:
        os.write(self._wake_writer, b"x")
        self._thread.join()
        for descriptor in (*self._ends, self._wake_reader, self._wake_writer):
            os.close(descriptor)


class Guest:
    """A kernel stack with the guest's fixed address, joined to a slot."""

    def __init__(self, name: str, slot: Slot) -> None:
        self.netns = name
        self.slot = slot
        ip("netns", "add", name)
        ip("-n", name, "tuntap", "add", "dev", "eth0", "mode", "tap")
        ip("-n", name, "link", "set", "eth0", "address", slot.guest_mac, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", slot.guest_cidr, "dev", "eth0")
        ip("-n", name, "route", "add", "default", "via", slot.gateway)
        ip("-n", name, "neigh", "add", slot.gateway, "lladdr", GATEWAY_MAC, "dev", "eth0", "nud", "permanent")
        left = _namespace.run_in(slot.netns, lambda: tap_descriptor(slot.tap))
        right = _namespace.run_in(name, lambda: tap_descriptor("eth0"))
        self._cable: Cable | None = Cable(left, right)

    def power_off(self) -> None:
        if self._cable is not None:
            self._cable.cut()
            self._cable = None
        _namespace.remove(self.netns)


class World:
    """The namespaces of one test module. `close` removes all of them, whatever the tests did."""

    def __init__(self, tag: str, run_root: Path) -> None:
        self.tag = tag
        self.run_root = run_root
        self.host_netns, self.outside_netns = f"aenvt-{tag}-host", f"aenvt-{tag}-out"
        self._guests: list[Guest] = []
        self._cleanup = contextlib.ExitStack()
        self.host = self.new_host(tag)

    def build(self) -> None:
        host, outside = self.host_netns, self.outside_netns
        for name in (host, outside):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", host, "link", "add", "up0", "type", "veth", "peer", "name", "down0", "netns", outside)
        for name, interface, address in ((host, "up0", HOST_ADDRESS), (outside, "down0", UPSTREAM)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
        ip("-n", host, "route", "add", "default", "via", UPSTREAM)
        # The outside would even answer to slots' own addresses: what keeps them apart must be our rules.
        ip("-n", outside, "route", "add", "10.12.0.0/16", "via", HOST_ADDRESS)
        for address in (PUBLIC, PRIVATE_RESOLVER, *FORBIDDEN):
            ip("-n", outside, "addr", "add", f"{address}/32", "dev", "lo")

    def new_host(self, tag: str) -> NamespaceHost:
        pool = PoolSettings(slot_pool_idle_count_min=0, slot_count_max=64)
        dns = ("1.1.1.1", PRIVATE_RESOLVER)
        return NamespaceHost(NetworkSettings(tag=tag, dns=dns, pool=pool, run_root=self.run_root))

    def on_host(self, work: Callable[[], T]) -> T:
        """Run the code under test where it takes this namespace for the machine's."""
        return _namespace.run_in(self.host_netns, work)

    def plug_guest(self, slot: Slot) -> Guest:
        guest = Guest(f"aenvt-{self.tag}-g{len(self._guests)}", slot)
        self._guests.append(guest)
        # The kernel takes a moment to see that a tap has got its other end, and drops what comes before; TCP repeats.
        with contextlib.suppress(ConnectionRefusedError):
            self.connect(self.host_netns, slot.address, 1)
        return guest

    # Sockets belong to the namespace of the thread that made them, and may be used from any other.

    def listen(self, netns: str, port: int, kind: int = socket.SOCK_STREAM, address: str = "0.0.0.0") -> socket.socket:
        def make() -> socket.socket:
            made = socket.socket(socket.AF_INET, kind)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((address, port))
            if kind == socket.SOCK_STREAM:
                made.listen()
            made.settimeout(EXCHANGE_DEADLINE_S)
            return made

        return self._cleanup.enter_context(_namespace.run_in(netns, make))

    def connect(self, netns: str, address: str, port: int, deadline_s: float = EXCHANGE_DEADLINE_S) -> socket.socket:
        made = _namespace.run_in(netns, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        self._cleanup.enter_context(made)
        made.settimeout(deadline_s)
        made.connect((address, port))
        return made

    def reaches(self, netns: str, address: str, port: int) -> bool:
        """For what should not be reached: a busy machine may make it say no too early, never yes."""
        try:
            self.connect(netns, address, port, CONNECT_DEADLINE_S)
        except OSError as error:
            if isinstance(error, TimeoutError) or error.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self) -> None:
        self._cleanup.close()
        for guest in self._guests:
            guest.power_off()
        with contextlib.suppress(OSError):
            self.on_host(self.host.release)
            self.on_host(lambda: destroy_all(self.tag, self.run_root))
        for name in (self.host_netns, self.outside_netns):
            _namespace.remove(name)


@contextlib.contextmanager
def open_world(tag: str, run_root: Path) -> Iterator[World]:
    """A world that is gone afterwards, also when it could only be built in part."""
    world = World(tag, run_root)
    try:
        world.build()
        yield world
    finally:
        world.close()
