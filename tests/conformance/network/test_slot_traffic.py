"""What a guest can and cannot reach through a real slot, packet by packet."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address

import pytest
from slot_world import CONNECT_DEADLINE_S, FORBIDDEN, HOST_ADDRESS, PRIVATE_RESOLVER, PUBLIC, Guest, World, ip

from agentenv.errors import NetworkError
from agentenv.model import NetworkPolicy
from agentenv.network import _namespace, destroy_all, rules

pytestmark = pytest.mark.host

OPEN, CLOSED = NetworkPolicy(True), NetworkPolicy(False)
WEB, DNS, SERVICE = 8080, 53, 9000


@pytest.fixture(scope="module")
def guests(world: World) -> Iterator[tuple[Guest, Guest]]:
    """Two sandboxes with servers everywhere: whatever is not reached is kept away by rules, not by silence."""
    world.on_host(world.host.prepare)
    for index in (0, 1):
        world.on_host(lambda index=index: world.host.create(index))
    first, second = (world.plug_guest(world.host.slot(index)) for index in (0, 1))
    for netns in (first.netns, second.netns, world.host_netns, world.outside_netns, first.slot.netns):
        for port in (WEB, DNS, SERVICE):
            world.listen(netns, port)
    return first, second


@pytest.fixture
def guest(world: World, guests: tuple[Guest, Guest]) -> Iterator[Guest]:
    """The first sandbox with the internet allowed, whatever the test before it did."""
    world.on_host(lambda: world.host.set_policy(0, OPEN))
    return guests[0]


def _accept(listener: socket.socket) -> tuple[socket.socket, str]:
    connection, (address, _) = listener.accept()
    connection.settimeout(5)
    return connection, address


def test_the_host_reaches_every_port_of_the_guest_by_the_slots_address(world: World, guest: Guest) -> None:
    listener = world.listen(guest.netns, 49983)
    client = world.connect(world.host_netns, guest.slot.address, 49983)
    server, peer = _accept(listener)
    with server:
        assert peer == guest.slot.gateway
        client.sendall(b"in")
        assert server.recv(16) == b"in"
        server.sendall(b"out")
        assert client.recv(16) == b"out"


def test_the_guest_reaches_the_outside_behind_the_hosts_address(world: World, guest: Guest) -> None:
    listener = world.listen(world.outside_netns, 443)
    world.connect(guest.netns, PUBLIC, 443)
    server, peer = _accept(listener)
    server.close()
    assert peer == HOST_ADDRESS


@pytest.mark.parametrize("address", FORBIDDEN)
def test_private_and_special_ranges_are_refused_at_once(world: World, guest: Guest, address: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        world.connect(guest.netns, address, WEB, CONNECT_DEADLINE_S)


def test_the_guest_reaches_no_address_of_the_host(world: World, guest: Guest) -> None:
    host_end = str(IPv4Address(guest.slot.address) - 1)
    for address in (HOST_ADDRESS, host_end, guest.slot.gateway, guest.slot.address):
        for port in (WEB, DNS):
            assert not world.reaches(guest.netns, address, port), f"{address}:{port}"


def test_the_guest_reaches_no_other_sandbox(world: World, guests: tuple[Guest, Guest], guest: Guest) -> None:
    other = guests[1].slot
    for address in (other.address, str(IPv4Address(other.address) - 1)):
        assert not world.reaches(guest.netns, address, WEB)


def test_the_outside_reaches_no_guest_even_with_a_route(world: World, guest: Guest) -> None:
    assert not world.reaches(world.outside_netns, guest.slot.address, WEB)
    world.connect(world.host_netns, guest.slot.address, WEB)


def test_the_host_holds_even_if_the_slots_own_rules_are_gone(world: World, guests: tuple[Guest, Guest]) -> None:
    """As after an escape from the VMM into the namespace: forward everything, with the slot's address."""
    netns = guests[1].slot.netns
    subprocess.run(["ip", "netns", "exec", netns, "nft", "flush", "ruleset"], check=True)
    for address in (HOST_ADDRESS, guests[0].slot.address, *FORBIDDEN[:2]):
        assert not world.reaches(netns, address, WEB), address
    world.connect(netns, PUBLIC, WEB)


def test_only_port_53_of_a_private_resolver_is_open(world: World, guest: Guest) -> None:
    world.connect(guest.netns, PRIVATE_RESOLVER, DNS)
    assert not world.reaches(guest.netns, PRIVATE_RESOLVER, WEB)
    server = world.listen(world.outside_netns, DNS, socket.SOCK_DGRAM, PRIVATE_RESOLVER)
    query = _namespace.run_in(guest.netns, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with query:
        query.settimeout(5)
        query.sendto(b"q", (PRIVATE_RESOLVER, DNS))
        data, peer = server.recvfrom(16)
        server.sendto(data + b"!", peer)
        assert query.recv(16) == b"q!"


def test_a_denied_guest_reaches_nothing_outward_but_is_reached(world: World, guest: Guest) -> None:
    world.on_host(lambda: world.host.set_policy(0, CLOSED))
    for address, port in ((PUBLIC, WEB), (PRIVATE_RESOLVER, DNS)):
        with pytest.raises(ConnectionRefusedError):
            world.connect(guest.netns, address, port, CONNECT_DEADLINE_S)
    world.connect(world.host_netns, guest.slot.address, WEB)


def test_a_tightened_policy_cuts_the_guests_flows_and_not_the_hosts(world: World, guest: Guest) -> None:
    outside, inside = world.listen(world.outside_netns, 444), world.listen(guest.netns, 445)
    outward = world.connect(guest.netns, PUBLIC, 444)
    inward = world.connect(world.host_netns, guest.slot.address, 445)
    outside_end, inside_end = _accept(outside)[0], _accept(inside)[0]
    with outside_end, inside_end:
        outward.sendall(b"1")
        assert outside_end.recv(1) == b"1"
        world.on_host(lambda: world.host.set_policy(0, CLOSED))
        with pytest.raises(OSError, match="reset"):  # noqa: PT012 - the reset meets the send or the read
            outward.sendall(b"2")
            outward.recv(1)
        # The guest speaks first: the host's connection must not depend on its next packet.
        inside_end.sendall(b"3")
        assert inward.recv(1) == b"3"


def test_a_loosened_policy_keeps_flows(world: World, guest: Guest) -> None:
    outside = world.listen(world.outside_netns, 446)
    outward = world.connect(guest.netns, PUBLIC, 446)
    with _accept(outside)[0] as outside_end:
        world.on_host(lambda: world.host.set_policy(0, OPEN))
        outside_end.sendall(b"1")
        assert outward.recv(1) == b"1"


def test_late_packets_of_an_earlier_sandbox_do_not_reach_the_next(world: World) -> None:
    """UDP, where the host still has the old flow: its answer must not be taken for a new connection inward."""
    world.on_host(lambda: world.host.create(2))
    world.on_host(lambda: world.host.set_policy(2, OPEN))
    outside = world.listen(world.outside_netns, 447, socket.SOCK_DGRAM, PUBLIC)
    earlier = world.plug_guest(world.host.slot(2))
    with _namespace.run_in(earlier.netns, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as old:
        old.bind(("0.0.0.0", 5000))
        old.sendto(b"hello", (PUBLIC, 447))
        _, peer = outside.recvfrom(16)
    earlier.power_off()
    assert world.on_host(lambda: world.host.reset(2))
    world.on_host(lambda: world.host.set_policy(2, OPEN))
    later = world.plug_guest(world.host.slot(2))
    new = world.listen(later.netns, 5000, socket.SOCK_DGRAM)
    outside.sendto(b"late", peer)
    new.settimeout(CONNECT_DEADLINE_S)
    with pytest.raises(TimeoutError):
        new.recv(16)


def test_a_guest_has_no_more_flows_than_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "FLOW_COUNT_MAX", 3)
    world.on_host(lambda: world.host.create(4))
    world.on_host(lambda: world.host.set_policy(4, OPEN))
    greedy = world.plug_guest(world.host.slot(4))
    for _ in range(3):
        world.connect(greedy.netns, PUBLIC, WEB)
    with pytest.raises(ConnectionRefusedError):
        world.connect(greedy.netns, PUBLIC, WEB)


def test_a_guest_that_takes_another_address_gets_nowhere(world: World, guests: tuple[Guest, Guest]) -> None:
    world.on_host(lambda: world.host.create(3))
    world.on_host(lambda: world.host.set_policy(3, OPEN))
    liar = world.plug_guest(world.host.slot(3))
    world.connect(liar.netns, PUBLIC, WEB)
    ip("-n", liar.netns, "addr", "flush", "dev", "eth0")
    ip("-n", liar.netns, "addr", "add", "10.11.0.3/24", "dev", "eth0")
    ip("-n", liar.netns, "route", "add", "default", "via", liar.slot.gateway)
    assert not world.reaches(liar.netns, PUBLIC, WEB)


def test_a_slot_has_no_ipv6_address(guest: Guest, world: World) -> None:
    for netns, interface in ((guest.slot.netns, None), (world.host_netns, f"av{world.tag}-0")):
        command = ["ip", "-n", netns, "-6", "addr", "show", *(["dev", interface] if interface else [])]
        assert "inet6" not in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_running_node_is_not_destroyed(world: World, guest: Guest) -> None:
    with pytest.raises(NetworkError, match="already runs"):
        world.on_host(lambda: destroy_all(world.tag, world.run_root))


def test_a_second_node_has_other_addresses_and_survives_the_first(world: World, guests: tuple[Guest, Guest]) -> None:
    """Last: it destroys the node of this module and looks at what is left."""
    second = world.new_host("ffffff")
    world.on_host(second.prepare)
    try:
        world.on_host(lambda: second.create(0))
        assert second.slot(0).address != guests[0].slot.address
        world.on_host(world.host.release)
        removed = world.on_host(lambda: destroy_all(world.tag, world.run_root))
        assert f"aenv-{world.tag}-0" in removed
        assert world.on_host(lambda: destroy_all(world.tag, world.run_root)) == []
        left = subprocess.run(
            ["ip", "netns", "exec", world.host_netns, "sh", "-c", "nft list tables; ip -o link; ls /run/netns"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert f"aenv_{world.tag}" not in left
        assert f"av{world.tag}" not in left
        assert f"aenv-{world.tag}" not in left
        assert "aenv_ffffff" in left
        assert world.on_host(lambda: second.is_whole(0))
    finally:
        world.on_host(second.release)
        world.on_host(lambda: destroy_all("ffffff", world.run_root))
    assert os.listdir(world.run_root) == [], "the last node of a machine takes the shared files with it"
