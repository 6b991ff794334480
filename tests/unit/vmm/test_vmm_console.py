"""The console's tail: bounded, drained, kept over a restart."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from agentenv.vmm import _console
from agentenv.vmm._console import CONSOLE_BYTES_MAX, Console


@pytest.fixture
def listener(tmp_path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "console.sock"))
    listener.listen()
    return listener


async def test_the_tail_is_the_last_bytes_also_after_the_vmm_died(tmp_path: Path, listener: socket.socket) -> None:
    console = Console(tmp_path / "saved")
    console.attach(tmp_path / "console.sock")
    guest, _ = listener.accept()
    guest.sendall(b"Linux booted\r\npanic")
    guest.close()
    listener.close()
    assert console.tail(5) == b"panic"
    assert console.tail(1000) == b"Linux booted\r\npanic"
    assert console.tail(0) == b""
    assert console.tail(1000) == b"Linux booted\r\npanic", "reading does not consume"
    console.close()


async def test_a_guest_that_prints_for_ever_costs_a_bounded_amount_of_memory(
    tmp_path: Path, listener: socket.socket
) -> None:
    console = Console(tmp_path / "saved")
    console.attach(tmp_path / "console.sock")
    guest, _ = listener.accept()
    guest.setblocking(False)
    sent = 0
    while sent < 4 * CONSOLE_BYTES_MAX:
        await asyncio.get_running_loop().sock_sendall(guest, b"x" * 4096)
        sent += 4096
        console.tail(1)
    await asyncio.get_running_loop().sock_sendall(guest, b"end")
    assert console.tail(3) == b"end"
    assert len(console.tail(1 << 30)) == CONSOLE_BYTES_MAX
    guest.close()
    listener.close()
    console.close()
    assert (tmp_path / "saved").stat().st_size == CONSOLE_BYTES_MAX


async def test_a_flood_is_drained_rarely_and_a_burst_at_once(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def record(delay: float, *rest: object) -> asyncio.TimerHandle:
        pauses.append(delay)
        return call_later(0, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_later", record)
    console = Console(tmp_path / "saved")
    console.attach(tmp_path / "console.sock")
    guest, _ = listener.accept()
    guest.setblocking(False)
    for _ in range(2 * _console._BURST_BYTES // 4096):
        await loop.sock_sendall(guest, b"x" * 4096)
        await asyncio.sleep(0)
    assert pauses[0] == _console._DRAIN_PAUSE_S
    assert pauses[-1] == _console._FLOOD_PAUSE_S
    monkeypatch.undo()
    guest.close()
    listener.close()
    console.close()


async def test_the_next_server_begins_with_the_saved_tail(tmp_path: Path, listener: socket.socket) -> None:
    first = Console(tmp_path / "saved")
    first.attach(tmp_path / "console.sock")
    guest, _ = listener.accept()
    guest.sendall(b"before ")
    first.close()
    guest.close()
    second = Console(tmp_path / "saved")
    second.attach(tmp_path / "console.sock")
    guest, _ = listener.accept()
    guest.sendall(b"after")
    assert second.tail(100) == b"before after"
    second.close()
    guest.close()
    listener.close()


async def test_a_missing_socket_leaves_the_console_empty(tmp_path: Path) -> None:
    console = Console(tmp_path / "saved")
    console.attach(tmp_path / "none.sock")
    assert console.tail(100) == b""
    console.close()
