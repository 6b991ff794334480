"""The VMM driver interface: what `node` relies on, the same over the fake and over real microVMs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from vmm_lab import Lab

from agentenv.errors import RestoreRefused, VmmError, VmmGone, VmmTimeout


async def test_a_booted_machine_runs_and_stop_and_cont_are_idempotent(lab: Lab) -> None:
    vmm = await lab.boot()
    assert await vmm.is_running()
    await vmm.cont()
    for _ in range(2):
        await vmm.stop()
        assert not await vmm.is_running()
    for _ in range(2):
        await vmm.cont()
        assert await vmm.is_running()


async def test_a_capture_restores_to_the_same_instant_and_the_source_goes_on(lab: Lab) -> None:
    vmm = await lab.boot()
    await lab.write(vmm, "before")
    await vmm.stop()
    state, image = lab.root / "state", lab.root / "image"
    size = await vmm.save_device_state(state)
    assert size == state.stat().st_size
    assert 0 < size < 1 << 20
    dirty = await lab.capture(vmm, lab.root / "m1.mem", image)
    assert dirty > 0
    await vmm.cont()
    await lab.write(vmm, "after")

    clone = await lab.restore(lab.spec(image=image), state)
    assert not await clone.is_running(), "a restored machine waits for cont"
    await clone.cont()
    assert await lab.read(clone) == "before"
    assert await lab.read(vmm) == "after"


async def test_the_device_state_of_a_running_machine_is_refused_and_it_runs_on(lab: Lab) -> None:
    vmm = await lab.boot()
    with pytest.raises(VmmError, match="stop it first"):
        await vmm.save_device_state(lab.root / "state")
    assert not (lab.root / "state").exists()
    assert await vmm.is_running()


async def test_a_state_that_cannot_be_written_is_an_error_and_the_machine_goes_on(lab: Lab) -> None:
    vmm = await lab.boot()
    await vmm.stop()
    with pytest.raises((VmmError, OSError)):
        await vmm.save_device_state(lab.root / "no such folder/state")
    await vmm.cont()
    assert await vmm.is_running()


async def test_guest_memory_is_one_range_of_its_full_size(lab: Lab) -> None:
    vmm = await lab.boot()
    mapping = await vmm.memory_mapping()
    assert mapping.pid == vmm.record.pid
    assert mapping.length_bytes == vmm.record.memory_bytes
    assert mapping.address % 4096 == 0
    assert await vmm.memory_mapping() == mapping


async def test_a_restore_with_other_needs_is_refused_before_a_process_starts(lab: Lab) -> None:
    spec = lab.spec()
    has = lab.driver.fingerprint(spec)
    needs = replace(has, vmm_build="9.9.9", cpu_model="cray")
    with pytest.raises(RestoreRefused) as refused:
        await lab.driver.restore(spec, lab.root / "no state", needs)
    for value in ("vmm_build", "9.9.9", has.vmm_build, "cpu_model", "cray", has.cpu_model):
        assert value in str(refused.value)
    assert lab.processes() == 0


async def test_a_fingerprint_does_not_depend_on_which_sandbox_it_is(lab: Lab) -> None:
    assert lab.driver.fingerprint(lab.spec()) == lab.new_driver().fingerprint(lab.spec())


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 1000], ids=["missing", "empty", "garbage"])
async def test_a_device_state_that_does_not_load_is_an_error_that_leaves_no_process(
    lab: Lab, content: bytes | None
) -> None:
    spec, state = lab.spec(), lab.root / "state"
    if content is not None:
        state.write_bytes(content)
    with pytest.raises(VmmError):
        await lab.driver.restore(spec, state, lab.driver.fingerprint(spec))
    assert lab.processes() == 0


async def test_after_a_kill_the_process_is_gone_and_every_command_says_so(lab: Lab) -> None:
    vmm = await lab.boot()
    waiting = [asyncio.ensure_future(vmm.wait_exit()) for _ in range(2)]
    vmm.kill()
    async with asyncio.timeout(10):
        for how in await asyncio.gather(*waiting):
            assert how.startswith(("killed by signal 9", "exited"))
    assert lab.processes() == 0
    vmm.kill()
    for command in (
        vmm.stop(),
        vmm.cont(),
        vmm.is_running(),
        vmm.memory_mapping(),
        vmm.save_device_state(lab.root / "s"),
    ):
        with pytest.raises(VmmGone):
            await command
    assert await vmm.wait_exit() == await vmm.wait_exit()


async def test_a_kill_in_the_middle_of_a_save_ends_it_with_gone(lab: Lab) -> None:
    vmm = await lab.boot()
    await vmm.stop()
    lab.make_deaf(vmm, True)
    try:
        saving = asyncio.ensure_future(vmm.save_device_state(lab.root / "state"))
        await asyncio.sleep(0)
        vmm.kill()
    finally:
        if lab.processes():
            lab.make_deaf(vmm, False)
    with pytest.raises((VmmGone, VmmTimeout)):
        await saving
    async with asyncio.timeout(10):
        await vmm.wait_exit()
    assert not (lab.root / "state").exists()


async def test_a_machine_that_does_not_answer_is_a_timeout_within_the_deadline(lab: Lab) -> None:
    vmm = await lab.boot()
    lab.make_deaf(vmm, True)
    try:
        began = time.monotonic()
        with pytest.raises(VmmTimeout):
            await vmm.is_running()
        assert time.monotonic() - began < lab.deaf_limit_s
    finally:
        lab.make_deaf(vmm, False)
    assert await vmm.is_running(), "an answer that came late is not taken for the next one's"


async def test_the_next_server_adopts_a_machine_by_its_record(lab: Lab) -> None:
    vmm = await lab.boot()
    await lab.write(vmm, "still here")
    record = await lab.forget(vmm)
    del vmm
    lab.driver = lab.new_driver()
    adopted = lab.keep(await lab.driver.adopt(record))
    assert adopted.record == record
    assert await adopted.is_running()
    assert await lab.read(adopted) == "still here"
    await adopted.stop()
    await adopted.save_device_state(lab.root / "state")
    assert (await adopted.memory_mapping()).length_bytes == record.memory_bytes


async def test_a_stopped_machine_is_adopted_stopped(lab: Lab) -> None:
    vmm = await lab.boot()
    await vmm.stop()
    adopted = lab.keep(await lab.new_driver().adopt(await lab.forget(vmm)))
    assert not await adopted.is_running()


async def test_a_machine_that_does_not_answer_is_not_adopted_and_not_killed(lab: Lab) -> None:
    vmm = await lab.boot()
    lab.make_deaf(vmm, True)
    try:
        record = await lab.forget(vmm)
        began = time.monotonic()
        with pytest.raises(VmmTimeout):
            await lab.driver.adopt(record)
        assert time.monotonic() - began < lab.deaf_limit_s
        assert lab.processes() == 1
    finally:
        lab.make_deaf(vmm, False)
    adopted = lab.keep(await lab.driver.adopt(record))
    assert await adopted.is_running()


async def test_what_no_longer_exists_cannot_be_adopted(lab: Lab) -> None:
    vmm = await lab.boot()
    record = vmm.record
    with pytest.raises(VmmGone):
        await lab.driver.adopt(replace(record, start_time_ticks=record.start_time_ticks + 1))
    await lab.end(vmm)
    with pytest.raises(VmmGone):
        await lab.driver.adopt(record)


async def test_a_closed_machine_goes_on_and_can_still_be_killed(lab: Lab) -> None:
    vmm = await lab.boot()
    await vmm.close()
    assert lab.processes() == 1
    vmm.kill()
    async with asyncio.timeout(10):
        await vmm.wait_exit()
    assert lab.processes() == 0


@pytest.mark.parametrize("turns", [1, 2, 5])
async def test_a_cancelled_boot_leaves_no_process(lab: Lab, turns: int) -> None:
    starting = asyncio.ensure_future(lab.driver.boot(lab.spec()))
    for _ in range(turns):
        await asyncio.sleep(0)
    if starting.done():
        lab.keep(starting.result())
        return
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert lab.processes() == 0


async def test_the_console_keeps_what_the_guest_said_after_it_is_gone(lab: Lab) -> None:
    vmm = await lab.boot()
    await lab.write(vmm, "x")  # the guest is up
    vmm.kill()
    await vmm.wait_exit()
    text = vmm.console(10_000)
    assert text
    assert vmm.console(4) == text[-4:]
