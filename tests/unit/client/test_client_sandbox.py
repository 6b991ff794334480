"""`Sandbox` as a library: run, events, files, against the fake daemon that runs real local processes."""

from __future__ import annotations

import pytest
from tests.unit.cli.fake_server import API_KEY, FakeServer

from agentenv.client import AenvClient, Ended, PtyOutput, PtySize, Stdout, errors


@pytest.fixture
def server(tmp_path):
    root = tmp_path / "guest"
    (root / "home").mkdir(parents=True)
    fake = FakeServer(root)
    yield fake
    fake.close()


@pytest.fixture
async def sandbox(server):
    async with AenvClient(server.url, API_KEY) as client:
        yield (await client.sandboxes.open(server.state.add()))[0]


async def test_run_collects_both_streams(sandbox):
    result = await sandbox.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr, result.truncated) == (3, b"out\n", b"err\n", False)


async def test_run_with_input_larger_than_any_pipe(sandbox):
    data = b"0123456789" * 100_000
    assert (await sandbox.run(["cat"], stdin=data)).stdout == data


async def test_run_cuts_output_at_its_limit_and_says_so(sandbox):
    result = await sandbox.run(["head", "-c", "100000", "/dev/zero"], output_bytes_max=10)
    assert (result.stdout, result.truncated, result.exit_code) == (bytes(10), True, 0)


async def test_run_keeps_the_output_when_it_times_out(sandbox):
    with pytest.raises(errors.CommandTimedOut) as caught:
        await sandbox.run("echo early; exec sleep 100", timeout_s=0.2)
    assert caught.value.stdout == b"early\n"


async def test_leaving_detaches_and_the_process_can_be_found_and_killed(server, sandbox):
    async with sandbox.start(["sleep", "100"]) as process:
        pid = process.pid
    assert [item.pid for item in await sandbox.list_processes()] == [pid]
    async with sandbox.attach(pid) as again:
        await sandbox.kill_process(pid)
        assert [event async for event in again.events()] == [
            Ended(137, "signal: killed", "signal: killed (out of memory)")
        ]
    with pytest.raises(errors.NotFound):
        await sandbox.terminate(pid)
    with pytest.raises(errors.NotFound):
        async with sandbox.attach(pid):
            pass


async def test_terminal_events(sandbox):
    async with sandbox.start(
        ["sh", "-c", "stty size; read x; echo got-$x"], stdin=True, pty=PtySize(91, 33)
    ) as process:
        await process.send_pty(b"yes\n")
        events = [event async for event in process.events()]
    text = b"".join(event.data for event in events if isinstance(event, PtyOutput))
    assert b"33 91\r\n" in text
    assert b"got-yes\r\n" in text
    assert isinstance(events[-1], Ended)


async def test_output_before_a_reset_is_delivered(sandbox):
    async with sandbox.start(["fault:reset"]) as process:
        events = process.events()
        assert await anext(events) == Stdout(b"before\n")
        with pytest.raises(errors.ConnectionLost):
            await anext(events)


async def test_files(sandbox, server):
    name = "/d/é \n'x"
    entry = await sandbox.files.write(name, b"data")
    assert (entry.path, entry.size_bytes, entry.kind) == (name, 4, "file")
    assert await sandbox.files.read(name) == b"data"
    assert [item.name for item in await sandbox.files.list("/d")] == ["é \n'x"]
    assert await sandbox.files.make_directory("/e/f") is True
    assert await sandbox.files.make_directory("/e/f") is False
    assert (await sandbox.files.move(name, "/e/g")).path == "/e/g"
    await sandbox.files.remove("/e")
    with pytest.raises(errors.NotFound):
        await sandbox.files.stat("/e/g")
    with pytest.raises(errors.NotFound):
        await sandbox.files.read("/e/g")


@pytest.mark.parametrize(("size", "word"), [(2, "more"), (4, "fewer")])
async def test_a_body_of_another_size_than_announced_is_an_error(sandbox, size, word):
    async def pieces():
        yield b"abc"

    with pytest.raises(errors.TransferIncomplete, match=word):
        await sandbox.files.write("/f", pieces(), size_bytes=size)


async def test_health_follows_the_state(server, sandbox):
    assert await sandbox.health()
    server.state.sandboxes[sandbox.sandbox_id]["state"] = "paused"
    assert not await sandbox.health()
