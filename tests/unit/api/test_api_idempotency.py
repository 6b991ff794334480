"""A create that is repeated with its key starts one sandbox."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from api_case import KEY

from agentenv.api import ApiKeys, ApiSettings, create_app
from agentenv.clock import FakeClock
from agentenv.errors import AtCapacity
from agentenv.node.fake import FakeNode

Client = httpx.AsyncClient
BODY = b'{"templateID":"base"}'


async def create(client: Client, key: str = "k-1", body: bytes = BODY, path: str = "/v2/sandboxes") -> httpx.Response:
    return await client.post(path, content=body, headers={"Idempotency-Key": key})


async def turns(count: int = 20) -> None:
    """Let other tasks run as far as they can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_first_answer_is_replayed(client: Client, node: FakeNode) -> None:
    first, second = await create(client), await create(client)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert len(node.list_sandboxes()) == 1


async def test_another_key_starts_another_sandbox(client: Client, node: FakeNode) -> None:
    await create(client, "a")
    await create(client, "b")
    assert len(node.list_sandboxes()) == 2


@pytest.mark.parametrize(
    ("body", "path"), [(b'{"templateID":"base","timeout":9}', "/v2/sandboxes"), (BODY, "/sandboxes")]
)
async def test_the_same_key_with_another_request_is_422(client: Client, body: bytes, path: str) -> None:
    await create(client)
    answer = await create(client, body=body, path=path)
    assert answer.status_code == 422
    assert answer.json()["error_code"] == "idempotency_request_mismatch"


async def test_the_same_key_while_the_first_runs_is_409(client: Client, node: FakeNode) -> None:
    gate = node.hold("create")
    first = asyncio.create_task(create(client))
    await turns()
    second = await create(client)
    assert second.status_code == 409
    assert second.json()["error_code"] == "idempotency_in_progress"
    assert second.headers["retry-after"] == "1"
    gate.set()
    assert (await first).status_code == 201
    assert (await create(client)).json() == (await first).json()


async def test_a_failure_is_not_kept(client: Client, node: FakeNode) -> None:
    node.fail_next("create", AtCapacity("full"))
    assert (await create(client)).status_code == 429
    assert (await create(client)).status_code == 201


@pytest.mark.parametrize("key", ["", "A", "a b", "x" * 256, "a_b"])
async def test_a_malformed_key_is_400(client: Client, node: FakeNode, key: str) -> None:
    answer = await create(client, key)
    assert answer.status_code == 400
    assert "Idempotency-Key" in answer.json()["message"]
    assert node.calls == []


async def test_an_answer_is_forgotten_after_its_time(client: Client, node: FakeNode, clock: FakeClock) -> None:
    await create(client)
    clock.advance(86_399)
    await create(client)
    assert len(node.list_sandboxes()) == 1
    clock.advance(2)
    await create(client)
    assert len(node.list_sandboxes()) == 2


async def test_the_store_is_bounded_and_forgets_the_oldest(node: FakeNode, clock: FakeClock) -> None:
    app = create_app(node, ApiKeys([KEY]), ApiSettings(idempotency_entries_max=2), clock)
    transport = httpx.ASGITransport(app=app)
    async with Client(transport=transport, base_url="http://api", headers={"X-API-KEY": KEY}) as client:
        for key in ("a", "b", "c", "b"):
            await create(client, key)
        assert len(node.list_sandboxes()) == 3
        await create(client, "a")
        assert len(node.list_sandboxes()) == 4
        gate = node.hold("create")
        running = [asyncio.create_task(create(client, key)) for key in ("d", "e")]
        await turns()
        assert (await create(client, "f")).status_code == 429
        gate.set()
        await asyncio.gather(*running)


async def test_closing_the_app_cancels_what_runs(node: FakeNode, clock: FakeClock) -> None:
    app = create_app(node, ApiKeys([KEY]), ApiSettings(), clock)
    node.hold("create")
    transport = httpx.ASGITransport(app=app)
    async with Client(transport=transport, base_url="http://api", headers={"X-API-KEY": KEY}) as client:
        async with app.router.lifespan_context(app):
            first = asyncio.create_task(create(client))
            await turns()
        assert (await first).status_code == 503
    assert node.cancelled == ["create"]
