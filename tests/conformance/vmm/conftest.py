"""The labs: the fake always, the real one under the marker `vm`."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from vmm_lab import FakeLab, Lab, QemuLab

from agentenv.errors import HostUnsuitable
from agentenv.guest.kernel import Kernel, fetch_kernel


def _launcher() -> Path:
    """The built binary: AENV_BIN_DIR as `make test` sets it, else the cargo target folder, else PATH."""
    target = os.environ.get("CARGO_TARGET_DIR", "target")
    folders = [os.environ.get("AENV_BIN_DIR", ""), f"{target}/release", f"{target}/debug", os.environ["PATH"]]
    found = shutil.which("aenv-launch", path=os.pathsep.join(filter(None, folders)))
    if found is None:
        pytest.skip("aenv-launch is not built: cargo build --release -p aenv-launch")
    return Path(found).resolve()


@pytest.fixture(scope="session")
def guest_kernel() -> Kernel:
    """The distribution's cloud kernel; kept between test runs, since it is a download of 34 MB."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "aenv-tests/kernels"
    try:
        return fetch_kernel(cache)
    except HostUnsuitable as error:
        pytest.skip(str(error))


@pytest.fixture
async def qemu_lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[QemuLab]:
    """A lab of real microVMs."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not Path("/bin/busybox").exists():
        pytest.skip("needs root, /dev/net/tun and busybox-static")
    lab = QemuLab(tmp_path, request.getfixturevalue("guest_kernel"), _launcher())
    try:
        yield lab
    finally:
        await lab.close()


@pytest.fixture(params=["fake", pytest.param("qemu", marks=pytest.mark.vm)])
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lab]:
    """Each test of the suite runs once per driver."""
    if request.param == "fake":
        made: Lab = FakeLab(tmp_path)
    else:
        if os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not Path("/bin/busybox").exists():
            pytest.skip("needs root, /dev/net/tun and busybox-static")
        made = QemuLab(tmp_path, request.getfixturevalue("guest_kernel"), _launcher())
    try:
        yield made
    finally:
        await made.close()
