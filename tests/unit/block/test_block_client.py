"""The client against a scripted daemon: lost connections, repeats, deadlines, order, errors."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentenv.block import BlockClient
from agentenv.block.client import DEADLINES_S
from agentenv.errors import BlockError, StorageFull

# A step answers one request (a dict of its fields) or returns None to break the connection without an answer.
Step = Callable[[dict[str, Any]], dict[str, Any] | None]

HELLO = {"version": 1, "pid": 2, "keeper_pid": 3, "memory_mount": "/m", "disk_mount": "/d"}


class Script:
    """A daemon that answers the n-th request by the n-th step and the rest by the last."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.seen: list[dict[str, Any]] = []
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (length,) = struct.unpack("<I", await reader.readexactly(4))
                request = msgspec.json.decode(await reader.readexactly(length))
                self.seen.append(request)
                self.asked.set()
                step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
                answer = step(request)
                if answer is None:
                    return
                if answer:
                    body = msgspec.json.encode({"id": request["id"], **answer})
                    writer.write(struct.pack("<I", len(body)) + body)
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()


def ok(fields: dict[str, Any]) -> Step:
    return lambda _: {"ok": fields}


def refused(kind: str) -> Step:
    return lambda _: {"error": {"kind": kind, "message": "no"}}


def dies(_: dict[str, Any]) -> None:
    return None


def silent(_: dict[str, Any]) -> dict[str, Any]:
    return {}


@asynccontextmanager
async def talking_to(tmp_path: Path, script: Script, **deadlines_s: float) -> AsyncIterator[BlockClient]:
    server = await asyncio.start_unix_server(script.serve, tmp_path / "s")
    client = BlockClient(tmp_path / "s", deadlines_s={**DEADLINES_S, **deadlines_s})
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


async def test_a_repeatable_request_survives_the_death_of_the_daemon(tmp_path: Path) -> None:
    """The first blockd dies with the request; the second is asked the same."""
    script = Script(dies, dies, ok(HELLO))
    async with talking_to(tmp_path, script) as client:
        assert (await client.hello()).pid == 2
    assert [request["op"] for request in script.seen] == ["hello"] * 3


async def test_seal_is_repeated_with_the_same_fields(tmp_path: Path) -> None:
    """blockd keeps its last answer, so asking again cannot seal twice."""
    result = {"layer": "/u0", "data_bytes": 1, "index_entries": 1, "duration_us": 1}
    script = Script(dies, ok(result))
    async with talking_to(tmp_path, script) as client:
        assert (await client.seal_disk("d", "/u1")).layer == "/u0"
    first, second = ({**request, "id": 0} for request in script.seen)
    assert first == second


@pytest.mark.parametrize("call", ["capture_finish", "merge", "import_raw", "capture_start"])
async def test_what_cannot_be_repeated_says_that_its_outcome_is_unknown(tmp_path: Path, call: str) -> None:
    """And it is asked once only."""
    calls: dict[str, Callable[[BlockClient], Any]] = {
        "capture_finish": lambda client: client.capture_finish("j"),
        "merge": lambda client: client.merge(["/a"], "/b"),
        "import_raw": lambda client: client.import_raw("/a", "/b"),
        "capture_start": lambda client: client.capture_start(
            "j", pid=1, address=0, length_bytes=4096, parent="m", layer="/l", hold="buffer"
        ),
    }
    script = Script(dies)
    async with talking_to(tmp_path, script) as client:
        with pytest.raises(BlockError) as caught:
            await calls[call](client)
    assert caught.value.kind == "outcome_unknown"
    assert len(script.seen) == 1


async def test_answers_may_come_in_any_order(tmp_path: Path) -> None:
    """A slow merge does not hold up a list behind it on the same connection."""
    async with talking_to(tmp_path, Script(silent, ok({"exports": []})), merge=0.2) as client:
        merging = asyncio.create_task(client.merge(["/a"], "/b"))
        await asyncio.sleep(0)
        assert await client.exports() == []
        assert not merging.done()
        with pytest.raises(BlockError) as caught:
            await merging
    assert caught.value.kind == "outcome_unknown"


async def test_a_full_disk_and_other_refusals_are_told_apart(tmp_path: Path) -> None:
    """By kind, never by text."""
    async with talking_to(tmp_path, Script(refused("no_space"), refused("corrupt"))) as client:
        with pytest.raises(StorageFull):
            await client.exports()
        with pytest.raises(BlockError) as caught:
            await client.exports()
    assert caught.value.kind == "corrupt"


async def test_what_is_gone_already_can_be_ended_again(tmp_path: Path) -> None:
    """Unexport and cancel are idempotent; abandon of nothing is an error."""
    async with talking_to(tmp_path, Script(refused("not_found"))) as client:
        await client.unexport("x")
        await client.capture_cancel("x")
        with pytest.raises(BlockError) as caught:
            await client.abandon("x")
    assert caught.value.kind == "not_found"


async def test_nobody_there_is_unreachable_and_nothing_was_asked(tmp_path: Path) -> None:
    """The caller may safely try another way."""
    client = BlockClient(tmp_path / "nobody", deadlines_s={**DEADLINES_S, "hello": 0.05})
    with pytest.raises(BlockError) as caught:
        await client.hello()
    assert caught.value.kind == "unreachable"
    await client.close()


async def test_a_cancelled_caller_leaves_the_connection_in_order(tmp_path: Path) -> None:
    """Its late answer is dropped and others are served."""
    script = Script(silent, ok(HELLO))
    async with talking_to(tmp_path, script) as client:
        waiting = asyncio.create_task(client.hello())
        await script.asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await client.hello()).pid == 2


async def test_a_closed_client_opens_again(tmp_path: Path) -> None:
    """Close is idempotent and not the end."""
    async with talking_to(tmp_path, Script(ok(HELLO))) as client:
        await client.hello()
        await client.close()
        await client.close()
        assert (await client.hello()).version == 1


async def test_nonsense_is_an_error_not_a_wait(tmp_path: Path) -> None:
    """An answer of the wrong shape names the operation."""
    async with talking_to(tmp_path, Script(ok({"pid": "x"}))) as client:
        with pytest.raises(BlockError, match="hello"):
            await client.hello()
