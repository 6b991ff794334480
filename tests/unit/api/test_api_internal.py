"""The resolver: the node's answer on the wire, errors as refusals that the proxy can hand on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_case import start

from agentenv.api.internal import create_internal_app
from agentenv.errors import AtCapacity, VmmError
from agentenv.model import SandboxState
from agentenv.node.fake import FakeNode

Client = httpx.AsyncClient
UNKNOWN = "i" + "0" * 20


@pytest.fixture
async def resolver(node: FakeNode) -> AsyncIterator[Client]:
    transport = httpx.ASGITransport(app=create_internal_app(node, resolve_s_max=0.05))
    async with Client(transport=transport, base_url="http://resolver") as client:
        yield client


async def ask(resolver: Client, sandbox_id: str, port: int = 8080) -> dict[str, Any]:
    answer = await resolver.post("/resolve", json={"sandbox_id": sandbox_id, "port": port})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_a_running_sandbox_has_a_target_with_what_must_be_checked(client: Client, resolver: Client) -> None:
    network = {"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}"}
    made = await start(client, network=network)
    target = await ask(resolver, made["sandboxID"])
    assert target == {
        "address": "10.12.0.1",
        "port": 8080,
        "generation": 1,
        "traffic_token": made["trafficAccessToken"],
        "host_mask": "localhost:${PORT}",
    }
    assert await ask(resolver, f"{made['sandboxID']}-{made['clientID']}") == target


@pytest.mark.parametrize("sandbox_id", [UNKNOWN, "", "nonsense", "\ud800", "x" * 1_000, "../../etc"])
async def test_an_unknown_sandbox_is_refused_in_the_words_that_the_sdk_knows(resolver: Client, sandbox_id: str) -> None:
    raw = json.dumps({"sandbox_id": sandbox_id, "port": 80}).encode()
    answer = await resolver.post("/resolve", content=raw)
    refuse = answer.json()["refuse"]
    assert (refuse["status"], refuse["body"]["message"]) == (502, "The sandbox was not found")


async def test_a_paused_sandbox_is_resumed_only_where_it_may_be(client: Client, resolver: Client) -> None:
    for auto_resume in (False, True):
        made = await start(client, autoResume={"enabled": auto_resume})
        await client.post(f"/sandboxes/{made['sandboxID']}/pause")
        answer = await ask(resolver, made["sandboxID"])
        assert ("refuse" in answer) is not auto_resume


async def test_a_sandbox_in_transition_is_409(client: Client, resolver: Client, node: FakeNode) -> None:
    made = await start(client)
    node.replace(made["sandboxID"], state=SandboxState.PAUSING)
    assert (await ask(resolver, made["sandboxID"]))["refuse"]["status"] == 409


@pytest.mark.parametrize(("error", "status"), [(AtCapacity("full"), 429), (VmmError("it broke"), 500)])
async def test_an_error_of_the_node_is_a_refusal_with_the_tables_status(
    resolver: Client, node: FakeNode, error: Exception, status: int
) -> None:
    node.fail_next("resolve_route", error)
    refuse = (await ask(resolver, UNKNOWN))["refuse"]
    assert (refuse["status"], refuse["body"]["code"]) == (status, status)
    assert refuse["headers"]["content-type"] == "application/json"
    assert "content-length" not in refuse["headers"]


async def test_a_resume_that_takes_too_long_is_504(resolver: Client, node: FakeNode) -> None:
    node.hold("resolve_route")
    assert (await ask(resolver, UNKNOWN))["refuse"]["status"] == 504
    assert node.cancelled == ["resolve_route"]


async def test_a_bug_is_500_and_no_refusal(resolver: Client, node: FakeNode) -> None:
    node.fail_next("resolve_route", RuntimeError("secret"))
    answer = await resolver.post("/resolve", json={"sandbox_id": UNKNOWN, "port": 80})
    assert answer.status_code == 500
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 4_000,
        b"x" * 5_000,
        b'{"sandbox_id":"a"}',
        b'{"sandbox_id":1,"port":80}',
        b'{"sandbox_id":"a","port":0}',
        b'{"sandbox_id":"a","port":65536}',
        b'{"sandbox_id":"a","port":true}',
        b'{"sandbox_id":"a","port":1.5}',
    ],
)
async def test_a_bad_question_is_refused(resolver: Client, node: FakeNode, body: bytes) -> None:
    answer = await resolver.post("/resolve", content=body)
    assert answer.status_code in (400, 413)
    assert answer.json()["code"] == answer.status_code
    assert node.calls == []


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/resolve", 405), ("POST", "/sandboxes", 404)])
async def test_nothing_else_is_served_there(resolver: Client, method: str, path: str, status: int) -> None:
    answer = await resolver.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (status, status)
