"""The choice of a driver, over candidates that the test makes work or fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from agentenv.errors import VmmError, VmmTimeout
from agentenv.vmm import GuestKernel
from agentenv.vmm import probe as probe_module
from agentenv.vmm.probe import FAILURE_KEPT_S, LIMIT_S, ProbeInputs, ProbeReport, probe
from agentenv.vmm.qemu import QemuDriver


class Host:
    """Which accelerators boot a guest here, and how often that was tried."""

    def __init__(self, tmp_path: Path, **errors: VmmError | None) -> None:
        self.errors = errors
        self.tried: list[str] = []
        self.limits: list[float] = []
        self.now = 1_000_000.0
        self.inputs = ProbeInputs(
            GuestKernel(tmp_path / "k", tmp_path / "i", "6.12"), b"marker", tmp_path / "launch", tmp_path / "state",
            tmp_path / "run",
        )  # fmt: skip

    def make(self, accelerator: str) -> QemuDriver:
        host = self

        class Driver:
            async def boots(self, kernel: GuestKernel, runtime_dir: Path, marker: bytes, timeout_s: float) -> None:
                assert runtime_dir.is_dir()
                host.tried.append(accelerator)
                host.limits.append(timeout_s)
                error = host.errors.get(accelerator)
                if error is not None:
                    raise error

        return cast("QemuDriver", Driver())

    async def probe(self, identity: str = "host 1", **changes: Any) -> ProbeReport:
        for name, value in changes.items():
            object.__setattr__(self.inputs, name, value)
        return await probe(self.inputs, self.make, identity, lambda: self.now)


@pytest.fixture(autouse=True)
def kvm_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether /dev/kvm can be opened; true unless a test says otherwise."""

    def set_to(exists: bool) -> None:
        monkeypatch.setattr(probe_module.os, "access", lambda *_: exists)

    set_to(True)
    return set_to


def chosen(report: ProbeReport) -> str | None:
    return report.chosen and report.chosen.accelerator


async def test_kvm_is_chosen_where_a_guest_boots_on_it(tmp_path: Path) -> None:
    host = Host(tmp_path)
    report = await host.probe()
    assert chosen(report) == "kvm"
    assert host.tried == ["kvm"]
    assert [v.reason for v in report.verdicts][2] == "not tried, a better one works"


async def test_a_kvm_device_on_which_no_guest_boots_is_not_trusted(tmp_path: Path) -> None:
    host = Host(tmp_path, kvm=VmmTimeout("the guest did not reach user space within 10 s"))
    report = await host.probe()
    assert chosen(report) == "tcg"
    assert "qemu + kvm: no: the guest did not reach user space" in report.explain()
    assert host.limits == [LIMIT_S["kvm"], LIMIT_S["tcg"]]
    assert not list((tmp_path / "run").iterdir()), "the probe's runtime directories are gone"


async def test_without_the_device_kvm_is_not_tried(tmp_path: Path, kvm_device: Callable[[bool], None]) -> None:
    kvm_device(False)
    host = Host(tmp_path)
    assert chosen(await host.probe()) == "tcg"
    assert host.tried == ["tcg"]


async def test_firecracker_is_listed_as_absent(tmp_path: Path) -> None:
    report = await Host(tmp_path).probe()
    assert report.verdicts[0].driver == "firecracker"
    assert not report.verdicts[0].works
    assert "no firecracker driver" in report.verdicts[0].reason


async def test_verdicts_are_kept_for_the_same_host_and_asked_again_on_another(tmp_path: Path) -> None:
    host = Host(tmp_path, kvm=VmmError("no"))
    await host.probe()
    again = await host.probe()
    assert host.tried == ["kvm", "tcg"]
    assert all(v.cached for v in again.verdicts[1:])
    await host.probe("host 2")
    assert host.tried == ["kvm", "tcg", "kvm", "tcg"]


async def test_a_failure_is_asked_again_after_a_day_and_a_success_is_not(tmp_path: Path) -> None:
    host = Host(tmp_path, kvm=VmmError("busy"))
    await host.probe()
    host.now += FAILURE_KEPT_S
    host.errors = {}
    assert chosen(await host.probe()) == "kvm"
    assert host.tried == ["kvm", "tcg", "kvm"]
    host.now += 100 * FAILURE_KEPT_S
    assert chosen(await host.probe()) == "kvm"
    assert host.tried == ["kvm", "tcg", "kvm"]


async def test_a_clock_set_back_does_not_keep_a_failure_for_ever(tmp_path: Path) -> None:
    host = Host(tmp_path, kvm=VmmError("busy"))
    await host.probe()
    host.now -= 10.0
    await host.probe()
    assert host.tried == ["kvm", "tcg", "kvm"]


async def test_nothing_works_is_a_report_without_a_choice_and_emulation_is_never_given_up(tmp_path: Path) -> None:
    host = Host(tmp_path, kvm=VmmError("a"), tcg=VmmError("b"))
    report = await host.probe()
    assert report.chosen is None
    assert "b" in report.explain()
    await host.probe()
    assert host.tried == ["kvm", "tcg", "tcg"]


async def test_the_configuration_narrows_the_candidates(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert chosen(await host.probe(accelerator="tcg")) == "tcg"
    assert host.tried == ["tcg"]
    assert (await host.probe(driver="firecracker", accelerator="auto")).chosen is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"identity": "host 1", "verdicts": [{"x": 1}]}'])
async def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/vmm-probe.json").write_text(content)
    assert chosen(await Host(tmp_path).probe()) == "kvm"
