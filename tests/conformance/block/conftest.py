"""One blockd per test, fake or real, with a folder for layers and uppers.

The real one needs root, /dev/fuse and the built programs; it is skipped with the reason where one of them is missing,
and its mounts are gone after the test whatever happened.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from block_bench import Bench, bin_dir, host_or_skip

from agentenv.block import BlockClient, BlockDaemon, FakeBlock


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[BlockDaemon]:
    """A real keeper and blockd, not started yet; stopped and unmounted afterwards."""
    host_or_skip()
    daemon = BlockDaemon(bin_dir=bin_dir(), run_dir=tmp_path / "run", state_dir=tmp_path / "state")
    try:
        yield daemon
    finally:
        await daemon.stop()
        mounts = Path("/proc/mounts").read_text()
        assert str(tmp_path) not in mounts, "the test left a mount behind"


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.host)])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """The bench of the conformance suite."""
    files = tmp_path / "files"
    files.mkdir()
    if request.param == "fake":
        yield Bench(FakeBlock(tmp_path / "fake"), files, None)
        shutil.rmtree(tmp_path / "fake")
        return
    host_or_skip()
    daemon = BlockDaemon(bin_dir=bin_dir(), run_dir=tmp_path / "run", state_dir=tmp_path / "state")
    client = BlockClient(daemon.socket)
    try:
        await daemon.ensure()
        yield Bench(client, files, daemon)
    finally:
        await client.close()
        await daemon.stop()
