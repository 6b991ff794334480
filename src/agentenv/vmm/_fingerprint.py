"""Compares what a snapshot needs with what a driver has. Pure."""

from __future__ import annotations

from dataclasses import asdict

from agentenv.model import MachineFingerprint

# The tolerance that KVM itself has for a guest's clock (`tsc_tolerance_ppm`): a host calibrates anew at each boot and
# finds a value that differs by some parts in a million.
TSC_TOLERANCE_PPM = 250
# A restored guest has its kernel and its daemon in memory: the node's newer ones do not matter to it.
NOT_COMPARED = frozenset({"kernel"})


def differences(needs: MachineFingerprint, has: MachineFingerprint) -> list[str]:
    """One clause per field that keeps a device state from loading, with both values; empty when it may be tried."""
    needed, present = asdict(needs), asdict(has)
    return [
        f"it needs {name} {needed[name]!r}, this node has {present[name]!r}"
        for name in needed
        if name not in NOT_COMPARED and not _equal(name, needed[name], present[name])
    ]


def _equal(name: str, needed: object, present: object) -> bool:
    if name == "tsc_khz" and isinstance(needed, int) and isinstance(present, int):
        return abs(needed - present) * 1_000_000 <= needed * TSC_TOLERANCE_PPM
    return needed == present
