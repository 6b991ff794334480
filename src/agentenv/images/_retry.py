"""When a request to a registry is repeated, and how long it is waited before. Pure but for the sleep that is passed in.

Only what may pass by itself is repeated: 429, 5xx, time-outs and broken connections. A refusal is an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

Sleep = Callable[[float], Awaitable[None]]


class Transient(Exception):
    """An attempt failed in a way that may pass; never leaves this package."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Back-off that doubles. The deadline bounds the whole operation, waiting included."""

    attempts_max: int = 6
    first_delay_s: float = 0.5
    delay_s_max: float = 15.0
    deadline_s: float = 180.0

    def delay_s(self, failures: int, retry_after_s: float | None) -> float:
        """How long to wait after that many failures in a row; a server's own wish comes first, up to the deadline."""
        backoff = min(self.first_delay_s * 2 ** min(failures - 1, 16), self.delay_s_max)
        return backoff if retry_after_s is None else max(retry_after_s, self.first_delay_s)


def retry_after_s(value: str | None, wall_now_s: float) -> float | None:
    """The header Retry-After in seconds from now: it holds seconds or a date. None when absent or unreadable."""
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - wall_now_s)
    except (ValueError, OverflowError):
        return None
