"""The vocabulary of the lifecycle: phases, events, actions, verdicts. Values only."""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """Where a sandbox is. The public `SandboxState` is coarser (`PUBLIC_STATE` in the table)."""

    # Nobody's yet: restored, answered once, halted; CLAIM makes it somebody's.
    WARMING = "warming"
    WARM = "warm"
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    # Held: the stopped VMM has the memory. It survives the death of any one process, not a power loss.
    HELD_CAPTURING = "held_capturing"
    HELD_CAPTURED = "held_captured"
    # The capture failed (disk full, I/O error): still held, tried again later.
    HELD_WAITING = "held_waiting"
    # Durable already, and the stopped VMM is kept a little longer, because a resume often comes soon.
    LINGERING = "lingering"
    # Durable: everything is fsynced in the repository and no VMM exists.
    PAUSED = "paused"
    RESUMING_HELD = "resuming_held"
    RESUMING_LINGERED = "resuming_lingered"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    KILLING = "killing"
    GONE = "gone"


class Event(enum.StrEnum):
    """What may happen to a sandbox: requests from outside, then outcomes of actions and of the world."""

    # Requests
    PAUSE = "pause"
    RESUME = "resume"
    SNAPSHOT = "snapshot"
    FORK = "fork"
    KILL = "kill"
    EXPIRE_PAUSE = "expire_pause"
    EXPIRE_KILL = "expire_kill"
    CLAIM = "claim"
    # Outcomes of actions
    WARMED = "warmed"
    STARTED = "started"
    START_FAILED = "start_failed"
    HELD = "held"
    PAUSE_UNDONE = "pause_undone"
    CAPTURED = "captured"
    CAPTURE_FAILED = "capture_failed"
    RETRY_DUE = "retry_due"
    COMMITTED = "committed"
    COMMIT_FAILED = "commit_failed"
    LINGERED = "lingered"
    RESUMED = "resumed"
    RESUME_UNDONE = "resume_undone"
    SNAPSHOT_ENDED = "snapshot_ended"
    FORK_ENDED = "fork_ended"
    SOURCE_LOST = "source_lost"
    TORN_DOWN = "torn_down"
    # Of the world
    VMM_EXITED = "vmm_exited"


REQUESTS = frozenset(
    {
        Event.PAUSE,
        Event.RESUME,
        Event.SNAPSHOT,
        Event.FORK,
        Event.KILL,
        Event.EXPIRE_PAUSE,
        Event.EXPIRE_KILL,
        Event.CLAIM,
    }
)


class Action(enum.StrEnum):
    """What the owner task must do, in the order given. Each is one function of `node.steps`."""

    # Ends whatever operation still runs for this sandbox; it undoes nothing but itself.
    CANCEL_WORK = "cancel_work"
    # The proxy forgets the generation and resets its streams.
    WITHDRAW = "withdraw"
    START = "start"
    WARM_UP = "warm_up"
    PERSONALISE = "personalise"
    HOLD = "hold"
    CAPTURE = "capture"
    COMMIT_PAUSE = "commit_pause"
    LINGER = "linger"
    RELEASE_VMM = "release_vmm"
    RETRY_CAPTURE_LATER = "retry_capture_later"
    CONTINUE_HELD = "continue_held"
    RESTORE = "restore"
    TAKE_SNAPSHOT = "take_snapshot"
    COPY_PAUSE = "copy_pause"
    TAKE_FORK = "take_fork"
    TEAR_DOWN = "tear_down"


class Verdict(enum.StrEnum):
    """What becomes of a request when it arrives."""

    # It starts the work; the requester waits for the outcome.
    ACCEPT = "accept"
    # The same work already runs; the requester waits for its outcome.
    JOIN = "join"
    # It is offered again at the next change of phase.
    WAIT = "wait"
    # There is nothing to do.
    DONE = "done"
    DENY = "deny"


class Denial(enum.StrEnum):
    """Why a request is denied."""

    ALREADY_PAUSED = "the sandbox is already paused"
    NOT_RUNNING = "the sandbox is paused; resume it first"
    ENDED = "the sandbox has ended"
    NOT_WARM = "the clone is somebody's already"
    NOT_EXPIRED = "only running time counts against the time to live"
