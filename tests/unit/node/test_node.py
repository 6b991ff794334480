"""The node over fakes: what a user sees of each operation, and what is left when it goes wrong."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.node.conftest import World, spec

from agentenv.errors import (
    BlockError,
    Conflict,
    GuestUnresponsive,
    InvalidRequest,
    OperationFailed,
    SandboxNotFound,
    StorageFull,
    TemplateNotFound,
    VmmError,
    VmmGone,
)
from agentenv.lifecycle import Event, Phase
from agentenv.model import ExpiryAction, SandboxState, SandboxView
from agentenv.node.interface import RouteRefusal, RouteTarget
from agentenv.vmm.fake import Step


async def test_create_greets_the_guest_with_a_token_of_its_own(world: World, sandbox: SandboxView) -> None:
    assert sandbox.state is SandboxState.RUNNING
    greeted = world.guest.greeted[-1]
    assert (greeted.sandbox_id, greeted.access_token) == (sandbox.sandbox_id, sandbox.envd_access_token)
    assert greeted.previous_token is None
    assert isinstance(await world.node.resolve_route(sandbox.sandbox_id, 80), RouteTarget)


async def test_an_unknown_template_is_named(world: World) -> None:
    with pytest.raises(TemplateNotFound, match="nothing-like-it"):
        await world.node.create(spec(template="nothing-like-it"))


@pytest.mark.parametrize("step", [Step.RESTORE, Step.CONT])
async def test_a_failed_create_leaves_nothing_but_a_tombstone(world: World, step: Step) -> None:
    world.vmms.fail(step, VmmError("planted"))
    with pytest.raises(VmmError, match="planted"):
        await world.node.create(spec())
    [ended] = world.owners()
    await world.gone(ended.sandbox_id)
    tombstone = world.node.tombstone(ended.sandbox_id)
    assert tombstone is not None
    assert tombstone.reason == "create_failed"
    assert await world.leftovers() == []


async def test_a_create_whose_client_went_away_is_undone(world: World) -> None:
    world.vmms.hold(Step.RESTORE)
    creating = asyncio.create_task(world.node.create(spec()))
    await world.vmms.reached[Step.RESTORE].wait()
    [owner] = world.owners()
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)
    await world.gone(owner.sandbox_id)
    assert await world.leftovers() == []
    assert world.node.list_sandboxes() == []


async def test_a_pause_becomes_durable_and_holds_nothing(world: World, sandbox: SandboxView) -> None:
    generation = world.owner(sandbox.sandbox_id).record.generation
    paused = await world.node.pause(sandbox.sandbox_id)
    assert (paused.state, paused.pause_safety) == (SandboxState.PAUSED, "held")
    assert generation in world.proxy.withdrawn
    await world.until(sandbox.sandbox_id, Phase.PAUSED)
    await world.idle(sandbox.sandbox_id)
    assert world.node.get(sandbox.sandbox_id).pause_safety == "durable"
    assert world.vmms.processes == {}
    assert [e for e in await world.block.exports() if e.kind == "disk"] == []
    view, resumed = await world.node.connect(sandbox.sandbox_id, 60)
    assert resumed
    assert view.state is SandboxState.RUNNING
    assert world.guest.greeted[-1].previous_token == sandbox.envd_access_token


async def test_pausing_twice_at_once_joins_and_afterwards_conflicts(world: World, sandbox: SandboxView) -> None:
    gate = world.vmms.hold(Step.STOP)
    first = asyncio.create_task(world.node.pause(sandbox.sandbox_id))
    await world.vmms.reached[Step.STOP].wait()
    second = asyncio.create_task(world.node.pause(sandbox.sandbox_id))
    await asyncio.sleep(0)
    gate.set()
    assert (await first).state is (await second).state is SandboxState.PAUSED
    with pytest.raises(Conflict):
        await world.node.pause(sandbox.sandbox_id)


async def test_a_full_disk_refuses_the_pause_and_the_guest_runs_on(world: World, sandbox: SandboxView) -> None:
    world.block.fail_next("capture_start", StorageFull("planted"))
    with pytest.raises(StorageFull):
        await world.node.pause(sandbox.sandbox_id)
    [process] = world.vmms.processes.values()
    assert process.running
    assert world.node.get(sandbox.sandbox_id).state is SandboxState.RUNNING
    assert isinstance(await world.node.resolve_route(sandbox.sandbox_id, 80), RouteTarget)
    assert (await world.node.pause(sandbox.sandbox_id)).state is SandboxState.PAUSED


async def test_a_failed_capture_stays_held_and_can_be_resumed(world: World, sandbox: SandboxView) -> None:
    world.block.fail_next("capture_finish", BlockError("planted", "io"))
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.HELD_WAITING)
    assert world.node.get(sandbox.sandbox_id).pause_safety == "held"
    _, resumed = await world.node.connect(sandbox.sandbox_id, 60)
    assert resumed
    [process] = world.vmms.processes.values()
    assert process.running


async def test_a_failed_restore_stays_paused_and_works_the_next_time(world: World, sandbox: SandboxView) -> None:
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.PAUSED)
    world.vmms.fail(Step.RESTORE, VmmError("planted"))
    with pytest.raises(VmmError):
        await world.node.connect(sandbox.sandbox_id, 60)
    assert world.node.get(sandbox.sandbox_id).pause_safety == "durable"
    assert world.vmms.processes == {}
    assert (await world.node.connect(sandbox.sandbox_id, 60))[1]


async def test_a_guest_that_does_not_answer_after_a_held_resume_is_held_again(
    world: World, sandbox: SandboxView
) -> None:
    world.block.fail_next("capture_finish", BlockError("planted", "io"))
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.HELD_WAITING)
    world.guest.errors.append(GuestUnresponsive("planted"))
    with pytest.raises(GuestUnresponsive):
        await world.node.connect(sandbox.sandbox_id, 60)
    assert world.node.get(sandbox.sandbox_id).pause_safety == "held"
    assert (await world.node.connect(sandbox.sandbox_id, 60))[1]


@pytest.mark.parametrize("step", [Step.RESTORE, Step.STOP, Step.SAVE, Step.CONT])
async def test_kill_ends_every_operation_and_leaves_nothing(world: World, step: Step) -> None:
    if step is Step.RESTORE:
        world.vmms.hold(step)
        working = asyncio.create_task(world.node.create(spec()))
        await world.vmms.reached[step].wait()
        [owner] = world.owners()
        sandbox_id = owner.sandbox_id
    else:
        sandbox_id = (await world.node.create(spec())).sandbox_id
        world.vmms.hold(step)
        operation = world.node.pause if step is not Step.CONT else _snapshot(world)
        working = asyncio.create_task(operation(sandbox_id))  # type: ignore[arg-type]
        await world.vmms.reached[step].wait()
    killing = asyncio.create_task(world.node.kill(sandbox_id))
    await asyncio.sleep(0)
    world.vmms._gates[step].set()
    await killing
    with pytest.raises(SandboxNotFound):
        await working
    await world.gone(sandbox_id)
    assert await world.leftovers() == []


async def test_a_vmm_that_dies_ends_the_sandbox_and_says_so(world: World, sandbox: SandboxView) -> None:
    [pid] = world.vmms.processes
    world.vmms.end(pid, "killed by signal 9")
    await world.gone(sandbox.sandbox_id)
    with pytest.raises(SandboxNotFound, match="killed by signal 9"):
        world.node.get(sandbox.sandbox_id)
    assert await world.node.resolve_route(sandbox.sandbox_id, 80) == RouteRefusal(sandbox.sandbox_id, "not_found")


async def test_a_slot_is_reused_only_when_the_process_is_gone(world: World, sandbox: SandboxView) -> None:
    slot = world.owner(sandbox.sandbox_id).record.slot
    world.vmms.hold(Step.EXIT)
    await world.node.kill(sandbox.sandbox_id)
    assert world.node.list_sandboxes() == []
    assert world.owner(sandbox.sandbox_id).slot is not None
    others = {world.owner((await world.node.create(spec())).sandbox_id).record.slot for _ in range(4)}
    assert slot not in others
    world.vmms.release_exits()
    await world.gone(sandbox.sandbox_id)


async def test_a_snapshot_starts_others_and_its_source_goes_on(world: World, sandbox: SandboxView) -> None:
    result = await world.node.snapshot(sandbox.sandbox_id, "mine")
    assert world.node.get(sandbox.sandbox_id).state is SandboxState.RUNNING
    other = await world.node.create(spec(template="mine"))
    assert world.guest.greeted[-1].previous_token == sandbox.envd_access_token
    assert other.envd_access_token != sandbox.envd_access_token
    assert [m.snapshot_id for m in world.node.list_snapshots()] == [result.manifest.snapshot_id]


async def test_a_failed_snapshot_lets_its_source_go_on(world: World, sandbox: SandboxView) -> None:
    world.block.fail_next("capture_start", StorageFull("planted"))
    with pytest.raises(StorageFull):
        await world.node.snapshot(sandbox.sandbox_id, None)
    [process] = world.vmms.processes.values()
    assert process.running
    assert world.node.get(sandbox.sandbox_id).state is SandboxState.RUNNING
    await world.node.snapshot(sandbox.sandbox_id, None)


async def test_a_source_that_does_not_go_on_after_its_capture_ends(world: World, sandbox: SandboxView) -> None:
    world.vmms.fail(Step.CONT, VmmGone("planted"))
    with pytest.raises(OperationFailed, match="planted"):
        await world.node.snapshot(sandbox.sandbox_id, None)
    await world.gone(sandbox.sandbox_id)
    assert await world.leftovers() == []


async def test_every_child_of_a_fork_is_a_sandbox_or_an_error(world: World, sandbox: SandboxView) -> None:
    world.vmms.fail(Step.RESTORE, VmmError("planted"))
    result = await world.node.fork(sandbox.sandbox_id, 4, 60)
    errors = [child for child in result.children if isinstance(child, VmmError)]
    children = [child for child in result.children if isinstance(child, SandboxView)]
    assert (len(errors), len(children)) == (1, 3)
    assert {child.resources for child in children} == {sandbox.resources}
    for count in (0, -1, 11):
        with pytest.raises(InvalidRequest, match=str(count)):
            await world.node.fork(sandbox.sandbox_id, count, 60)


async def test_a_collection_beside_the_start_of_children_takes_nothing_they_need(
    world: World, sandbox: SandboxView
) -> None:
    gate = world.vmms.hold(Step.RESTORE)
    forking = asyncio.create_task(world.node.fork(sandbox.sandbox_id, 2, 60))
    await world.vmms.reached[Step.RESTORE].wait()
    await world.collect()
    gate.set()
    assert all(isinstance(child, SandboxView) for child in (await forking).children)


async def test_a_forks_layers_stay_reserved_after_its_capture_until_the_requester_lets_go(
    world: World, sandbox: SandboxView
) -> None:
    point = await world.owner(sandbox.sandbox_id).ask(Event.FORK)
    await world.until(sandbox.sandbox_id, Phase.RUNNING)
    layers = {*point.manifest.disk.layers, *point.manifest.memory.layers, point.manifest.device_state}
    await world.collect()
    assert layers <= world.stored_ids()
    world.host.layers.release(*layers)
    assert not world.host.layers.reservations
    await world.collect()
    assert point.manifest.device_state not in world.stored_ids()


async def test_layers_of_children_survive_the_end_of_their_source(world: World, sandbox: SandboxView) -> None:
    result = await world.node.fork(sandbox.sandbox_id, 1, 60)
    [child] = result.children
    assert isinstance(child, SandboxView)
    await world.node.kill(sandbox.sandbox_id)
    await world.gone(sandbox.sandbox_id)
    await world.collect()
    record = world.owner(child.sandbox_id).record
    assert record.layer_ids() <= world.stored_ids()
    await world.node.kill(child.sandbox_id)
    await world.gone(child.sandbox_id)
    await world.collect()
    template = world.node.resolve_template("base")
    expected = {*template.disk.layers, *template.memory.layers, template.device_state}
    assert world.stored_ids() == expected


async def test_expiry_pauses_or_kills_as_told(world: World) -> None:
    kept = await world.node.create(spec(timeout_s=0.0))
    await world.until(kept.sandbox_id, Phase.PAUSED)
    deleted = await world.node.create(spec(timeout_s=0.0, on_timeout=ExpiryAction.KILL))
    await world.gone(deleted.sandbox_id)
    tombstone = world.node.tombstone(deleted.sandbox_id)
    assert tombstone is not None
    assert tombstone.reason == "expired"


async def test_connect_only_extends_and_set_timeout_may_shorten(world: World, sandbox: SandboxView) -> None:
    view, resumed = await world.node.connect(sandbox.sandbox_id, 10)
    assert not resumed
    assert view.end_at == sandbox.end_at
    view, _ = await world.node.connect(sandbox.sandbox_id, 1000)
    assert view.end_at == world.clock.wall() + 1000
    await world.node.set_timeout(sandbox.sandbox_id, 5)
    assert world.node.get(sandbox.sandbox_id).end_at == world.clock.wall() + 5


async def test_traffic_resumes_a_sandbox_that_allows_it(world: World) -> None:
    box = await world.node.create(spec(auto_resume=True))
    await world.node.pause(box.sandbox_id)
    await world.until(box.sandbox_id, Phase.PAUSED)
    assert isinstance(await world.node.resolve_route(box.sandbox_id, 80), RouteTarget)
    other = await world.node.create(spec())
    await world.node.pause(other.sandbox_id)
    assert await world.node.resolve_route(other.sandbox_id, 80) == RouteRefusal(other.sandbox_id, "not_found")


async def test_long_chains_are_merged_at_a_pause(world: World, sandbox: SandboxView) -> None:
    for _ in range(20):
        await world.node.pause(sandbox.sandbox_id)
        await world.until(sandbox.sandbox_id, Phase.PAUSED)
        await world.node.connect(sandbox.sandbox_id, 60)
    record = world.owner(sandbox.sandbox_id).record
    assert len(record.disk.layers) < 20
    assert len(record.memory.layers) < 20


def _snapshot(world: World):  # type: ignore[no-untyped-def]
    async def take(sandbox_id: str) -> object:
        return await world.node.snapshot(sandbox_id, None)

    return take


async def test_a_surprise_in_a_step_is_contained(
    world: World, sandbox: SandboxView, caplog: pytest.LogCaptureFixture
) -> None:
    world.vmms.fail(Step.STOP, RuntimeError("a bug"))
    with pytest.raises(Exception, match="failed"):
        await world.node.pause(sandbox.sandbox_id)
    assert "a bug" in caplog.text
    await world.gone(sandbox.sandbox_id)
    assert await world.leftovers() == []


async def test_warm_clones_are_claimed_refilled_and_hidden(world: World) -> None:
    await world.stop()
    node = await world.start(warm=1)
    first = await node.create(spec())
    async with asyncio.timeout(5):
        while not any(owner.phase is Phase.WARM for owner in world.owners()):
            await asyncio.sleep(0.01)
    [clone] = [owner for owner in world.owners() if owner.phase is Phase.WARM]
    assert [view.sandbox_id for view in node.list_sandboxes()] == [first.sandbox_id]
    with pytest.raises(SandboxNotFound):
        node.get(clone.sandbox_id)
    second = await node.create(spec(metadata={"a": "b"}, timeout_s=77))
    assert second.sandbox_id == clone.sandbox_id
    assert second.spec.metadata == {"a": "b"}
    assert second.end_at == world.clock.wall() + 77
    assert world.guest.greeted[-1].access_token == second.envd_access_token
    assert clone.ask(Event.CLAIM).exception() is not None


async def test_a_template_that_is_deleted_while_its_clone_warms_leaves_nothing(world: World) -> None:
    await world.stop()
    node = await world.start(warm=1)
    first = await node.create(spec())
    world.vmms.hold(Step.STOP)
    async with asyncio.timeout(5):
        await world.vmms.reached[Step.STOP].wait()
    await node.kill(first.sandbox_id)
    await node.delete_snapshot("base")
    async with asyncio.timeout(5):
        while world.owners():
            await asyncio.sleep(0.001)
    assert await world.leftovers() == []


async def test_a_warm_clone_that_died_is_replaced_by_a_start(world: World) -> None:
    await world.stop()
    node = await world.start(warm=1)
    await node.create(spec())
    async with asyncio.timeout(5):
        while not any(owner.phase is Phase.WARM for owner in world.owners()):
            await asyncio.sleep(0.01)
    world.vmms.fail(Step.CONT, VmmError("planted"))
    view = await node.create(spec())
    assert view.state is SandboxState.RUNNING


async def test_a_resume_soon_after_a_pause_goes_on_with_the_same_vmm(world: World, sandbox: SandboxView) -> None:
    world.host.pause_linger_s = 60.0
    [pid] = world.vmms.processes
    for _ in range(3):
        await world.node.pause(sandbox.sandbox_id)
        await world.until(sandbox.sandbox_id, Phase.LINGERING)
        assert world.node.get(sandbox.sandbox_id).pause_safety == "held"
        assert (await world.node.connect(sandbox.sandbox_id, 60))[1]
        assert list(world.vmms.processes) == [pid]
        assert [m.kind for m in world.repository.all() if m.kind == "pause"] == []
    await world.node.snapshot(sandbox.sandbox_id, None)


async def test_a_lingering_vmm_that_dies_leaves_the_durable_pause(world: World, sandbox: SandboxView) -> None:
    world.host.pause_linger_s = 60.0
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.LINGERING)
    [pid] = world.vmms.processes
    world.vmms.end(pid)
    await world.until(sandbox.sandbox_id, Phase.PAUSED)
    assert (await world.node.connect(sandbox.sandbox_id, 60))[1]


async def test_a_lingering_vmm_that_does_not_go_on_falls_back_to_the_pause(world: World, sandbox: SandboxView) -> None:
    world.host.pause_linger_s = 60.0
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.LINGERING)
    world.vmms.fail(Step.CONT, VmmError("planted"))
    with pytest.raises(VmmError):
        await world.node.connect(sandbox.sandbox_id, 60)
    await world.until(sandbox.sandbox_id, Phase.PAUSED)
    assert (await world.node.connect(sandbox.sandbox_id, 60))[1]


async def test_a_lingering_pause_can_be_snapshotted(world: World, sandbox: SandboxView) -> None:
    world.host.pause_linger_s = 60.0
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.LINGERING)
    result = await world.node.snapshot(sandbox.sandbox_id, None)
    assert world.node.get(sandbox.sandbox_id).pause_safety == "durable"
    assert (await world.node.create(spec(template=result.manifest.snapshot_id))).state is SandboxState.RUNNING


async def test_captures_of_one_run_lie_upon_each_other_and_start_anew_when_the_chain_is_long(
    world: World, sandbox: SandboxView
) -> None:
    mapped = world.owner(sandbox.sandbox_id).record.memory.layers
    depths = []
    for _ in range(12):
        result = await world.node.snapshot(sandbox.sandbox_id, None)
        stack = result.manifest.memory.layers
        assert stack[: len(mapped)] == mapped
        depths.append(len(stack) - len(mapped))
    assert depths == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
