"""What the tests of blockd share: the bench they run on, finding the binaries, reading and writing exports."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.host import built

from agentenv.block import BlockClient, BlockDaemon
from agentenv.errors import BlockError


@dataclass(frozen=True)
class Bench:
    """A client and where its files go. `daemon` is None for the fake."""

    client: BlockClient
    files: Path
    daemon: BlockDaemon | None


def bin_dir() -> Path:
    """The folder with aenv-blockd and aenv-launch."""
    return built("aenv-blockd", "aenv-launch")


def host_or_skip() -> None:
    """Skips where FUSE cannot be mounted."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse")


async def kind_of(call: Awaitable[object]) -> str:
    """The kind of the error that the call must raise."""
    with pytest.raises(BlockError) as caught:
        await call
    return caught.value.kind


def write(path: Path, offset: int, data: bytes) -> None:
    """Write and flush, as a guest would through its VMM."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        assert os.pwrite(descriptor, data, offset) == len(data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, offset: int, length: int) -> bytes:
    """Read by one call."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)
