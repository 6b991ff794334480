"""A sweep beside commits and holds of another node, step by step in many orders: nothing that is needed is deleted.

Orders with few switches are tried exhaustively, since that is where such faults are; others at random.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.unit.snapshots.lossy_files import Unsynced
from tests.unit.snapshots.repository_world import Node, content_ids
from tests.unit.snapshots.step_world import SteppedStore, Steps

from agentenv.clock import FakeClock
from agentenv.errors import Conflict, StoreUnavailable, TemplateNotFound
from agentenv.snapshots import MemoryStore, ids_of
from agentenv.snapshots import holds as holds_module
from agentenv.snapshots.gclock import LOCK_S

Choose = Callable[[Sequence[str]], str]


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a small file at once instead of in a thread: an order of steps is then the same every time."""

    async def at_once(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return work(*arguments, **named)

    monkeypatch.setattr(asyncio, "to_thread", at_once)


class Race:
    """A committing node and a sweeping one over one store, in which a base lies that nothing needs any more."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.steps = Steps(self.clock)
        self.stores = {name: SteppedStore(self.steps, name, self.store) for name in ("committer", "sweeper")}
        self.nodes = {
            name: Node(name, store, tmp_path / name, self.steps.timing(name), Unsynced())
            for name, store in self.stores.items()
        }
        self.contents = itertools.count()

    def stepped(self, on: bool) -> None:
        for store in self.stores.values():
            store.is_stepped = on

    async def set_up(self) -> None:
        """The garbage is what the commit is about to make again: equal bytes, old enough."""
        self.stepped(False)
        for node in self.nodes.values():
            await node.repository.load()
        await self.nodes["sweeper"].snapshot("s0", b"disk")
        await self.nodes["sweeper"].repository.remove("s0")
        await self.nodes["sweeper"].repository.renew()
        self.stepped(True)

    async def commits(self) -> None:
        """And lets go, in the store as well."""
        await self.nodes["committer"].snapshot("s1", b"disk")
        await self.nodes["committer"].repository.renew()

    async def sweeps(self) -> None:
        await self.nodes["sweeper"].repository.sweep(0.0)

    async def check(self, *, committed: bool = True) -> None:
        """Whatever is committed is complete, and the next sweeps leave nothing else."""
        self.stepped(False)
        # A sweep that stood still for minutes leaves its lock, which runs out.
        self.clock.advance(LOCK_S + 1)
        sweeper = self.nodes["sweeper"]
        await sweeper.repository.refresh()
        snapshots = sweeper.repository.all()
        assert [s.snapshot_id for s in snapshots] == (["s1"] if committed else [])
        stored = await content_ids(self.store)
        for snapshot in snapshots:
            assert ids_of(snapshot) <= stored, "\n".join(self.steps.trace)
        await self.nodes["committer"].repository.renew()
        await sweeper.repository.sweep(0.0)
        needed = set().union(*(ids_of(s) for s in snapshots))
        assert len(await content_ids(self.store) - needed) == len(snapshots)


def by_switches(first: str, at: Sequence[int]) -> Choose:
    """Run one task, and go over to the other after so many steps each."""
    left = list(at)
    current = first

    def choose(standing: Sequence[str]) -> str:
        nonlocal current
        if left and left[0] == 0:
            left.pop(0)
            current = next((name for name in standing if name != current), current)
        elif left:
            left[0] -= 1
        return current if current in standing else standing[0]

    return choose


def few_switches() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every place for the first switch and the second; a third comes by itself, when the first task is over."""
    for one, two in itertools.product(range(14), range(24)):
        yield "committer", (one, two)
        yield "sweeper", (two, one)


async def race(tmp_path: Path, choose: Choose) -> Race:
    made = Race(tmp_path)
    await made.set_up()
    results = await made.steps.run({"committer": made.commits(), "sweeper": made.sweeps()}, choose)
    assert results["committer"] is None, (results, made.steps.trace)
    assert results["sweeper"] is None or isinstance(results["sweeper"], StoreUnavailable | Conflict)
    await made.check()
    return made


def test_a_commit_survives_a_sweep_in_every_order_with_few_switches(tmp_path: Path) -> None:
    async def all_orders() -> None:
        for number, (first, at) in enumerate(few_switches()):
            await race(tmp_path / str(number % 2), by_switches(first, at))

    asyncio.run(all_orders())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.integers(0, 1), max_size=60))
@example(turns=[])
def test_a_commit_survives_a_sweep_in_any_order(tmp_path: Path, turns: list[int]) -> None:
    left = list(turns)

    def choose(standing: Sequence[str]) -> str:
        return standing[(left.pop() if left else 0) % len(standing)]

    asyncio.run(race(tmp_path, choose))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.integers(0, 1), max_size=60))
def test_a_snapshot_that_is_held_while_it_is_removed_and_swept_stays_or_is_refused(
    tmp_path: Path, turns: list[int]
) -> None:
    async def one() -> None:
        made = Race(tmp_path)
        await made.set_up()
        made.stepped(False)
        snapshot = await made.nodes["sweeper"].snapshot("s1", b"disk")
        await made.nodes["committer"].repository.refresh()
        made.stepped(True)
        left = list(turns)

        async def remove_and_sweep() -> None:
            await made.nodes["sweeper"].repository.remove("s1")
            await made.sweeps()

        results = await made.steps.run(
            {
                "committer": made.nodes["committer"].repository.hold_snapshot(snapshot),
                "sweeper": remove_and_sweep(),
            },
            lambda standing: standing[(left.pop() if left else 0) % len(standing)],
        )
        assert results["sweeper"] is None or isinstance(results["sweeper"], StoreUnavailable | Conflict)
        stored = await content_ids(made.store)
        if results["committer"] is None:
            assert ids_of(snapshot) <= stored, "\n".join(made.steps.trace)
        else:
            assert isinstance(results["committer"], TemplateNotFound)

    asyncio.run(one())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.integers(0, 2), max_size=80))
def test_two_sweepers_and_a_commit(tmp_path: Path, turns: list[int]) -> None:
    async def one() -> None:
        made = Race(tmp_path)
        made.stores["third"] = SteppedStore(made.steps, "third", made.store)
        made.nodes["third"] = Node("third", made.stores["third"], tmp_path / "third", made.steps.timing("third"))
        await made.set_up()
        left = list(turns)
        results = await made.steps.run(
            {
                "committer": made.commits(),
                "sweeper": made.sweeps(),
                "third": made.nodes["third"].repository.sweep(0.0),
            },
            lambda standing: standing[(left.pop() if left else 0) % len(standing)],
        )
        assert results["committer"] is None
        for name in ("sweeper", "third"):
            assert not isinstance(results[name], BaseException) or isinstance(
                results[name], StoreUnavailable | Conflict
            )
        await made.check()

    asyncio.run(one())


@pytest.mark.parametrize("broken", ["holds after records", "no wait for the lock"])
def test_the_races_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """The same orders find the fault when the protocol is broken."""
    if broken == "no wait for the lock":

        async def at_once(*_: object) -> None:
            return None

        monkeypatch.setattr(holds_module, "wait_for_sweep", at_once)
    else:
        _holds_after_records(monkeypatch)

    async def all_orders() -> None:
        for number, (first, at) in enumerate(few_switches()):
            await race(tmp_path / str(number % 2), by_switches(first, at))

    with pytest.raises(AssertionError):
        asyncio.run(all_orders())


def _holds_after_records(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentenv.snapshots import sweep as sweep_module
    from agentenv.snapshots.index import Index
    from agentenv.snapshots.stores import Store

    right = sweep_module.mark

    async def wrong(store: Store, index: Index, now_s: float, *, strict: bool = True) -> sweep_module.Marks:
        await index.refresh()
        known = {known.snapshot.snapshot_id: known for known in index.all()}
        marks = await right(store, index, now_s, strict=strict)
        old: set[str] = set()
        for each in known.values():
            old |= ids_of(each.snapshot) | ({each.manifest} if each.manifest else set())
        return sweep_module.Marks(frozenset(old), marks.by_holds, marks.by_images, marks.by_damaged)

    monkeypatch.setattr(sweep_module, "mark", wrong)
