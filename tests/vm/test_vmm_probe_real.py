"""The probe on this very host: it must not be taken in by a /dev/kvm on which no guest boots."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from agentenv.errors import HostUnsuitable
from agentenv.guest.initramfs import PROBE_MARKER, build_probe_initramfs
from agentenv.vmm import GuestKernel
from agentenv.vmm.probe import ProbeInputs, choose_driver
from tests.host import built, guest_kernel

pytestmark = pytest.mark.vm


def _vmms() -> list[str]:
    return [
        folder.name
        for folder in Path("/proc").glob("[0-9]*")
        if (folder / "cmdline").exists() and b"aenv-probe" in (folder / "cmdline").read_bytes()
    ]


@pytest.fixture
def inputs(tmp_path: Path) -> ProbeInputs:
    launcher = built("aenv-launch") / "aenv-launch"
    kernel = guest_kernel()
    initramfs = tmp_path / "probe-initramfs"
    initramfs.write_bytes(build_probe_initramfs())
    run_dir = Path(tempfile.mkdtemp(prefix="aenvt", dir="/tmp"))
    return ProbeInputs(
        GuestKernel(kernel.vmlinux, initramfs, kernel.release),
        PROBE_MARKER,
        launcher,
        tmp_path / "state",
        run_dir,
    )


async def test_the_probe_chooses_what_really_boots_here_and_remembers_it(inputs: ProbeInputs) -> None:
    try:
        driver, report = await choose_driver(inputs)
        assert report.chosen is not None
        assert (driver.name, driver.accelerator) == (report.chosen.driver, report.chosen.accelerator)
        if Path("/sys/module/kvm_pvm").exists():
            assert driver.accelerator == "tcg", "a /dev/kvm of kvm_pvm boots no stock guest"
        assert not _vmms()
        assert not list(inputs.run_dir.iterdir())
        _, again = await choose_driver(inputs)
        assert again.chosen is not None
        assert again.chosen.cached
        assert again.chosen.accelerator == driver.accelerator
    finally:
        shutil.rmtree(inputs.run_dir)


async def test_an_accelerator_that_does_not_boot_here_is_refused_with_its_reason(inputs: ProbeInputs) -> None:
    object.__setattr__(inputs, "driver", "firecracker")
    try:
        with pytest.raises(HostUnsuitable, match="no firecracker driver"):
            await choose_driver(inputs)
    finally:
        shutil.rmtree(inputs.run_dir)
