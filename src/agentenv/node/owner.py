"""The owner of one sandbox: it alone changes the sandbox's record, and carries out what the lifecycle table says.

Requests are accepted, joined, made to wait or denied the moment they arrive (`offer` is synchronous); accepted ones
start *work*, one task at a time. A requester that goes away cancels nothing: the work belongs to the owner. Does not
own how a step is done (`starting`, `pausing`, `branching`, `ending`), nor which transitions exist (`lifecycle`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentenv.errors import AenvError, Conflict, OperationFailed, SandboxNotFound
from agentenv.lifecycle import PUBLIC_STATE, TABLE, WITH_VMM, Action, Denial, Event, Machine, Phase, Verdict
from agentenv.model import ExpiryAction, MemoryStack, SandboxState, Tombstone
from agentenv.network import Slot
from agentenv.node.host import Host
from agentenv.node.record import SandboxRecord, memory_export_name
from agentenv.vmm import Vmm

log = logging.getLogger(__name__)

# Requests of one sandbox that may wait for a better phase; beyond it a caller is told to come back.
WAITING_MAX: Final = 64
# The old VMM's process may sit in a page fault of a stuck store; a resume does not wait for that for ever.
PREVIOUS_WORK_S_MAX: Final = 30.0
# A failed read of memory ends the VMM within moments; an older failure has nothing to do with its end.
STORAGE_FAILURE_AGE_MS_MAX: Final = 10_000
STORAGE_FAILURE_ASK_S_MAX: Final = 2.0

_MILD_OUTCOMES: Final = (
    Event.CAPTURE_FAILED,
    Event.COMMIT_FAILED,
    Event.RESUME_UNDONE,
    Event.SNAPSHOT_ENDED,
    Event.FORK_ENDED,
    Event.START_FAILED,
)


@dataclass(slots=True)
class Request:
    """One request and who waits for it. `params` is the step's own business."""

    event: Event
    params: Any = None
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def resolve(self, value: Any = None) -> None:
        if not self.done.done():
            self.done.set_result(value)

    def reject(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            # A requester that has gone away must not make asyncio complain about an error nobody fetched.
            self.done.exception()


@dataclass(slots=True)
class Work:
    """What is being carried out: its steps' task and the requests that wait for its outcome."""

    event: Event
    requests: list[Request]
    task: asyncio.Task[None] | None = None

    @property
    def params(self) -> Any:
        return self.requests[0].params if self.requests else None

    def resolve(self, value: Any = None) -> None:
        for request in self.requests:
            request.resolve(value)

    def reject(self, error: BaseException) -> None:
        for request in self.requests:
            request.reject(error)


# A step does one action and says what came of it; None means that the next action follows.
Step = Callable[["Owner", Work], Awaitable[Event | None]]


class Owner:
    """One sandbox. Make it with its record saved; `gone` is called once, when nothing of it is left."""

    def __init__(
        self, host: Host, record: SandboxRecord, steps: Mapping[Action, Step], gone: Callable[[Owner], None]
    ) -> None:
        self.host = host
        self.record = record
        self.vmm: Vmm | None = None
        # What the record's slot number and memory image stand for in this process.
        self.slot: Slot | None = None
        self.mapped: MemoryStack | None = None
        # The capture that blockd runs for a pause; None when it must be started (again).
        self.capture_job: str | None = None
        # Why it ends, filled in by whoever causes the end; the first one wins.
        self.end_reason: Tombstone | None = None
        self._machine = Machine(record.sandbox_id, record.phase)
        self._steps = steps
        self._gone = gone
        self._work: Work | None = None
        self._waiting: list[Request] = []
        self._timer: asyncio.TimerHandle | None = None
        self._exit_watch: asyncio.Task[None] | None = None
        self._phase_changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Owner {self.record.sandbox_id} {self._machine.phase.value}>"

    @property
    def sandbox_id(self) -> str:
        return self.record.sandbox_id

    @property
    def phase(self) -> Phase:
        return self._machine.phase

    @property
    def state(self) -> SandboxState:
        return PUBLIC_STATE[self._machine.phase]

    @property
    def history(self) -> tuple[str, ...]:
        return self._machine.history

    # Requests and outcomes

    def ask(self, event: Event, params: Any = None) -> asyncio.Future[Any]:
        """Offer a request; the future ends with its outcome, also when the caller does not wait for it."""
        request = Request(event, params)
        self._offer_request(request)
        return request.done

    def adopt_work(self, event: Event, actions: tuple[Action, ...], params: Any = None) -> asyncio.Future[Any]:
        """Start work that no transition began: the creation of a new sandbox, or what a restart finds half done."""
        request = Request(event, params)
        self._start(Work(event, [request]), actions)
        return request.done

    def offer(self, event: Event) -> None:
        """Apply an outcome, or something that happened by itself; starts the actions that follow."""
        row = self._machine.handle(event)
        if row.verdict is not Verdict.ACCEPT:
            return
        self._phase_moved()
        if row.actions:
            self._start(Work(event, []), row.actions)
        self._reoffer_waiting()

    def update(self, **changes: Any) -> None:
        """Replace fields of the record and store it. Raises `StorageFull` with the old record in place."""
        record = replace(self.record, **changes)
        self.host.database.save(record)
        self.record = record

    def update_durably(self, **changes: Any) -> None:
        """As `update`, and on the disk when it returns."""
        record = replace(self.record, **changes)
        self.host.database.save(record, durable=True)
        self.record = record

    async def settled(self, deadline_s: float) -> None:
        """Wait until no transient phase is left, at most so long."""
        transient = {SandboxState.CREATING, SandboxState.PAUSING, SandboxState.RESUMING}
        async with asyncio.timeout(deadline_s):
            while self.state in transient:
                self._phase_changed.clear()
                await self._phase_changed.wait()

    # The VMM and time

    def watch(self, vmm: Vmm) -> None:
        """Take over a VMM and learn of its death."""
        self.unwatch()
        self.vmm = vmm
        self._exit_watch = asyncio.create_task(self._wait_for_exit(vmm), name=f"exit of {self.sandbox_id}")

    def unwatch(self) -> Vmm | None:
        """Give the VMM up; its death is nobody's event any more."""
        if self._exit_watch is not None:
            self._exit_watch.cancel()
            self._exit_watch = None
        vmm, self.vmm = self.vmm, None
        return vmm

    def set_end(self, end_at: float) -> None:
        """A new end of the time to live; counts from now on if the sandbox runs."""
        self.update(end_at=end_at)
        self.arm_timer()

    def arm_timer(self) -> None:
        """(Re)start the clock of the time to live; only running time counts."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._machine.phase is Phase.RUNNING:
            left = max(0.0, self.record.end_at - self.host.clock.wall())
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)

    async def shut_down(self) -> None:
        """The server stops: end what runs here, leave the sandbox as it is. The next server goes on from the record."""
        if self._timer is not None:
            self._timer.cancel()
        work = self._work
        if work is not None and work.task is not None:
            work.task.cancel()
            await asyncio.gather(work.task, return_exceptions=True)
        vmm = self.unwatch()
        if vmm is not None:
            await vmm.close()

    # Inside

    def _offer_request(self, request: Request) -> None:
        row = self._machine.handle(request.event)
        if row.verdict is Verdict.ACCEPT:
            self._phase_moved()
            self._start(Work(request.event, [request]), row.actions)
        elif row.verdict is Verdict.JOIN and self._work is not None:
            self._work.requests.append(request)
        elif row.verdict is Verdict.DONE:
            request.resolve()
        elif row.verdict is Verdict.DENY:
            request.reject(self._denied(row.denial))
        elif len(self._waiting) >= WAITING_MAX:
            request.reject(Conflict(f"sandbox {self.sandbox_id}: {WAITING_MAX} requests are waiting already"))
        else:
            self._waiting.append(request)

    def _denied(self, denial: Denial | None) -> AenvError:
        if denial is Denial.ENDED:
            return SandboxNotFound(f"sandbox {self.sandbox_id} does not exist: it has ended")
        return Conflict(f"sandbox {self.sandbox_id}: {denial}")

    def _reoffer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            # A requester that went away while its request waited no longer wants it.
            if not request.done.done():
                self._offer_request(request)

    def _phase_moved(self) -> None:
        self.record = replace(self.record, phase=self._machine.phase)
        if self._machine.phase is not Phase.GONE:
            try:
                self.host.database.save(self.record)
            except OperationFailed as error:
                # The phase is what it is; a server that restarts now finds the one before and goes on from there.
                # Steps that must not be begun unrecorded call `update`, which raises.
                log.error("sandbox %s: phase %s is not recorded: %s", self.sandbox_id, self.phase, error)
        self._phase_changed.set()
        self.arm_timer()

    def _start(self, work: Work, actions: tuple[Action, ...]) -> None:
        previous, self._work = self._work, work
        name = f"{work.event.value} of {self.sandbox_id}"
        work.task = asyncio.create_task(self._carry_out(work, actions, previous), name=name)

    async def _carry_out(self, work: Work, actions: tuple[Action, ...], previous: Work | None) -> None:
        """Do the actions in order, then offer the outcome. The one place where a step's surprise is caught."""
        outcome: Event | None = None
        try:
            if previous is not None and actions[0] is not Action.CANCEL_WORK:
                await self._let_finish(previous)
            for action in actions:
                if action is Action.CANCEL_WORK:
                    await self._cancel(previous)
                else:
                    outcome = await self._steps[action](self, work)
        except asyncio.CancelledError:
            work.reject(self._interrupted())
            raise
        except Exception as error:
            log.exception("sandbox %s: %s failed unexpectedly; history: %s", self.sandbox_id, work.event, self.history)
            work.reject(error if isinstance(error, AenvError) else OperationFailed(f"{work.event.value} failed"))
            outcome = self._outcome_of_surprise(error)
        self._finish(work, outcome)

    def _finish(self, work: Work, outcome: Event | None) -> None:
        if self._work is work:
            self._work = None
        if outcome is not None and self._machine.can(outcome):
            self.offer(outcome)
        work.reject(OperationFailed(f"{work.event.value} of sandbox {self.sandbox_id} ended without an answer"))
        if self._machine.phase is Phase.GONE:
            self._gone(self)

    def _outcome_of_surprise(self, error: Exception) -> Event | None:
        """The mildest outcome that the phase allows: what is held stays held, what is paused stays paused."""
        mild = next((e for e in _MILD_OUTCOMES if self._machine.can(e)), None)
        if mild is None and self._machine.phase in WITH_VMM:
            self.condemn("internal_error", f"{type(error).__name__} while {self.phase.value}")
            return Event.KILL
        return mild

    async def _let_finish(self, previous: Work) -> None:
        """The release of an old VMM may still run when a resume arrives; both touch the same exports."""
        if previous.task is not None:
            done, _ = await asyncio.wait({previous.task}, timeout=PREVIOUS_WORK_S_MAX)
            if not done:
                raise OperationFailed(f"sandbox {self.sandbox_id}: {previous.event.value} has not ended yet")

    async def _cancel(self, previous: Work | None) -> None:
        if previous is None or previous.task is None:
            return
        previous.task.cancel()
        await asyncio.gather(previous.task, return_exceptions=True)
        previous.reject(self._interrupted())

    def _interrupted(self) -> AenvError:
        if self._machine.phase in {Phase.KILLING, Phase.GONE}:
            return SandboxNotFound(f"sandbox {self.sandbox_id} was killed meanwhile")
        return Conflict(f"sandbox {self.sandbox_id}: overtaken by a later request")

    def condemn(self, reason: str, detail: str = "") -> None:
        """Say why the sandbox ends; the first reason stays."""
        if self.end_reason is None:
            self.end_reason = Tombstone(self.sandbox_id, self.host.clock.wall(), reason, detail)

    async def _wait_for_exit(self, vmm: Vmm) -> None:
        how = await vmm.wait_exit()
        if self.vmm is not vmm or not self._machine.can(Event.VMM_EXITED):
            return
        if TABLE[self._machine.phase, Event.VMM_EXITED].phase is Phase.KILLING:
            detail = f"the VMM process {vmm.record.pid} ended by itself: {how}"
            failure = await self._storage_failure()
            self.condemn("storage_lost" if failure else "vmm_died", f"{failure}; {detail}" if failure else detail)
            if self.vmm is not vmm or not self._machine.can(Event.VMM_EXITED):
                return
        self.offer(Event.VMM_EXITED)

    async def _storage_failure(self) -> str:
        """What blockd said of this sandbox's memory just before; "" for nothing.

        An error on a page of memory ends the VMM (SIGBUS), and only blockd knows that it was the store's.
        """
        image = memory_export_name(self.record.memory.image_id)
        try:
            async with asyncio.timeout(STORAGE_FAILURE_ASK_S_MAX):
                exports = await self.host.block.exports()
        except (AenvError, TimeoutError):
            return ""
        failures = [export.failure for export in exports if export.name == image and export.failure is not None]
        recent = [failure for failure in failures if failure.age_ms < STORAGE_FAILURE_AGE_MS_MAX]
        return f"its memory could not be read: {recent[0].message}" if recent else ""

    def _expire(self) -> None:
        """The timer fired: look again, since the end may have moved and the phase too (both under one event loop)."""
        if self._machine.phase is not Phase.RUNNING or self.record.end_at > self.host.clock.wall():
            self.arm_timer()
            return
        if self.record.spec.on_timeout is ExpiryAction.KILL:
            self.condemn("expired", "its time to live ended and autoPause is false")
            self.offer(Event.EXPIRE_KILL)
        else:
            self.offer(Event.EXPIRE_PAUSE)
