"""Which function carries out which action of the lifecycle table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agentenv.lifecycle import Action
from agentenv.node import branching, ending, pausing, starting
from agentenv.node.owner import Step

STEPS: Final[Mapping[Action, Step]] = MappingProxyType(
    {
        Action.START: starting.start,
        Action.WARM_UP: starting.warm_up,
        Action.PERSONALISE: starting.personalise,
        Action.RESTORE: starting.restore,
        Action.CONTINUE_HELD: starting.continue_held,
        Action.HOLD: pausing.hold,
        Action.CAPTURE: pausing.capture,
        Action.COMMIT_PAUSE: pausing.commit_pause,
        Action.LINGER: pausing.linger,
        Action.RELEASE_VMM: pausing.release_vmm,
        Action.RETRY_CAPTURE_LATER: pausing.retry_capture_later,
        Action.TAKE_SNAPSHOT: branching.take_snapshot,
        Action.COPY_PAUSE: branching.copy_pause,
        Action.TAKE_FORK: branching.take_fork,
        Action.WITHDRAW: ending.withdraw,
        Action.TEAR_DOWN: ending.tear_down,
    }
)
