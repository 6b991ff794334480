"""Two nodes over one store, which is in memory or a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.snapshots.repository_world import Node, make_store

from agentenv.snapshots import Store


@pytest.fixture(params=["memory", "posix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return make_store(request.param, tmp_path)


@pytest.fixture
async def node(store: Store, tmp_path: Path) -> Node:
    made = Node("node-a", store, tmp_path / "a")
    await made.repository.load()
    return made


@pytest.fixture
async def other(store: Store, tmp_path: Path) -> Node:
    made = Node("node-b", store, tmp_path / "b")
    await made.repository.load()
    return made
