"""A host without a kernel, for tests of the pool, the node and the API. Keeps the promises of `SlotHost` in memory.

`fail` and `hold` are how a test makes a step fail or take long; `held_taps` plays the VMMs.
"""

from __future__ import annotations

import threading
from ipaddress import IPv4Network

from agentenv.errors import NetworkError
from agentenv.model import NetworkPolicy
from agentenv.network.pool import SlotPool
from agentenv.network.settings import DEFAULT_SUBNET, PoolSettings
from agentenv.network.slot import Slot, SlotPlan

_HOLD_DEADLINE_S = 10.0
_CLOSED = NetworkPolicy(allow_internet=False)


class FakeSlotHost:
    """Slots are entries of `policies`: index -> policy in force. They survive the pool, as real ones do."""

    def __init__(self, block: IPv4Network = DEFAULT_SUBNET, dns: tuple[str, ...] = ("1.1.1.1",)) -> None:
        self._plan = SlotPlan("fa4e00", block, dns)
        self.policies: dict[int, NetworkPolicy] = {}
        self.broken: set[int] = set()
        self.held_taps: set[int] = set()
        self.calls: list[tuple[str, int]] = []
        self.fail: set[str] = set()
        self._hold: dict[str, threading.Event] = {}
        self._entered: dict[str, threading.Event] = {}
        self.is_held_by_node = False

    def hold(self, call: str) -> threading.Event:
        """Calls of this name wait until the event is set (or 10 s, so that a failing test ends)."""
        return self._hold.setdefault(call, threading.Event())

    def entered(self, call: str) -> threading.Event:
        """Set as soon as a call of this name has begun."""
        return self._entered.setdefault(call, threading.Event())

    def _enter(self, call: str, index: int) -> None:
        self.calls.append((call, index))
        self.entered(call).set()
        if (event := self._hold.get(call)) is not None:
            event.wait(_HOLD_DEADLINE_S)
        if call in self.fail:
            raise NetworkError(f"cannot {call} slot {index}: the test says so")

    def prepare(self) -> None:
        self.is_held_by_node = True

    def existing(self) -> set[int]:
        return set(self.policies) | self.broken

    def slot(self, index: int) -> Slot:
        return self._plan.slot(index)

    def create(self, index: int) -> None:
        self._enter("create", index)
        if index in self.policies:
            raise NetworkError(f"cannot create slot {index}: it exists")
        self.policies[index] = _CLOSED

    def is_whole(self, index: int) -> bool:
        return index in self.policies

    def set_policy(self, index: int, policy: NetworkPolicy) -> None:
        self._enter("set_policy", index)
        if index not in self.policies:
            raise NetworkError(f"cannot set the policy of slot {index}: there is none")
        self.policies[index] = policy

    def reset(self, index: int) -> bool:
        self._enter("reset", index)
        if index in self.held_taps:
            return False
        if index not in self.policies:
            raise NetworkError(f"cannot reset slot {index}: there is none")
        self.policies[index] = _CLOSED
        return True

    def remove(self, index: int) -> None:
        self._enter("remove", index)
        self.policies.pop(index, None)
        self.broken.discard(index)

    def release(self) -> None:
        self.is_held_by_node = False


def fake_pool(settings: PoolSettings | None = None) -> SlotPool:
    """A pool over a fake host, for tests that need some network and look at none."""
    return SlotPool(FakeSlotHost(), settings)
