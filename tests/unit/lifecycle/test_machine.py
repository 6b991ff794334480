"""The lifecycle table: what is listed, what is refused, and that random histories stay inside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.lifecycle import (
    PUBLIC_STATE,
    REQUESTS,
    TABLE,
    Action,
    Denial,
    Event,
    InvalidTransition,
    Machine,
    Phase,
    Verdict,
)
from agentenv.lifecycle.diagram import mermaid


def run(phase: Phase, *events: Event) -> Machine:
    machine = Machine("i1", phase)
    for event in events:
        machine.handle(event)
    return machine


def test_every_request_has_an_answer_in_every_phase() -> None:
    missing = [(p, e) for p in Phase for e in REQUESTS if (p, e) not in TABLE]
    assert missing == []


def test_every_phase_has_a_public_state() -> None:
    assert set(PUBLIC_STATE) == set(Phase)


def test_kill_is_accepted_in_every_phase_that_is_not_ending() -> None:
    for phase in Phase:
        row = TABLE[phase, Event.KILL]
        if phase is Phase.KILLING:
            assert row.verdict is Verdict.JOIN
        elif phase is Phase.GONE:
            assert row.denial is Denial.ENDED
        else:
            assert row.phase is Phase.KILLING
            assert row.actions == (Action.CANCEL_WORK, Action.WITHDRAW, Action.TEAR_DOWN)


def test_a_pause_passes_through_held_to_durable_and_releases_the_vmm_last() -> None:
    machine = run(Phase.RUNNING, Event.PAUSE, Event.HELD, Event.CAPTURED, Event.COMMITTED)
    row = machine.handle(Event.LINGERED)
    assert machine.phase is Phase.PAUSED
    assert row.actions == (Action.RELEASE_VMM,)


def test_a_second_pause_joins_the_first_and_a_later_one_is_denied() -> None:
    machine = run(Phase.RUNNING, Event.PAUSE)
    assert machine.handle(Event.PAUSE).verdict is Verdict.JOIN
    machine.handle(Event.HELD)
    assert machine.handle(Event.PAUSE).denial is Denial.ALREADY_PAUSED


def test_resume_during_capture_cancels_it_and_continues_the_held_vmm() -> None:
    machine = run(Phase.RUNNING, Event.PAUSE, Event.HELD)
    row = machine.handle(Event.RESUME)
    assert row.actions == (Action.CANCEL_WORK, Action.CONTINUE_HELD)
    assert machine.phase is Phase.RESUMING_HELD


def test_resume_after_capture_waits_for_the_commit() -> None:
    machine = run(Phase.RUNNING, Event.PAUSE, Event.HELD, Event.CAPTURED)
    assert machine.handle(Event.RESUME).verdict is Verdict.WAIT
    assert machine.phase is Phase.HELD_CAPTURED


def test_a_failed_pause_leaves_the_sandbox_running() -> None:
    assert run(Phase.RUNNING, Event.PAUSE, Event.PAUSE_UNDONE).phase is Phase.RUNNING


def test_a_failed_restore_leaves_the_sandbox_paused_even_when_the_vmm_died() -> None:
    machine = run(Phase.PAUSED, Event.RESUME)
    with pytest.raises(InvalidTransition):
        machine.handle(Event.VMM_EXITED)
    assert machine.handle(Event.RESUME_UNDONE).phase is Phase.PAUSED


def test_a_capture_that_failed_is_tried_again_and_can_be_resumed_meanwhile() -> None:
    machine = run(Phase.RUNNING, Event.PAUSE, Event.HELD, Event.CAPTURE_FAILED)
    assert machine.phase is Phase.HELD_WAITING
    assert machine.can(Event.RESUME)
    assert machine.handle(Event.RETRY_DUE).actions == (Action.CAPTURE,)


def test_time_to_live_counts_only_while_running() -> None:
    for phase in Phase:
        for event in (Event.EXPIRE_PAUSE, Event.EXPIRE_KILL):
            row = TABLE[phase, event]
            assert (row.verdict is Verdict.ACCEPT) == (phase is Phase.RUNNING)


def test_an_unlisted_pair_is_refused_with_the_history() -> None:
    machine = run(Phase.RUNNING, Event.PAUSE, Event.PAUSE_UNDONE)
    with pytest.raises(InvalidTransition) as caught:
        machine.handle(Event.STARTED)
    assert caught.value.history == ("running -pause-> pausing", "pausing -pause_undone-> running")
    assert "running -pause-> pausing" in str(caught.value)
    assert machine.phase is Phase.RUNNING


@given(st.lists(st.sampled_from(list(Event)), max_size=60))
def test_random_events_never_leave_the_table(events: list[Event]) -> None:
    machine = Machine("i1", Phase.CREATING)
    for event in events:
        before = machine.phase
        try:
            row = machine.handle(event)
        except InvalidTransition as refused:
            assert (before, event) not in TABLE
            assert machine.phase is before
            assert refused.phase is before
            assert refused.event is event
        else:
            expected = row.phase if row.verdict is Verdict.ACCEPT else before
            assert machine.phase is expected
            assert (row.verdict is Verdict.DENY) == (row.denial is not None)
        if before is Phase.GONE:
            assert machine.phase is Phase.GONE


@given(st.lists(st.sampled_from(list(Event)), max_size=60))
def test_after_kill_only_the_end_follows(events: list[Event]) -> None:
    machine = Machine("i1", Phase.RUNNING)
    machine.handle(Event.KILL)
    for event in events:
        if machine.can(event):
            machine.handle(event)
        assert machine.phase in {Phase.KILLING, Phase.GONE}


def test_the_diagram_names_every_phase() -> None:
    text = mermaid()
    assert all(phase.value in text for phase in Phase if phase is not Phase.KILLING)


def test_a_warm_clone_can_be_claimed_once_and_does_nothing_else() -> None:
    machine = run(Phase.WARMING, Event.WARMED)
    assert machine.handle(Event.PAUSE).verdict is Verdict.DENY
    assert machine.handle(Event.CLAIM).actions == (Action.PERSONALISE,)
    assert machine.handle(Event.CLAIM).denial is Denial.NOT_WARM
    assert machine.handle(Event.STARTED).phase is Phase.RUNNING


def test_a_lingering_vmm_may_go_on_and_its_death_loses_nothing() -> None:
    paused = (Event.PAUSE, Event.HELD, Event.CAPTURED, Event.COMMITTED)
    machine = run(Phase.RUNNING, *paused, Event.RESUME)
    assert machine.phase is Phase.RESUMING_LINGERED
    assert machine.handle(Event.RESUMED).phase is Phase.RUNNING
    assert run(Phase.RUNNING, *paused, Event.VMM_EXITED).phase is Phase.PAUSED
    assert run(Phase.RUNNING, *paused, Event.RESUME, Event.VMM_EXITED).phase is Phase.PAUSED
