"""Every transition of a sandbox, in one table. A pair that is not listed is refused with the sandbox's history.

Owns: which event is legal in which phase, what phase follows, what the owner task must do. Does not own: how anything
is done, time, I/O. The diagram in ARCHITECTURE.md is generated from this table (`lifecycle.diagram`).

Rules that shape the table:

- KILL is legal in every phase and never waits.
- A resume while the capture of a pause runs cancels the capture and lets the held VMM go on over the same upper, so
  quick pause and resume cycles do not lengthen the chain. Once captured, it waits for the commit (milliseconds).
- A failed pause leaves the sandbox running; a failed resume leaves it paused; only a lost VMM ends it.
- Paused time does not count: EXPIRE_* is meaningful only while running, and is refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from agentenv.lifecycle.phases import Action, Denial, Event, Phase, Verdict
from agentenv.model import SandboxState


@dataclass(frozen=True, slots=True)
class Transition:
    """One row: the phase that follows and the actions to carry out, or what becomes of a request."""

    phase: Phase
    actions: tuple[Action, ...] = ()
    verdict: Verdict = Verdict.ACCEPT
    denial: Denial | None = None


PUBLIC_STATE: Final[Mapping[Phase, SandboxState]] = MappingProxyType(
    {
        Phase.WARMING: SandboxState.CREATING,
        Phase.WARM: SandboxState.CREATING,
        Phase.CREATING: SandboxState.CREATING,
        Phase.RUNNING: SandboxState.RUNNING,
        Phase.PAUSING: SandboxState.PAUSING,
        Phase.HELD_CAPTURING: SandboxState.PAUSED,
        Phase.HELD_CAPTURED: SandboxState.PAUSED,
        Phase.HELD_WAITING: SandboxState.PAUSED,
        Phase.LINGERING: SandboxState.PAUSED,
        Phase.PAUSED: SandboxState.PAUSED,
        Phase.RESUMING_HELD: SandboxState.RESUMING,
        Phase.RESUMING_LINGERED: SandboxState.RESUMING,
        Phase.RESUMING: SandboxState.RESUMING,
        Phase.SNAPSHOTTING: SandboxState.SNAPSHOTTING,
        Phase.FORKING: SandboxState.FORKING,
        Phase.KILLING: SandboxState.KILLING,
        Phase.GONE: SandboxState.KILLING,
    }
)

# Phases in which the sandbox's VMM process exists, so that its death is an event.
WITH_VMM: Final = frozenset(
    {
        Phase.WARMING,
        Phase.WARM,
        Phase.CREATING,
        Phase.RUNNING,
        Phase.PAUSING,
        Phase.HELD_CAPTURING,
        Phase.HELD_CAPTURED,
        Phase.HELD_WAITING,
        Phase.LINGERING,
        Phase.RESUMING_HELD,
        Phase.RESUMING_LINGERED,
        Phase.RESUMING,
        Phase.SNAPSHOTTING,
        Phase.FORKING,
    }
)

# Clones that wait to become somebody's: not shown, not billed, not worth keeping over a restart.
POOLED: Final = frozenset({Phase.WARMING, Phase.WARM})

# Phases in which traffic may reach the guest.
SERVING: Final = frozenset({Phase.RUNNING, Phase.SNAPSHOTTING, Phase.FORKING})

_END: Final = (Action.CANCEL_WORK, Action.WITHDRAW, Action.TEAR_DOWN)

_Table = dict[tuple[Phase, Event], Transition]


def _requests(table: _Table, phase: Phase, verdict: Verdict, *events: Event) -> None:
    for event in events:
        table[phase, event] = Transition(phase, verdict=verdict)


def _deny(table: _Table, phase: Phase, denial: Denial, *events: Event) -> None:
    for event in events:
        table[phase, event] = Transition(phase, verdict=Verdict.DENY, denial=denial)


def _add_common(table: _Table) -> None:
    """Kill, expiry and the death of the VMM, which look alike in most phases."""
    for phase in Phase:
        if phase not in {Phase.KILLING, Phase.GONE}:
            table[phase, Event.KILL] = Transition(Phase.KILLING, _END)
        _deny(table, phase, Denial.NOT_EXPIRED, Event.EXPIRE_PAUSE, Event.EXPIRE_KILL)
    for phase in WITH_VMM:
        table[phase, Event.VMM_EXITED] = Transition(Phase.KILLING, _END)


def _add_pooled(table: _Table) -> None:
    for phase in Phase:
        _deny(table, phase, Denial.NOT_WARM, Event.CLAIM)
    for phase in POOLED:
        _deny(table, phase, Denial.NOT_RUNNING, Event.PAUSE, Event.RESUME, Event.SNAPSHOT, Event.FORK)
    table[Phase.WARMING, Event.WARMED] = Transition(Phase.WARM)
    table[Phase.WARMING, Event.START_FAILED] = Transition(Phase.KILLING, _END)
    table[Phase.WARM, Event.CLAIM] = Transition(Phase.CREATING, (Action.PERSONALISE,))


def _add_running(table: _Table) -> None:
    running = Phase.RUNNING
    table[running, Event.PAUSE] = Transition(Phase.PAUSING, (Action.HOLD,))
    table[running, Event.EXPIRE_PAUSE] = Transition(Phase.PAUSING, (Action.HOLD,))
    table[running, Event.EXPIRE_KILL] = Transition(Phase.KILLING, _END)
    table[running, Event.SNAPSHOT] = Transition(Phase.SNAPSHOTTING, (Action.TAKE_SNAPSHOT,))
    table[running, Event.FORK] = Transition(Phase.FORKING, (Action.TAKE_FORK,))
    _requests(table, running, Verdict.DONE, Event.RESUME)


def _add_transient(table: _Table) -> None:
    """Phases in which one operation runs: requests join it or wait for it."""
    busy = (Event.PAUSE, Event.RESUME, Event.SNAPSHOT, Event.FORK)
    resuming = (Phase.RESUMING_HELD, Phase.RESUMING_LINGERED, Phase.RESUMING)
    for phase in (Phase.CREATING, Phase.PAUSING, *resuming):
        _requests(table, phase, Verdict.WAIT, *busy)
    for phase in (Phase.SNAPSHOTTING, Phase.FORKING):
        _requests(table, phase, Verdict.WAIT, Event.PAUSE, Event.SNAPSHOT, Event.FORK)
        _requests(table, phase, Verdict.DONE, Event.RESUME)
        table[phase, Event.SOURCE_LOST] = Transition(Phase.KILLING, _END)
    for phase in resuming:
        _requests(table, phase, Verdict.JOIN, Event.RESUME)
        table[phase, Event.RESUMED] = Transition(Phase.RUNNING)
    _requests(table, Phase.PAUSING, Verdict.JOIN, Event.PAUSE)
    table[Phase.CREATING, Event.STARTED] = Transition(Phase.RUNNING)
    table[Phase.CREATING, Event.START_FAILED] = Transition(Phase.KILLING, _END)
    table[Phase.PAUSING, Event.HELD] = Transition(Phase.HELD_CAPTURING, (Action.CAPTURE,))
    table[Phase.PAUSING, Event.PAUSE_UNDONE] = Transition(Phase.RUNNING)
    table[Phase.PAUSING, Event.SOURCE_LOST] = Transition(Phase.KILLING, _END)
    # A held VMM that does not go on is beyond help: its memory was never captured.
    table[Phase.RESUMING_HELD, Event.SOURCE_LOST] = Transition(Phase.KILLING, _END)
    # It went on, but its daemon never answered: it is halted again and stays held.
    table[Phase.RESUMING_HELD, Event.RESUME_UNDONE] = Transition(Phase.HELD_WAITING, (Action.RETRY_CAPTURE_LATER,))
    table[Phase.RESUMING, Event.RESUME_UNDONE] = Transition(Phase.PAUSED)
    table[Phase.SNAPSHOTTING, Event.SNAPSHOT_ENDED] = Transition(Phase.RUNNING)
    table[Phase.FORKING, Event.FORK_ENDED] = Transition(Phase.RUNNING)
    # A restore that dies takes nothing with it: the durable pause is untouched.
    del table[Phase.RESUMING, Event.VMM_EXITED]


def _add_paused(table: _Table) -> None:
    held = (Phase.HELD_CAPTURING, Phase.HELD_CAPTURED, Phase.HELD_WAITING)
    for phase in (*held, Phase.LINGERING, Phase.PAUSED):
        _deny(table, phase, Denial.ALREADY_PAUSED, Event.PAUSE)
        _deny(table, phase, Denial.NOT_RUNNING, Event.FORK)
    for phase in held:
        _requests(table, phase, Verdict.WAIT, Event.SNAPSHOT)
    go_on = (Action.CANCEL_WORK, Action.CONTINUE_HELD)
    table[Phase.HELD_CAPTURING, Event.RESUME] = Transition(Phase.RESUMING_HELD, go_on)
    table[Phase.HELD_WAITING, Event.RESUME] = Transition(Phase.RESUMING_HELD, go_on)
    _requests(table, Phase.HELD_CAPTURED, Verdict.WAIT, Event.RESUME)
    table[Phase.HELD_CAPTURING, Event.CAPTURED] = Transition(Phase.HELD_CAPTURED, (Action.COMMIT_PAUSE,))
    table[Phase.HELD_CAPTURING, Event.CAPTURE_FAILED] = Transition(Phase.HELD_WAITING, (Action.RETRY_CAPTURE_LATER,))
    table[Phase.HELD_CAPTURED, Event.COMMITTED] = Transition(Phase.LINGERING, (Action.LINGER,))
    table[Phase.HELD_CAPTURED, Event.COMMIT_FAILED] = Transition(Phase.HELD_WAITING, (Action.RETRY_CAPTURE_LATER,))
    table[Phase.HELD_WAITING, Event.RETRY_DUE] = Transition(Phase.HELD_CAPTURING, (Action.CAPTURE,))
    _add_lingering(table)
    table[Phase.PAUSED, Event.RESUME] = Transition(Phase.RESUMING, (Action.RESTORE,))
    table[Phase.PAUSED, Event.SNAPSHOT] = Transition(Phase.PAUSED, (Action.COPY_PAUSE,))


def _add_lingering(table: _Table) -> None:
    """The pause is durable: whatever becomes of the VMM that is still there, the sandbox is paused."""
    release = Transition(Phase.PAUSED, (Action.CANCEL_WORK, Action.RELEASE_VMM))
    lingering, resuming = Phase.LINGERING, Phase.RESUMING_LINGERED
    table[lingering, Event.LINGERED] = Transition(Phase.PAUSED, (Action.RELEASE_VMM,))
    table[lingering, Event.VMM_EXITED] = release
    table[lingering, Event.RESUME] = Transition(resuming, (Action.CANCEL_WORK, Action.CONTINUE_HELD))
    snapshot = (Action.CANCEL_WORK, Action.RELEASE_VMM, Action.COPY_PAUSE)
    table[lingering, Event.SNAPSHOT] = Transition(Phase.PAUSED, snapshot)
    table[resuming, Event.RESUME_UNDONE] = Transition(Phase.PAUSED, (Action.RELEASE_VMM,))
    table[resuming, Event.VMM_EXITED] = release


def _add_ending(table: _Table) -> None:
    requests = (Event.PAUSE, Event.RESUME, Event.SNAPSHOT, Event.FORK)
    _deny(table, Phase.KILLING, Denial.ENDED, *requests)
    _deny(table, Phase.GONE, Denial.ENDED, *requests, Event.KILL)
    _requests(table, Phase.KILLING, Verdict.JOIN, Event.KILL)
    table[Phase.KILLING, Event.TORN_DOWN] = Transition(Phase.GONE)


def _build() -> Mapping[tuple[Phase, Event], Transition]:
    table: _Table = {}
    for add in (_add_common, _add_pooled, _add_running, _add_transient, _add_paused, _add_ending):
        add(table)
    return MappingProxyType(table)


TABLE: Final = _build()
