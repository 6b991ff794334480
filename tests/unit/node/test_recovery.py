"""What a restart makes of each phase: total, and never worse than it must be."""

from __future__ import annotations

import itertools

import pytest

from agentenv.lifecycle import Action, Phase
from agentenv.node.recovery import Plan, plan

BOOLEANS = (False, True)


def test_every_phase_has_a_plan_whatever_is_found() -> None:
    for phase, alive, boot, committed in itertools.product(Phase, BOOLEANS, BOOLEANS, BOOLEANS):
        found = plan(phase, vmm_alive=alive, same_boot=boot, pause_committed=committed)
        assert found.phase in {Phase.RUNNING, Phase.PAUSED, Phase.HELD_CAPTURING, Phase.KILLING}
        assert (found.phase is Phase.KILLING) == (Action.TEAR_DOWN in found.actions) == bool(found.reason)


@pytest.mark.parametrize(
    "phase", [Phase.RUNNING, Phase.PAUSING, Phase.SNAPSHOTTING, Phase.FORKING, Phase.RESUMING_HELD]
)
def test_a_live_vmm_goes_on(phase: Phase) -> None:
    assert plan(phase, vmm_alive=True, same_boot=True, pause_committed=False) == Plan(Phase.RUNNING, go_on=True)


@pytest.mark.parametrize("phase", [Phase.HELD_CAPTURING, Phase.HELD_CAPTURED, Phase.HELD_WAITING])
def test_a_held_vmm_is_captured_again(phase: Phase) -> None:
    assert plan(phase, vmm_alive=True, same_boot=True, pause_committed=False).actions == (Action.CAPTURE,)


def test_a_committed_pause_is_paused_even_if_its_vmm_still_exists() -> None:
    found = plan(Phase.HELD_CAPTURED, vmm_alive=True, same_boot=True, pause_committed=True)
    assert found == Plan(Phase.PAUSED, (Action.RELEASE_VMM,))


def test_a_cut_short_restore_is_paused_again() -> None:
    found = plan(Phase.RESUMING, vmm_alive=True, same_boot=True, pause_committed=True)
    assert found == Plan(Phase.PAUSED, (Action.RELEASE_VMM,))


def test_a_durable_pause_survives_a_reboot_and_a_running_sandbox_says_that_it_did_not() -> None:
    assert plan(Phase.PAUSED, vmm_alive=False, same_boot=False, pause_committed=True).phase is Phase.PAUSED
    assert plan(Phase.RUNNING, vmm_alive=False, same_boot=False, pause_committed=False).reason == "host_lost"
    assert plan(Phase.RUNNING, vmm_alive=False, same_boot=True, pause_committed=False).reason == "vmm_died"


def test_a_half_made_sandbox_is_removed() -> None:
    found = plan(Phase.CREATING, vmm_alive=True, same_boot=True, pause_committed=False)
    assert found.reason == "create_failed"
