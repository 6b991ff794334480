"""What keeps a device state from loading here."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from agentenv.model import MachineFingerprint
from agentenv.vmm._fingerprint import differences

HAS = MachineFingerprint("qemu", "tcg", "7.2.22", "max", "6.12-abc", 2_600_000, "cafe")


def test_equal_fingerprints_have_no_differences() -> None:
    assert differences(HAS, HAS) == []


@pytest.mark.parametrize("name", [f.name for f in fields(MachineFingerprint) if f.name not in ("kernel", "tsc_khz")])
def test_each_differing_field_is_named_with_both_values(name: str) -> None:
    (clause,) = differences(replace(HAS, **{name: "other"}), HAS)
    assert clause == f"it needs {name} 'other', this node has {getattr(HAS, name)!r}"


def test_all_differences_are_listed_at_once() -> None:
    assert len(differences(replace(HAS, driver="firecracker", accelerator="kvm", tsc_khz=1), HAS)) == 3


def test_a_newer_guest_kernel_on_the_node_does_not_matter_to_a_guest_that_has_its_own() -> None:
    assert differences(replace(HAS, kernel="6.12-old"), HAS) == []


def test_the_clock_may_differ_by_what_a_calibration_differs() -> None:
    assert differences(replace(HAS, tsc_khz=2_600_600), HAS) == []
    assert len(differences(replace(HAS, tsc_khz=2_601_000), HAS)) == 1
