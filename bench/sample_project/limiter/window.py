"""Allows at most `limit` calls within any `window_s` seconds."""

from collections import deque


class SlidingWindow:
    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._calls: deque[float] = deque()

    def allow(self, now: float) -> bool:
        """Whether a call at `now` (seconds, never going back) is allowed; an allowed call counts."""
        while self._calls and now - self._calls[0] > self._window_s:
            self._calls.popleft()
        if len(self._calls) > self._limit:
            return False
        self._calls.append(now)
        return True
