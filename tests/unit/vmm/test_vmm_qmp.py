"""The QMP client against a peer that the test plays: deadlines, order, events, descriptors, loss."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import VmmError, VmmTimeout
from agentenv.vmm._qmp import LINE_BYTES_MAX, ConnectionLost, QmpClient

GREETING = {"QMP": {"version": {}, "capabilities": []}}


class Peer:
    """QEMU's side: a listening socket, and what it reads and writes by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self.socket: socket.socket | None = None
        self._buffer = b""

    async def client(self) -> QmpClient:
        """A negotiated client of this peer."""
        connecting = asyncio.ensure_future(QmpClient.connect(self.path, lambda n, d: self.events.append((n, d)), 5))
        self.socket, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        await self.send(GREETING)
        command = await self.receive()
        assert command["execute"] == "qmp_capabilities"
        await self.send({"return": {}, "id": command["id"]})
        return await connecting

    async def receive(self) -> dict[str, Any]:
        assert self.socket is not None
        while b"\n" not in self._buffer:
            received = await asyncio.get_running_loop().sock_recv(self.socket, 4096)
            assert received, "the client hung up"
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    async def send(self, *messages: Mapping[str, Any]) -> None:
        assert self.socket is not None
        data = b"".join(json.dumps(message).encode() + b"\r\n" for message in messages)
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    def hang_up(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self._listener.close()


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    peer = Peer(tmp_path / "qmp.sock")
    yield peer
    peer.hang_up()


@contextlib.asynccontextmanager
async def connected(peer: Peer) -> AsyncIterator[QmpClient]:
    client = await peer.client()
    try:
        yield client
    finally:
        await client.close()


async def test_answers_find_their_commands_whatever_their_order(peer: Peer) -> None:
    async with connected(peer) as client:
        one, two = client.start("one", {"a": 1}), client.start("two")
        first, second = await peer.receive(), await peer.receive()
        assert (first["execute"], first["arguments"], second["execute"]) == ("one", {"a": 1}, "two")
        await peer.send({"return": 2, "id": second["id"]}, {"return": 1, "id": first["id"]})
        assert (await one, await two) == (1, 2)


async def test_a_refusal_is_an_error_with_the_peers_words(peer: Peer) -> None:
    async with connected(peer) as client:
        future = client.start("stop")
        command = await peer.receive()
        await peer.send({"error": {"class": "GenericError", "desc": "not now"}, "id": command["id"]})
        with pytest.raises(VmmError, match="not now"):
            await future


async def test_events_between_answers_reach_the_handler(peer: Peer) -> None:
    async with connected(peer) as client:
        future = client.start("cont")
        command = await peer.receive()
        await peer.send({"event": "RESUME", "timestamp": {}}, {"return": {}, "id": command["id"]})
        await future
        await peer.send({"event": "SHUTDOWN", "data": {"reason": "guest-reset"}})
        later = client.start("query-status")
        await peer.send({"return": {}, "id": (await peer.receive())["id"]})
        await later
        assert peer.events == [("RESUME", {}), ("SHUTDOWN", {"reason": "guest-reset"})]


async def test_a_command_without_an_answer_ends_at_its_deadline_and_the_next_one_works(peer: Peer) -> None:
    async with connected(peer) as client:
        with pytest.raises(VmmTimeout, match="stop"):
            await client.execute("stop", timeout_s=0.01)
        late = await peer.receive()
        future = client.start("query-status")
        command = await peer.receive()
        await peer.send({"return": "late", "id": late["id"]}, {"return": "mine", "id": command["id"]})
        assert await future == "mine"


async def test_a_cancelled_command_leaves_the_connection_usable(peer: Peer) -> None:
    async with connected(peer) as client:
        task = asyncio.ensure_future(client.execute("stop", timeout_s=60))
        first = await peer.receive()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        future = client.start("cont")
        command = await peer.receive()
        await peer.send({"return": {}, "id": first["id"]}, {"return": "ok", "id": command["id"]})
        assert await future == "ok"


async def test_a_lost_connection_ends_waiting_and_later_commands(peer: Peer) -> None:
    async with connected(peer) as client:
        waiting = client.start("stop")
        await peer.receive()
        peer.hang_up()
        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectionLost):
            await client.execute("cont", timeout_s=1)


async def test_a_descriptor_arrives_with_its_command(peer: Peer) -> None:
    async with connected(peer) as client:
        assert peer.socket is not None
        reading, writing = os.pipe()
        try:
            future = client.start("getfd", {"fdname": "x"}, fd=reading)
            data, fds, _, _ = socket.recv_fds(peer.socket, 4096, 1)
            command = json.loads(data)
            assert (command["execute"], len(fds)) == ("getfd", 1)
            os.write(writing, b"through")
            assert os.read(fds[0], 10) == b"through"
            os.close(fds[0])
            await peer.send({"return": {}, "id": command["id"]})
            await future
        finally:
            os.close(reading)
            os.close(writing)


async def test_a_peer_without_greeting_is_a_timeout_and_leaves_no_socket(peer: Peer) -> None:
    with pytest.raises(VmmTimeout, match="no QMP greeting"):
        await QmpClient.connect(peer.path, lambda *_: None, 0.02)


async def test_a_socket_that_never_appears_is_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(VmmTimeout):
        await QmpClient.connect(tmp_path / "none.sock", lambda *_: None, 0.02)


@pytest.mark.parametrize("garbage", [b"not json\n", b"x" * (LINE_BYTES_MAX + 70_000)], ids=["text", "endless line"])
async def test_garbage_from_the_peer_ends_the_connection(peer: Peer, garbage: bytes) -> None:
    async with connected(peer) as client:
        assert peer.socket is not None
        waiting = client.start("stop")
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(peer.socket, garbage)
        with pytest.raises(ConnectionLost):
            await waiting
