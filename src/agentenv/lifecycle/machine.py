"""One sandbox's position in the table, with its recent history. Pure: no clock, no I/O, no asyncio."""

from __future__ import annotations

from collections import deque
from typing import Final

from agentenv.errors import AenvError
from agentenv.lifecycle.phases import Event, Phase, Verdict
from agentenv.lifecycle.table import TABLE, Transition

# Enough to see how a sandbox came into a strange phase; a bound because sandboxes live for weeks.
HISTORY_LENGTH_MAX: Final = 32


class InvalidTransition(AenvError):
    """An event that the table does not list for this phase: a bug of ours, told with the recent history."""

    def __init__(self, sandbox_id: str, phase: Phase, event: Event, history: tuple[str, ...]) -> None:
        self.phase = phase
        self.event = event
        self.history = history
        trail = ", ".join(history) or "nothing"
        super().__init__(f"sandbox {sandbox_id}: {event} is not possible while {phase}; before: {trail}")


class Machine:
    """The state of one sandbox. `handle` is the only mutator."""

    def __init__(self, sandbox_id: str, phase: Phase) -> None:
        self._sandbox_id = sandbox_id
        self._phase = phase
        self._history: deque[str] = deque(maxlen=HISTORY_LENGTH_MAX)

    def __repr__(self) -> str:
        return f"<Machine {self._sandbox_id} {self._phase.value}>"

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def history(self) -> tuple[str, ...]:
        """The last transitions, oldest first, as `phase -event-> phase`."""
        return tuple(self._history)

    def can(self, event: Event) -> bool:
        """Whether the table lists this event for the present phase."""
        return (self._phase, event) in TABLE

    def handle(self, event: Event) -> Transition:
        """Apply one event. A request that is joined, denied or must wait leaves the phase as it is.

        Raises `InvalidTransition` for an unlisted pair; the phase is unchanged then.
        """
        row = TABLE.get((self._phase, event))
        if row is None:
            raise InvalidTransition(self._sandbox_id, self._phase, event, self.history)
        if row.verdict is Verdict.ACCEPT:
            self._history.append(f"{self._phase.value} -{event.value}-> {row.phase.value}")
            self._phase = row.phase
        return row
