"""A server that is killed at any step, and the next one over the same world."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.node.conftest import World, spec

from agentenv.errors import SandboxNotFound
from agentenv.lifecycle import Phase
from agentenv.model import SandboxState, SandboxView
from agentenv.processes import start_time_ticks
from agentenv.vmm.fake import Step


async def crash_at(world: World, step: Step, operation: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Begin an operation, kill the server when it gets to a step, start another."""
    world.vmms.hold(step)
    task = asyncio.create_task(operation())
    await world.vmms.reached[step].wait()
    world.crash()
    world._dead_tasks.append(task)
    await world.start()


async def test_a_running_sandbox_is_adopted_with_its_generation(world: World, sandbox: SandboxView) -> None:
    generation = world.owner(sandbox.sandbox_id).record.generation
    await world.stop()
    node = await world.start()
    assert node.get(sandbox.sandbox_id).state is SandboxState.RUNNING
    assert world.owner(sandbox.sandbox_id).record.generation == generation
    assert node.live_generations()[0] == [generation]
    assert (await node.pause(sandbox.sandbox_id)).state is SandboxState.PAUSED


@pytest.mark.parametrize("step", [Step.STOP, Step.SAVE, Step.MAPPING])
async def test_a_pause_that_was_not_answered_is_undone(world: World, sandbox: SandboxView, step: Step) -> None:
    await crash_at(world, step, lambda: world.node.pause(sandbox.sandbox_id))
    assert world.node.get(sandbox.sandbox_id).state is SandboxState.RUNNING
    [process] = world.vmms.processes.values()
    assert process.running
    assert world.owner(sandbox.sandbox_id).record.pending is None


@pytest.mark.parametrize("step", [Step.STOP, Step.SAVE, Step.MAPPING])
async def test_a_source_that_was_frozen_for_a_snapshot_goes_on(world: World, sandbox: SandboxView, step: Step) -> None:
    await crash_at(world, step, lambda: world.node.snapshot(sandbox.sandbox_id, None))
    [process] = world.vmms.processes.values()
    assert process.running
    await world.node.snapshot(sandbox.sandbox_id, None)
    record = world.owner(sandbox.sandbox_id).record
    [export] = [e for e in await world.block.exports() if e.kind == "disk"]
    assert export.upper is not None
    assert export.upper.endswith(f"{record.upper}.lsmt")
    assert [name.rsplit("/", 1)[1] for name in export.layers] == [f"{layer}.lsmt" for layer in record.disk.layers]


async def test_a_create_that_was_not_answered_leaves_nothing(world: World) -> None:
    await crash_at(world, Step.RESTORE, lambda: world.node.create(spec()))
    for owner in world.owners():
        await world.gone(owner.sandbox_id)
    # The fake's process was never recorded by anybody; a real one is found by its launch record.
    assert world.node.list_sandboxes() == []
    assert [e for e in await world.block.exports() if e.kind == "disk"] == []


async def test_a_restore_that_was_cut_short_is_paused_again(world: World, sandbox: SandboxView) -> None:
    await world.node.pause(sandbox.sandbox_id)
    await world.until(sandbox.sandbox_id, Phase.PAUSED)
    await crash_at(world, Step.RESTORE, lambda: world.node.connect(sandbox.sandbox_id, 60))
    assert world.node.get(sandbox.sandbox_id).pause_safety == "durable"
    assert (await world.node.connect(sandbox.sandbox_id, 60))[1]


async def test_a_held_pause_is_captured_by_the_next_server(world: World, sandbox: SandboxView) -> None:
    await world.node.pause(sandbox.sandbox_id)
    await world.stop()
    await world.start()
    await world.until(sandbox.sandbox_id, Phase.PAUSED)
    assert (await world.node.connect(sandbox.sandbox_id, 60))[1]


async def test_a_durable_pause_survives_a_reboot_and_a_running_sandbox_leaves_a_tombstone(
    world: World, sandbox: SandboxView
) -> None:
    paused = await world.node.create(spec())
    await world.node.pause(paused.sandbox_id)
    await world.until(paused.sandbox_id, Phase.PAUSED)
    await world.stop()
    world.vmms.processes.clear()
    world.slot_host.policies.clear()
    world.boot_id = "boot-2"
    node = await world.start()
    assert (await node.connect(paused.sandbox_id, 60))[1]
    with pytest.raises(SandboxNotFound, match="host_lost"):
        node.get(sandbox.sandbox_id)


async def test_a_vmm_that_no_record_names_yet_is_ended_and_one_that_is_named_goes_on(
    world: World, sandbox: SandboxView
) -> None:
    """The server died between the start of a process and the storing of its record."""
    with subprocess.Popen(["sleep", "60"]) as unrecorded:
        runtime_dir = world.host.paths.runtime_dir(sandbox.sandbox_id)
        fields = {"pid": unrecorded.pid, "start_time_ticks": start_time_ticks(unrecorded.pid)}
        (runtime_dir / "vmm.json").write_text(json.dumps(fields))
        await world.stop()
        node = await world.start()
        assert unrecorded.wait(5) == -signal.SIGKILL
    assert node.get(sandbox.sandbox_id).state is SandboxState.RUNNING
    assert runtime_dir.exists()


async def test_a_kill_that_was_cut_short_is_finished(world: World, sandbox: SandboxView) -> None:
    world.vmms.hold(Step.EXIT)
    await world.node.kill(sandbox.sandbox_id)
    world.crash()
    world.vmms.release_exits()
    await world.start()
    for owner in world.owners():
        await world.gone(owner.sandbox_id)
    assert await world.leftovers() == []
