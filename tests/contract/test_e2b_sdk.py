"""The official Python SDK against the API on a fake node, over a real socket: everything that needs no guest."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import e2b
import pytest
import uvicorn
from e2b import Sandbox, SandboxQuery, SandboxState

from agentenv.api import ApiKeys, ApiSettings, create_app
from agentenv.clock import FakeClock
from agentenv.errors import AtCapacity, GuestUnresponsive, NodeStopping
from agentenv.node.fake import FakeNode

KEY = "e2b_" + "0123456789abcdef0123456789abcdef01234567"
START_S_MAX = 10.0


@dataclass(frozen=True)
class Served:
    """A node and the loop that its server runs on."""

    node: FakeNode
    port: int

    def options(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.port}"
        return {"api_key": KEY, "api_url": url, "sandbox_url": url}

    def create(self, **options: object) -> Sandbox:
        return Sandbox.create("base", **options, **self.options())  # type: ignore[arg-type]


@contextlib.contextmanager
def serving(node: FakeNode) -> Iterator[int]:
    """uvicorn in a thread of its own, as the SDK blocks; ends with the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(node, ApiKeys([KEY]), ApiSettings(), node.clock)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(START_S_MAX)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    # The SDK compares with the real date, so the fake clock starts there.
    node = FakeNode(FakeClock(wall=datetime.now(UTC).timestamp()))
    with serving(node) as port:
        yield Served(node, port)


def test_create_get_info_and_kill(served: Served) -> None:
    sandbox = served.create(timeout=120, metadata={"owner": "me & you"}, envs={"A": "1"})
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"owner": "me & you"}
    assert info.state is SandboxState.RUNNING
    assert info.end_at - info.started_at == timedelta(seconds=120)
    assert sandbox.get_host(3000) == f"3000-{sandbox.sandbox_id}.localhost:8000"
    assert served.node.get(sandbox.sandbox_id).spec.env_vars == {"A": "1"}
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    with pytest.raises(e2b.SandboxNotFoundException):
        sandbox.get_info()


def test_set_timeout_pause_and_connect(served: Served) -> None:
    sandbox = served.create()
    sandbox.set_timeout(1_000)
    assert served.node.get(sandbox.sandbox_id).end_at == served.node.clock.wall() + 1_000
    assert sandbox.pause()
    assert not sandbox.pause()
    assert sandbox.get_info().state is SandboxState.PAUSED
    same = Sandbox.connect(sandbox.sandbox_id, timeout=60, **served.options())
    assert same.sandbox_id == sandbox.sandbox_id
    assert same.get_info().state is SandboxState.RUNNING


@pytest.mark.parametrize("call", ["get_info", "set_timeout", "pause", "connect", "create_snapshot", "fork"])
def test_a_killed_sandbox_is_not_found(served: Served, call: str) -> None:
    sandbox = served.create()
    sandbox.kill()
    arguments = [60] if call == "set_timeout" else []
    with pytest.raises(e2b.SandboxNotFoundException):
        getattr(sandbox, call)(*arguments)


def test_list_pages_and_filters(served: Served) -> None:
    made: list[str] = []
    for number in range(5):
        served.node.clock.advance(1)
        made.append(served.create(metadata={"n": str(number), "team a&b": "50% = half"}).sandbox_id)
    Sandbox.pause(made[0], **served.options())

    def ids(**options: object) -> list[str]:
        found: list[str] = []
        pages = Sandbox.list(**options, **served.options())  # type: ignore[arg-type]
        while pages.has_next:
            found += [entry.sandbox_id for entry in pages.next_items()]
        return found

    assert ids() == made[::-1]
    assert ids(limit=2) == made[::-1]
    assert ids(limit=2, order="asc") == made
    assert ids(query=SandboxQuery(metadata={"team a&b": "50% = half", "n": "3"})) == [made[3]]
    assert ids(query=SandboxQuery(state=[SandboxState.PAUSED])) == [made[0]]
    assert ids(query=SandboxQuery(template="base"), limit=4) == made[::-1]
    middle = Sandbox.get_info(made[2], **served.options()).started_at  # type: ignore[call-overload]
    assert ids(query=SandboxQuery(started_after=middle)) == made[:1:-1]


def test_snapshots_are_listed_used_and_deleted(served: Served) -> None:
    sandbox = served.create()
    named = sandbox.create_snapshot(name="my-work")
    unnamed = sandbox.create_snapshot()
    assert named.snapshot_id == "my-work:default"
    assert named.names == ["my-work:default"]
    listed = sandbox.list_snapshots(limit=1)
    found = [entry.snapshot_id for _ in range(2) for entry in listed.next_items()]
    assert set(found) == {named.snapshot_id, unnamed.snapshot_id}
    assert not listed.has_next
    child = Sandbox.create(named.snapshot_id, **served.options())
    assert child.sandbox_id != sandbox.sandbox_id
    assert Sandbox.delete_snapshot(named.snapshot_id, **served.options())
    assert not Sandbox.delete_snapshot(named.snapshot_id, **served.options())


def test_fork_returns_sandboxes_and_errors(served: Served) -> None:
    sandbox = served.create()
    served.node.fail_next("fork_child", AtCapacity("the node is full"))
    children = sandbox.fork(count=3, timeout=60)
    assert [type(child).__name__ for child in children] == ["Sandbox", "Sandbox", "RateLimitException"]
    sandbox.pause()
    with pytest.raises(e2b.SandboxException, match="409"):
        sandbox.fork()


def test_errors_become_the_sdks_exceptions(served: Served) -> None:
    with pytest.raises(e2b.SandboxException, match=r"404.*nothing"):
        Sandbox.create("nothing", **served.options())
    with pytest.raises(e2b.AuthenticationException):
        Sandbox.create("base", **{**served.options(), "api_key": "e2b_" + "0" * 40})
    with pytest.raises(e2b.SandboxException, match=r"400.*network\.allowOut"):
        served.create(network={"allow_out": ["1.1.1.1"]})
    with pytest.raises(e2b.SandboxException, match=r"400.*autoPauseMemory"):
        served.create(lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
    with pytest.raises(e2b.SandboxException, match=r"400.*timeout"):
        served.create(timeout=0)


def test_a_failed_start_is_not_repeated_and_a_stopping_server_is_busy(served: Served) -> None:
    served.node.fail_next("create", GuestUnresponsive("the guest did not answer"))
    with pytest.raises(e2b.SandboxException, match="the guest did not answer"):
        served.create()
    assert served.node.calls == ["create"]
    served.node.fail_next("create", NodeStopping("the server is stopping"))
    with pytest.raises(e2b.ServiceBusyException):
        served.create(retries=0)


def test_a_full_node_is_tried_again_by_the_sdk(served: Served) -> None:
    served.node.fail_next("create", AtCapacity("full"))
    served.create()
    assert served.node.calls == ["create", "create"]


def test_an_idempotent_create_starts_one_sandbox(served: Served) -> None:
    first = served.create(idempotency_key="once-1")
    assert served.create(idempotency_key="once-1").sandbox_id == first.sandbox_id
    assert len(served.node.list_sandboxes()) == 1


async def test_the_async_client_works_too(served: Served) -> None:
    sandbox = await e2b.AsyncSandbox.create("base", **served.options())
    assert (await sandbox.get_info()).sandbox_id == sandbox.sandbox_id
    assert await sandbox.pause()
    assert await sandbox.kill()


@pytest.mark.parametrize("request_head", [b"POST /v2/sandboxes HTTP/1.1\r\n"])
def test_a_client_that_hangs_up_ends_its_create(served: Served, request_head: bytes) -> None:
    """Through uvicorn: without our reading `http.disconnect`, nothing would cancel the handler."""
    served.node.hold("create")
    body = b'{"templateID":"base"}'
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        head = f"Host: x\r\nX-API-KEY: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(request_head + head.encode() + body)
        _until(lambda: served.node.calls == ["create"])
    _until(lambda: served.node.cancelled == ["create"])


def test_a_chunked_body_and_a_head_of_many_headers_are_fine(served: Served) -> None:
    """The JS SDK sends chunked bodies without Content-Length."""
    import httpx

    def chunks() -> Iterator[bytes]:
        yield b'{"template'
        yield b'ID":"base"}'

    headers = {"X-API-KEY": KEY, "lang": "js", "sdk_runtime": "node", "browser": "unknown"}
    answer = httpx.post(f"http://127.0.0.1:{served.port}/v2/sandboxes", content=chunks(), headers=headers)
    assert answer.status_code == 201


def _until(condition: object) -> None:
    """Wait for another thread, woken by nothing; the deadline makes a failure of what would be a hang."""
    import time

    deadline = time.monotonic() + START_S_MAX
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)
