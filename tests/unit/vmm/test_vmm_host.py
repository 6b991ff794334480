"""What is read of the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.errors import HostUnsuitable
from agentenv.vmm import _host
from agentenv.vmm._host import HostFacts, QemuBinary

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 167
model name\t: Some CPU
stepping\t: 1
cpu MHz\t\t: 2599.998
flags\t\t: fpu vme sse2
"""


def test_this_hosts_facts_can_be_read_and_do_not_change() -> None:
    facts = HostFacts.read()
    assert facts == HostFacts.read()
    assert 100_000 < facts.tsc_khz < 10_000_000


def test_the_kernels_calibration_is_preferred_to_the_momentary_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "_perf_tsc_khz", lambda: 2_100_000)
    assert _host._tsc_khz(CPUINFO) == 2_100_000
    monkeypatch.setattr(_host, "_perf_tsc_khz", lambda: None)
    assert _host._tsc_khz(CPUINFO) == 2_599_998
    with pytest.raises(HostUnsuitable, match="time stamp counter"):
        _host._tsc_khz("processor: 0")


def test_another_cpu_or_another_feature_is_another_identity() -> None:
    identity = _host._cpu_identity(CPUINFO)
    assert identity.startswith("GenuineIntel-6-167-1-")
    assert identity == _host._cpu_identity(CPUINFO.replace("fpu vme sse2", "sse2 fpu vme"))
    assert identity != _host._cpu_identity(CPUINFO.replace("sse2", "sse2 avx512f"))
    assert identity != _host._cpu_identity(CPUINFO.replace("167", "168"))


def _qemu(path: Path, version: str) -> None:
    path.write_text(f"#!/bin/sh\necho 'QEMU emulator version {version}'\necho 'Copyright'\n")
    path.chmod(0o755)


def test_an_upgrade_under_a_running_server_is_noticed(tmp_path: Path) -> None:
    program = tmp_path / "qemu"
    _qemu(program, "7.2.22 (Debian 1:7.2)")
    binary = QemuBinary(str(program))
    assert binary.build == "7.2.22 (Debian 1:7.2)"
    binary.refresh()
    assert binary.build == "7.2.22 (Debian 1:7.2)"
    replacement = tmp_path / "new"
    _qemu(replacement, "10.0.2 (Debian 1:10.0)")
    os.replace(replacement, program)
    binary.refresh()
    assert binary.build == "10.0.2 (Debian 1:10.0)"


def test_a_missing_or_broken_program_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HostUnsuitable, match="install the package qemu-system-x86"):
        QemuBinary(str(tmp_path / "none"))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(HostUnsuitable, match="--version"):
        QemuBinary(str(broken))
