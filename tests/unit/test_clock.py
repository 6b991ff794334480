"""The fake clock moves only when told to."""

from __future__ import annotations

import pytest

from agentenv.clock import FakeClock, RealClock


def test_the_fake_clock_stands_still_until_it_is_moved() -> None:
    clock = FakeClock(wall=100.0, monotonic=5.0)
    clock.advance(2.5)
    assert (clock.wall(), clock.monotonic()) == (102.5, 7.5)
    clock.jump_wall(-50)
    assert (clock.wall(), clock.monotonic()) == (52.5, 7.5)
    with pytest.raises(ValueError, match="jump_wall"):
        clock.advance(-1)


def test_the_real_clock_never_goes_back() -> None:
    clock = RealClock()
    first = clock.monotonic()
    assert clock.monotonic() >= first
    assert clock.wall() > 1_700_000_000
