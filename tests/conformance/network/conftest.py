"""The world that the real slots live in, shared by the modules of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slot_world import World, open_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One per module, since building it takes half a second; a tag of this process keeps test runs apart."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        pytest.skip("needs root and /dev/net/tun")
    with open_world(f"{os.getpid() & 0xFFFFFF:06x}", tmp_path_factory.mktemp("run")) as world:
        yield world
