"""Time as a value that is passed in: wall time for what users see, monotonic time for durations and deadlines.

Owns reading the clock and nothing else; waiting belongs to asyncio. Everything that computes with time takes a
`Clock`, so that tests decide what time it is. The pure packages (`lifecycle`, `routing`) take numbers instead.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks. They run at the same rate, but only the wall clock can jump."""

    def wall(self) -> float:
        """Unix seconds (UTC). May jump when the host's clock is set; never compute a duration from it."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary instant; never goes back."""


class RealClock:
    """The host's clocks."""

    def wall(self) -> float:
        """See `Clock.wall`."""
        return time.time()

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()


class FakeClock:
    """A clock that moves only when told to; ships with the package because every fake node needs one."""

    def __init__(self, wall: float = 1_800_000_000.0, monotonic: float = 1_000.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def wall(self) -> float:
        """See `Clock.wall`."""
        return self._wall

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass on both clocks. Raises `ValueError` for a negative step: use `jump_wall` for that."""
        if seconds < 0:
            raise ValueError("time does not go back; jump_wall() sets the wall clock alone")
        self._wall += seconds
        self._monotonic += seconds

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back by `seconds`, as an administrator or NTP would."""
        self._wall += seconds
