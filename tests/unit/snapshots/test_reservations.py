"""Names are reserved by one node at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.snapshots.repository_world import Node

from agentenv.clock import FakeClock
from agentenv.errors import Conflict
from agentenv.snapshots import MemoryStore
from agentenv.snapshots.names import RESERVED_S


async def test_a_name_is_reserved_once_until_it_is_released(node: Node, other: Node) -> None:
    reservation = await node.repository.reserve_name("ns/base:v1.0")
    with pytest.raises(Conflict, match="being made"):
        await other.repository.reserve_name("ns/base:v1.0")
    await node.repository.release_name(reservation)
    again = await other.repository.reserve_name("ns/base:v1.0")
    await node.repository.release_name(reservation)
    with pytest.raises(Conflict):
        await node.repository.reserve_name("ns/base:v1.0")
    await other.repository.release_name(again)


async def test_a_reservation_of_a_former_process_is_void(node: Node) -> None:
    await node.repository.reserve_name("base:default")
    await node.restart()
    await node.repository.reserve_name("base:default")


async def test_a_reservation_of_a_dead_node_runs_out_unless_it_is_renewed(tmp_path: Path) -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    node, other = Node("node-a", store, tmp_path / "a"), Node("node-b", store, tmp_path / "b")
    await node.repository.reserve_name("base:default")
    clock.advance(RESERVED_S - 1)
    await node.repository.renew()
    clock.advance(RESERVED_S - 1)
    with pytest.raises(Conflict):
        await other.repository.reserve_name("base:default")
    clock.advance(2)
    await other.repository.reserve_name("base:default")
    await node.repository.renew()
    with pytest.raises(Conflict):
        await node.repository.reserve_name("base:default")
