"""The client of the control socket, against a fake proxy and (marked `host`) the built one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_proxy import FakeProxy
from tests.host import built

from agentenv.errors import ProxyError
from agentenv.routing import ProxyControl, ProxyHealth

GOLDEN = Path(__file__).parents[3] / "spec" / "wire" / "route"


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.json").read_bytes().rstrip()


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeProxy]:
    async with FakeProxy(tmp_path / "proxy.sock") as proxy:
        yield proxy


@pytest.fixture
async def control(fake: FakeProxy) -> AsyncIterator[ProxyControl]:
    async with ProxyControl(fake.socket) as client:
        yield client


def answer_with(fake: FakeProxy, status: str, body: bytes) -> None:
    fake.raw_answer = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def test_requests_have_their_golden_bytes(fake: FakeProxy, control: ProxyControl) -> None:
    await control.withdraw({41, 3})
    await control.live([41, 40], below=43)
    await control.shutdown()
    assert fake.requests == [
        ("POST /withdraw", golden("withdraw-request")),
        ("PUT /live", golden("live-request")),
        ("POST /shutdown", b""),
    ]


async def test_answers_are_read(fake: FakeProxy, control: ProxyControl) -> None:
    answer_with(fake, "200 OK", golden("withdraw-answer"))
    assert await control.withdraw([3]) == 2
    assert await control.live([], below=4) == 2
    answer_with(fake, "200 OK", golden("health-answer"))
    assert await control.health() == ProxyHealth(7, "127.0.0.1:8000", 1, (41,))


@pytest.mark.parametrize(
    ("status", "body"),
    [("400 Bad Request", b'{"code":400,"message":"no"}'), ("200 OK", b"<html>"), ("200 OK", b"[]")],
)
async def test_other_answers_are_proxy_errors(fake: FakeProxy, control: ProxyControl, status: str, body: bytes) -> None:
    answer_with(fake, status, body)
    with pytest.raises(ProxyError):
        await control.withdraw([1])


async def test_an_absent_proxy_is_named(tmp_path: Path) -> None:
    async with ProxyControl(tmp_path / "none.sock") as control:
        with pytest.raises(ProxyError, match=r"none\.sock"):
            await control.health()


async def test_a_restarted_proxy_is_found_again(tmp_path: Path) -> None:
    socket = tmp_path / "proxy.sock"
    async with ProxyControl(socket) as control:
        for _ in range(2):
            socket.unlink(missing_ok=True)
            async with FakeProxy(socket):
                assert (await control.health()).pid == 7


async def _conforms(control: ProxyControl) -> None:
    """What holds of every proxy without traffic."""
    assert await control.withdraw([1, 2]) == 0
    assert await control.withdraw([]) == 0
    assert await control.live([5], below=9) == 0
    health = await control.health()
    assert health.pid > 0
    assert health.generations == ()
    with pytest.raises(ProxyError):
        await control.withdraw([-1])
    await asyncio.gather(*(control.withdraw([number]) for number in range(20)))
    await control.shutdown()


async def test_the_fake_conforms(fake: FakeProxy, control: ProxyControl) -> None:
    await _conforms(control)
    assert fake.is_stopping


@pytest.mark.host
async def test_the_built_proxy_conforms(tmp_path: Path) -> None:
    binary = built("aenv-proxy") / "aenv-proxy"
    sockets = {name: str(tmp_path / f"{name}.sock") for name in ("api", "resolver", "control")}
    options = [word for name, path in sockets.items() for word in (f"--{name}", path)]
    process = await asyncio.create_subprocess_exec(
        binary, "--listen", "127.0.0.1:0", *options, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        # Its first line says that it listens.
        await asyncio.wait_for(process.stderr.readline(), timeout=10)
        async with ProxyControl(Path(sockets["control"])) as control:
            assert (await control.health()).pid == process.pid
            await _conforms(control)
        assert await asyncio.wait_for(process.wait(), timeout=10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
