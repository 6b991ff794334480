"""The labs: the fake always, the real one under the marker `vm`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.host import built, guest_kernel
from vmm_lab import FakeLab, Lab, QemuLab


@pytest.fixture
async def qemu_lab(tmp_path: Path) -> AsyncIterator[QemuLab]:
    """A lab of real microVMs."""
    made = _real_lab(tmp_path)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(params=["fake", pytest.param("qemu", marks=pytest.mark.vm)])
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lab]:
    """Each test of the suite runs once per driver."""
    made: Lab = FakeLab(tmp_path) if request.param == "fake" else _real_lab(tmp_path)
    try:
        yield made
    finally:
        await made.close()


def _real_lab(tmp_path: Path) -> QemuLab:
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not Path("/bin/busybox").exists():
        pytest.skip("needs root, /dev/net/tun and busybox-static")
    return QemuLab(tmp_path, guest_kernel(), built("aenv-launch") / "aenv-launch")
