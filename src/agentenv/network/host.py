"""Slots on the real host: makes, changes, resets, finds and removes them. Blocking; `pool` runs it in threads.

Holds no list of slots: the host's namespaces and interfaces are the only truth, so a restarted server finds everything.
Calls for different slots may run at the same time, calls for one slot may not (the pool's duty).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Network
from pathlib import Path
from typing import Protocol

from pyroute2 import IPRoute

from agentenv.errors import NetworkError
from agentenv.model import NetworkPolicy
from agentenv.network import _conntrack, _links, _namespace, _nft, rules
from agentenv.network._steps import step
from agentenv.network.blocks import RUN_ROOT, HostRoute, claim_block, forget_block, hold_node
from agentenv.network.settings import NetworkSettings
from agentenv.network.slot import NETNS_PREFIX, VETH_PREFIX, Slot, SlotPlan

log = logging.getLogger(__name__)

_CLOSED = NetworkPolicy(allow_internet=False)


class SlotHost(Protocol):
    """What the pool needs of a host. Every method raises `NetworkError`, which names the step."""

    def prepare(self) -> None:
        """Claim the addresses and set the host's own rules. Called once, first."""

    def existing(self) -> set[int]:
        """Indexes of all slots of this node, also half-made ones."""

    def slot(self, index: int) -> Slot:
        """The slot's names and addresses."""

    def create(self, index: int) -> None:
        """Make the slot with all egress refused. Removes what it made when it fails."""

    def is_whole(self, index: int) -> bool:
        """Whether an existing slot has its namespace and its veth pair."""

    def set_policy(self, index: int, policy: NetworkPolicy) -> None:
        """Replace the egress policy; a tightened one cuts the guest's own connections."""

    def reset(self, index: int) -> bool:
        """Make the slot as new. False (and nothing changed) when a process still holds its tap."""

    def remove(self, index: int) -> None:
        """Remove the slot; repeating it is fine."""

    def release(self) -> None:
        """Let go of the node's lock; slots stay."""


class NamespaceHost:
    """The real `SlotHost`."""

    def __init__(self, settings: NetworkSettings) -> None:
        self._settings = settings
        self._plan_or_none: SlotPlan | None = None
        self._lock: int | None = None

    @property
    def _plan(self) -> SlotPlan:
        if self._plan_or_none is None:
            raise NetworkError("the network was not prepared")
        return self._plan_or_none

    def prepare(self) -> None:
        self._lock = hold_node(self._settings.tag, self._settings.run_root)
        try:
            self._plan_or_none = self._prepare()
        except BaseException:
            self.release()
            raise

    def _prepare(self) -> SlotPlan:
        settings = self._settings
        block = claim_block(
            settings.tag,
            settings.subnet,
            settings.pool.slot_count_max,
            _foreign_routes(),
            _has_slots,
            settings.run_root,
        )
        plan = SlotPlan(settings.tag, block, settings.dns)
        with step("prepare /run/netns"):
            _namespace.prepare_directory()
        with step("switch on IPv4 forwarding on the host"):
            forwarding = Path("/proc/sys/net/ipv4/ip_forward")
            if forwarding.read_text().strip() != "1":
                log.info("switching on net.ipv4.ip_forward, which guests need to reach the internet")
                forwarding.write_text("1")
        with step(f"set the host's table {rules.host_table_name(settings.tag)}"):
            _nft.apply(rules.host_table(plan, settings.subnet))
        return plan

    def existing(self) -> set[int]:
        found = [*_namespace.names(self._plan.netns_prefix), *_links.interface_names(self._plan.veth_prefix)]
        return {index for name in found if (index := self._plan.index_of(name)) is not None}

    def slot(self, index: int) -> Slot:
        return self._plan.slot(index)

    def create(self, index: int) -> None:
        plan = self._plan
        host_namespace = _links.this_namespace()

        def inside() -> None:
            _links.build_inside(plan, index, host_namespace)
            with step(f"set the rules of slot {index}"):
                _nft.apply(rules.slot_table(plan, self._settings.subnet, index))

        try:
            with step(f"make the namespace {plan.netns(index)}"):
                _namespace.create(plan.netns(index), inside)
            _links.build_outside(plan, index)
        except BaseException:
            with suppress(NetworkError):
                self.remove(index)
            raise
        finally:
            os.close(host_namespace)

    def is_whole(self, index: int) -> bool:
        netns, veth = self._plan.netns(index), self._plan.veth(index)
        return netns in _namespace.names(netns) and veth in _links.interface_names(veth)

    def set_policy(self, index: int, policy: NetworkPolicy) -> None:
        def inside() -> None:
            _nft.apply(rules.policy_rules(policy))
            if not policy.allow_internet:
                _conntrack.flush(rules.EGRESS_MARK)

        with step(f"set the policy of slot {index}"):
            _namespace.run_in(self._plan.netns(index), inside)

    def reset(self, index: int) -> bool:
        def inside() -> bool:
            if not _links.tap_is_free():
                return False
            _nft.apply(rules.policy_rules(_CLOSED))
            _conntrack.flush()
            return True

        with step(f"reset slot {index}"):
            return _namespace.run_in(self._plan.netns(index), inside)

    def remove(self, index: int) -> None:
        _links.remove_outside(self._plan.veth(index))
        with step(f"remove the namespace {self._plan.netns(index)}"):
            _namespace.remove(self._plan.netns(index))

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _has_slots(tag: str) -> bool:
    return bool(_namespace.names(f"{NETNS_PREFIX}{tag}-"))


def _foreign_routes() -> list[HostRoute]:
    """The host's IPv4 routes, without those of any node's slots."""
    with step("list the routes"), IPRoute() as netlink:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in netlink.get_links()}
        dump = list(netlink.get_routes(family=2))
    found = []
    for route in dump:
        interface = names.get(route.get_attr("RTA_OIF"), "")
        destination = route.get_attr("RTA_DST")
        if destination is None or interface.startswith(VETH_PREFIX):
            continue
        network = IPv4Network(f"{destination}/{route['dst_len']}", strict=False)
        found.append(HostRoute(network, interface, route.get_attr("RTA_GATEWAY") is not None))
    return found


def destroy_all(tag: str, run_root: Path = RUN_ROOT) -> list[str]:
    """Remove everything of one node: slots, its table, its addresses. Returns the names of what was removed.

    For a node that does not run: `NetworkError` when it does. Goes on past failures and raises the first at the end.
    """
    lock = hold_node(tag, run_root)
    try:
        removals: list[tuple[str, Callable[[str], None]]] = [
            *((name, _links.remove_outside) for name in _links.interface_names(f"{VETH_PREFIX}{tag}-")),
            *((name, _namespace.remove) for name in _namespace.names(f"{NETNS_PREFIX}{tag}-")),
        ]
        failures = []
        for name, remove in removals:
            try:
                with step(f"remove {name}"):
                    remove(name)
            except NetworkError as error:
                failures.append(error)
        with step(f"remove the table of node {tag}"):
            _nft.apply(rules.remove_host_table(tag))
        if failures:
            raise failures[0]
        forget_block(tag, run_root)
    finally:
        os.close(lock)
    return [name for name, _ in removals]
