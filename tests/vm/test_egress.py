"""What a real guest can reach: an outside that stands for the internet, and nothing else.

The outside is a network namespace of ours with listeners on one address that nobody routes (TEST-NET-3, which stands
for the internet) and on addresses of every kind that a guest must never reach. No packet leaves this machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

import httpx
import pytest
from bench.node import free_port
from e2b import Sandbox

from agentenv.config import NetworkConfig
from agentenv.network import host_resolvers
from tests.vm.conftest import NodeUnderTest

pytestmark = pytest.mark.vm

INTERNET: Final = "203.0.113.7"
# Link-local with the clouds' metadata service, the private ranges, carrier NAT, and benchmarking.
FORBIDDEN: Final = ("169.254.169.254", "10.99.0.7", "172.16.0.7", "192.168.77.7", "100.64.0.7", "198.18.0.7")
# On the host it must be nobody's; in the guests and outside any will do.
PORT: Final = free_port()
# The default of network.subnet, from which slots have their addresses; and a routing table of this process's own.
SLOTS: Final = IPv4Network(NetworkConfig().subnet)
TABLE: Final = str((1 << 20) + os.getpid())

# Accepts connections on the addresses that it is given, and answers datagrams; says so, and ends with its standard
# input. One socket for each address, since the answer to a datagram must come from where it went.
LISTENER = f"""
import socket, sys, threading
def answer(server):
    while True:
        server.accept()[0].close()
def echo(server):
    while True:
        data, peer = server.recvfrom(512)
        server.sendto(data, peer)
for address in sys.argv[1:]:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((address, {PORT}))
    for target, server in ((answer, socket.create_server((address, {PORT}))), (echo, udp)):
        threading.Thread(target=target, args=(server,), daemon=True).start()
print("listening", flush=True)
sys.stdin.read()
"""

# Runs in the guest: which of the places (host, port) answer a connection, and which a datagram, as JSON.
PROBE = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def tcp(place):
    try:
        socket.create_connection(tuple(place), 2).close()
    except OSError:
        return False
    return True
def udp(place):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(2)
        try:
            sock.connect(tuple(place))
            sock.send(b"?")
            return sock.recv(16) == b"?"
        except OSError:
            return False
places = json.loads(sys.argv[1])
with ThreadPoolExecutor(64) as pool:
    answers = [pool.map(probe, places) for probe in (tcp, udp)]
    print(json.dumps([[place[0] for place, ok in zip(places, got) if ok] for got in answers]))
"""


@dataclass(frozen=True)
class Reached:
    """Hosts that answered a connection, and those that answered a datagram."""

    tcp: list[str]
    udp: list[str]


@pytest.fixture(scope="module")
def outside() -> Iterator[None]:
    """Only packets from slots are routed there: the host's own traffic, to a metadata service say, is as before."""
    name, near = f"aenvout{os.getpid()}", f"aeo{os.getpid()}"
    rule = ("from", str(SLOTS), "lookup", TABLE)
    _ip("netns", "add", name)
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", "far", "netns", name)
        Path(f"/proc/sys/net/ipv4/conf/{near}/rp_filter").write_text("2")
        _ip("addr", "add", "203.0.113.1/32", "dev", near)
        _ip("link", "set", near, "up")
        for device in ("lo", "far"):
            _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "route", "add", "203.0.113.1/32", "dev", "far")
        _ip("-n", name, "route", "add", "default", "via", "203.0.113.1")
        _ip("rule", "add", *rule)
        for address in (INTERNET, *FORBIDDEN):
            _ip("-n", name, "addr", "add", f"{address}/32", "dev", "far")
            _ip("route", "add", f"{address}/32", "dev", near, "table", TABLE)
        with _listener((INTERNET, *FORBIDDEN), "ip", "netns", "exec", name):
            yield
    finally:
        subprocess.run(["ip", "rule", "del", *rule], capture_output=True)
        subprocess.run(["ip", "link", "del", near], capture_output=True)
        _ip("netns", "del", name)


def test_the_internet_and_nothing_of_the_private_ranges(node: NodeUnderTest, sandbox: Sandbox, outside: None) -> None:
    near = _route(_slot_address(node, sandbox))["prefsrc"]
    for address in (INTERNET, *FORBIDDEN):
        # The host can, from the slot's end of the wire: nothing but the guest's wall stops it.
        socket.create_connection((address, PORT), 5, source_address=(near, 0)).close()
    reached = _probe(sandbox, [(address, PORT) for address in (INTERNET, *FORBIDDEN)])
    assert reached == Reached(tcp=[INTERNET], udp=[INTERNET])


def test_not_the_host_at_any_of_its_addresses(node: NodeUnderTest, sandbox: Sandbox) -> None:
    addresses = sorted({_route(_slot_address(node, sandbox))["prefsrc"], *_host_addresses()})
    assert len(addresses) >= 3, "loopback, the network, and the slot's end of the wire"
    api_port = int(node.running.api_url.rpartition(":")[2])
    places = [(address, port) for address in (*addresses, "10.11.0.1") for port in (PORT, api_port, 22)]
    with _listener(addresses):
        for address in addresses:
            socket.create_connection((address, PORT), 5).close()
        assert _probe(sandbox, places) == Reached(tcp=[], udp=[])


def test_not_another_guest(node: NodeUnderTest, sandbox: Sandbox) -> None:
    other = Sandbox.create("base", timeout=60)
    other.commands.run(f"exec python3 -m http.server {PORT}", background=True, timeout=0)
    headers = {"E2b-Sandbox-Id": other.sandbox_id, "E2b-Sandbox-Port": str(PORT)}

    def is_served() -> bool:
        return httpx.get(node.running.sandbox_url, headers=headers, timeout=10).status_code == 200

    node.wait("the other guest's server", is_served)
    slot = _slot_address(node, other)
    socket.create_connection((slot, PORT), 5).close()
    assert _probe(sandbox, [(slot, PORT), (slot, 49983)]) == Reached(tcp=[], udp=[])


def test_without_internet_access_nothing(node: NodeUnderTest, outside: None) -> None:
    closed = Sandbox.create("base", timeout=60, allow_internet_access=False)
    places = [(INTERNET, PORT), (FORBIDDEN[0], PORT)]
    assert _probe(closed, places) == Reached(tcp=[], udp=[])
    closed.pause()
    closed.connect(timeout=60)
    child = closed.fork(timeout=60)[0]
    assert isinstance(child, Sandbox)
    for box in (closed, child):
        assert _probe(box, places) == Reached(tcp=[], udp=[]), "the policy was lost on the way"
        assert box.commands.run("echo reached from the host").exit_code == 0


def test_egress_comes_back_with_a_resume_and_reaches_a_fork(
    node: NodeUnderTest, sandbox: Sandbox, outside: None
) -> None:
    sandbox.pause()
    sandbox.connect(timeout=60)
    child = sandbox.fork(timeout=60)[0]
    assert isinstance(child, Sandbox)
    for box in (sandbox, child):
        assert _probe(box, [(INTERNET, PORT), (FORBIDDEN[0], PORT)]) == Reached(tcp=[INTERNET], udp=[INTERNET])


def test_the_guests_resolvers_are_the_hosts(sandbox: Sandbox) -> None:
    lines = sandbox.files.read("/etc/resolv.conf").split("\n")
    assert [line.split()[1] for line in lines if line.startswith("nameserver ")] == list(host_resolvers())
    assert "localhost" in sandbox.commands.run("getent hosts localhost").stdout


def _probe(box: Sandbox, places: list[tuple[str, int]]) -> Reached:
    box.files.write("/tmp/probe.py", PROBE)
    said = box.commands.run(f"python3 /tmp/probe.py '{json.dumps(places)}'", timeout=60).stdout
    return Reached(*json.loads(said))


def _slot_address(node: NodeUnderTest, box: Sandbox) -> str:
    """Where the host reaches this guest, as the proxy is told."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(node.run_dir / "internal.sock"))) as resolver:
        wanted = {"sandbox_id": box.sandbox_id, "port": PORT}
        return str(resolver.post("http://internal/resolve", json=wanted).raise_for_status().json()["address"])


def _route(address: str) -> dict[str, str]:
    found = subprocess.run(["ip", "-j", "route", "get", address], capture_output=True, check=True)
    first: dict[str, str] = json.loads(found.stdout)[0]
    return first


def _host_addresses() -> set[str]:
    """The host's own addresses, but not those of slots."""
    links = json.loads(subprocess.run(["ip", "-4", "-j", "addr"], capture_output=True, check=True).stdout)
    real = [link for link in links if not link["ifname"].startswith(("av", "aeo"))]
    return {entry["local"] for link in real for entry in link["addr_info"]}


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@contextmanager
def _listener(addresses: Iterable[str], *prefix: str) -> Iterator[None]:
    """LISTENER on these addresses, in a process that `prefix` starts, until the context ends."""
    command = [*prefix, sys.executable, "-c", LISTENER, *addresses]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"listening\n"
            yield
        finally:
            process.communicate(timeout=10)
