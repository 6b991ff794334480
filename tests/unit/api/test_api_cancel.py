"""A client that goes away, or a request that takes too long, ends the handler; the node finishes or undoes the rest.

These speak ASGI directly (`Connection`): only so can a test say exactly when the client disappears.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from api_case import KEY, Connection, until
from starlette.applications import Starlette

from agentenv.api import ApiKeys, ApiSettings, create_app
from agentenv.clock import FakeClock
from agentenv.node.fake import FakeNode

BODY = b'{"templateID":"base"}'


async def held(connection: Connection, node: FakeNode, method: str) -> None:
    await until(lambda: method in node.calls)
    assert not connection.task.done()


async def test_a_create_ends_with_its_client(app: Starlette, node: FakeNode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agentenv.api")
    node.hold("create")
    connection = Connection(app, "POST", "/v2/sandboxes")
    connection.body(BODY)
    await held(connection, node, "create")
    connection.disconnect()
    await connection.task
    assert node.cancelled == ["create"]
    assert node.list_sandboxes() == []
    assert "operation='createSandbox' status=499" in caplog.records[-1].message


async def test_a_pause_ends_with_its_client(app: Starlette, node: FakeNode, client: httpx.AsyncClient) -> None:
    made = (await client.post("/v2/sandboxes", content=BODY)).json()
    node.hold("pause")
    connection = Connection(app, "POST", f"/sandboxes/{made['sandboxID']}/pause")
    connection.body(b"")
    await held(connection, node, "pause")
    connection.disconnect()
    await connection.task
    assert node.cancelled == ["pause"]


async def test_a_create_with_a_key_outlives_its_client_and_answers_the_retry(
    app: Starlette, node: FakeNode, client: httpx.AsyncClient
) -> None:
    gate = node.hold("create")
    headers = {"Idempotency-Key": "retry-me"}
    connection = Connection(app, "POST", "/v2/sandboxes", headers)
    connection.body(BODY)
    await held(connection, node, "create")
    connection.disconnect()
    await connection.task
    assert node.cancelled == []
    gate.set()
    await until(lambda: bool(node.list_sandboxes()))
    await asyncio.sleep(0)
    retry = await client.post("/v2/sandboxes", content=BODY, headers=headers)
    assert retry.status_code == 201
    assert [view.sandbox_id for view in node.list_sandboxes()] == [retry.json()["sandboxID"]]


async def test_a_client_that_leaves_while_sending_its_body_starts_nothing(app: Starlette, node: FakeNode) -> None:
    connection = Connection(app, "POST", "/v2/sandboxes")
    connection.body(BODY[:5], more=True)
    connection.disconnect()
    await connection.task
    assert node.calls == []


async def test_cancelling_the_request_task_cancels_the_handler(app: Starlette, node: FakeNode) -> None:
    node.hold("create")
    connection = Connection(app, "POST", "/v2/sandboxes")
    connection.body(BODY)
    await held(connection, node, "create")
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert node.cancelled == ["create"]


async def answer_of(
    node: FakeNode, settings: ApiSettings, clock: FakeClock, talk: Callable[[Connection], Awaitable[None]]
) -> tuple[int, dict[str, Any]]:
    connection = Connection(create_app(node, ApiKeys([KEY]), settings, clock), "POST", "/v2/sandboxes")
    await talk(connection)
    await connection.task
    return connection.status, json.loads(connection.sent[1]["body"])


async def test_a_request_over_its_budget_is_504_and_not_repeated_by_the_sdk(node: FakeNode, clock: FakeClock) -> None:
    node.hold("create")

    async def talk(connection: Connection) -> None:
        connection.body(BODY)

    status, body = await answer_of(node, ApiSettings(request_s_max=0.01), clock, talk)
    assert (status, body["error_code"]) == (504, "request_budget_exceeded")
    assert node.cancelled == ["create"]


async def test_a_body_that_never_ends_is_408(node: FakeNode, clock: FakeClock) -> None:
    async def talk(connection: Connection) -> None:
        connection.body(b"{", more=True)

    status, body = await answer_of(node, ApiSettings(body_read_s_max=0.01), clock, talk)
    assert (status, body["code"]) == (408, 408)
    assert node.calls == []
