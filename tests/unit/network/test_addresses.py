"""Names, addresses and blocks of slots, and which resolvers a guest is given."""

from __future__ import annotations

import os
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from agentenv.errors import ConfigError, NetworkError
from agentenv.network import NetworkSettings, PoolSettings, node_tag
from agentenv.network.blocks import HostRoute, block_prefix, choose_block, claim_block, forget_block, hold_node
from agentenv.network.resolvers import PUBLIC_RESOLVERS, host_resolvers, parse_resolvers
from agentenv.network.rules import private_resolvers
from agentenv.network.slot import SlotPlan

SUBNET = IPv4Network("10.12.0.0/16")
PLAN = SlotPlan("abcdef", IPv4Network("10.12.16.0/20"), ("1.1.1.1",))


def test_a_slot_has_the_odd_address_of_its_pair() -> None:
    slot = PLAN.slot(1000)
    assert (slot.netns, slot.address, str(PLAN.host_address(1000))) == (
        "aenv-abcdef-1000",
        "10.12.23.209",
        "10.12.23.208",
    )
    assert PLAN.host_mac(1000) == "02:ae:01:00:03:e8"


def test_the_longest_interface_name_fits_the_kernel() -> None:
    assert len(PLAN.veth(32767)) <= 15


def test_names_lead_back_to_their_slot() -> None:
    assert PLAN.index_of(PLAN.netns(7)) == PLAN.index_of(PLAN.veth(7)) == 7
    for stranger in ("aenv-abcdee-7", "avabcdef-x", "avabcdef-", "eth0", "aenv-abcdef-²"):
        assert PLAN.index_of(stranger) is None


def test_the_tag_follows_the_real_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert node_tag(tmp_path / "link") == node_tag(tmp_path)
    assert len(node_tag(tmp_path)) == 6


@pytest.mark.parametrize(("slots", "prefix"), [(1, 31), (2, 30), (3, 29), (2048, 20), (32768, 16)])
def test_a_block_has_two_addresses_for_each_slot(slots: int, prefix: int) -> None:
    assert block_prefix(slots) == prefix


def test_a_block_avoids_other_nodes_and_the_hosts_routes() -> None:
    routes = [
        HostRoute(IPv4Network("10.0.0.0/8"), "vpc", has_gateway=True),
        HostRoute(IPv4Network("0.0.0.0/0"), "eth0", has_gateway=True),
        HostRoute(IPv4Network("10.12.16.0/24"), "cni0", has_gateway=False),
    ]
    block = choose_block(SUBNET, 20, [IPv4Network("10.12.0.0/20")], routes)
    assert str(block) == "10.12.32.0/20"


def test_a_subnet_that_the_host_uses_is_refused_with_the_route() -> None:
    routes = [HostRoute(IPv4Network("10.12.0.0/16"), "lan0", has_gateway=False)]
    with pytest.raises(NetworkError, match=r"route 10\.12\.0\.0/16 of lan0"):
        choose_block(SUBNET, 20, [], routes)


def test_a_subnet_without_room_is_refused() -> None:
    with pytest.raises(NetworkError, match="too small"):
        choose_block(IPv4Network("10.12.0.0/24"), 20, [], [])
    with pytest.raises(NetworkError, match="no free /17"):
        choose_block(SUBNET, 17, [SUBNET], [])


def _claim(tag: str, root: Path, count: int = 2048, live: frozenset[str] = frozenset()) -> str:
    return str(claim_block(tag, SUBNET, count, [], lambda other: other in live, root))


def test_nodes_get_different_blocks_and_keep_them(tmp_path: Path) -> None:
    live = frozenset({"aaaaaa", "bbbbbb"})
    first, second = _claim("aaaaaa", tmp_path, live=live), _claim("bbbbbb", tmp_path, live=live)
    assert first != second
    assert _claim("bbbbbb", tmp_path, live=live) == second


def test_the_block_of_a_running_node_without_slots_is_kept(tmp_path: Path) -> None:
    lock = hold_node("aaaaaa", tmp_path)
    try:
        first = _claim("aaaaaa", tmp_path)
        assert _claim("bbbbbb", tmp_path) != first
    finally:
        os.close(lock)
    forget_block("bbbbbb", tmp_path)
    assert _claim("cccccc", tmp_path) == first, "a stale claim is given to others"


def test_a_node_runs_once(tmp_path: Path) -> None:
    lock = hold_node("aaaaaa", tmp_path)
    try:
        with pytest.raises(NetworkError, match="already runs"):
            hold_node("aaaaaa", tmp_path)
    finally:
        os.close(lock)


def test_a_block_in_use_that_became_too_small_is_refused(tmp_path: Path) -> None:
    _claim("aaaaaa", tmp_path, count=16)
    with pytest.raises(NetworkError, match="clean the node first"):
        _claim("aaaaaa", tmp_path, live=frozenset({"aaaaaa"}))
    assert _claim("aaaaaa", tmp_path).endswith("/20")


def test_a_damaged_claims_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "network.json").write_text("{")
    with pytest.raises(NetworkError, match=r"network\.json is damaged"):
        _claim("aaaaaa", tmp_path)


def test_resolvers_that_no_guest_could_reach_are_left_out(tmp_path: Path) -> None:
    text = (
        "# c\nnameserver 127.0.0.53\nnameserver fe80::1%eth0\nnameserver 10.0.0.2 # x\nnameserver\nsearch example.com\n"
    )
    assert parse_resolvers(text) == ["10.0.0.2"]
    stub, real = tmp_path / "stub", tmp_path / "real"
    stub.write_text("nameserver 127.0.0.53\n")
    real.write_text("nameserver 192.0.2.1\n")
    assert host_resolvers([stub, real]) == ("192.0.2.1",)
    assert host_resolvers([stub, tmp_path / "none"]) == PUBLIC_RESOLVERS


def test_only_private_resolvers_need_an_exception() -> None:
    assert private_resolvers(["1.1.1.1", "10.0.0.2", "169.254.169.253"]) == ["10.0.0.2", "169.254.169.253"]


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match="slot_count_max is 0"):
        PoolSettings(slot_count_max=0)
    with pytest.raises(ConfigError, match=r"slot_pool_idle_count_min \(9\)"):
        PoolSettings(slot_pool_idle_count_min=9, slot_pool_idle_count_max=8)
    for address in ("127.0.0.53", "one.one.one.one"):
        with pytest.raises(ConfigError, match=address):
            NetworkSettings(tag="abcdef", dns=(address,))
