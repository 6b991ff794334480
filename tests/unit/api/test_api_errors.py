"""Every error, wherever it comes from, has the status of the table and the one body that the SDKs can parse."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from typing import Any

import httpx
import pytest

from agentenv import errors
from agentenv.api import errors as api_errors
from agentenv.api.errors import ANSWERS, answer_for, error_response
from agentenv.api.routes import ENDPOINTS
from agentenv.clock import FakeClock
from agentenv.node.fake import FakeNode

Client = httpx.AsyncClient
ANY_ID = "i" + "0" * 20
PATHS = {
    "{sandbox_id}": ANY_ID,
    "{template_id}": "base",
    "{snapshot_id}": "base",
    "{alias}": "base",
    "{digest}": "sha256:" + "0" * 64,
}
ALL_CLASSES = [
    cls
    for module in (errors, api_errors)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, errors.AenvError)
]


def path_of(template: str) -> str:
    for name, value in PATHS.items():
        template = template.replace(name, value)
    return template


def check_shape(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["code"] == status
    assert isinstance(body["message"], str)
    assert body["message"]
    assert body.keys() <= {"code", "message", "error_code"}
    return body


ROUTES = [pytest.param(endpoint, id=endpoint.operation) for endpoint in ENDPOINTS]
AUTHENTICATED = [param for param in ROUTES if param.values[0].authenticated]
WITH_BODY = [param for param in AUTHENTICATED if param.values[0].body.__name__ != "NoBody"]


@pytest.mark.parametrize("headers", [{}, {"X-API-KEY": ""}, {"X-API-KEY": "e2b_wrong"}, {"Authorization": "Bearer x"}])
@pytest.mark.parametrize("endpoint", AUTHENTICATED)
async def test_a_missing_or_wrong_key_is_401_on_every_route(
    client: Client, node: FakeNode, endpoint: Any, headers: dict[str, str]
) -> None:
    del client.headers["X-API-KEY"]
    check_shape(await client.request(endpoint.method, path_of(endpoint.path), headers=headers), 401)
    assert node.calls == []


HOSTILE_BODIES = [
    pytest.param(b"{", id="malformed"),
    pytest.param(b'{"timeout": NaN}', id="nan"),
    pytest.param(b'{"timeout": "5"}' + b"{" * 9, id="trailing"),
    pytest.param(b'\xff\xfe{"timeout": 5}', id="not utf-8"),
    pytest.param(b'{"x": ' + b"[" * 200_000, id="deeply nested"),
    pytest.param(b"[]", id="a list"),
    pytest.param(b'"text"', id="a string"),
    pytest.param(b'{"x": "\\ud800"}', id="lone surrogate"),
]


@pytest.mark.parametrize("body", HOSTILE_BODIES)
@pytest.mark.parametrize("endpoint", WITH_BODY)
async def test_hostile_bodies_are_400_on_every_route(
    client: Client, node: FakeNode, endpoint: Any, body: bytes
) -> None:
    check_shape(await client.request(endpoint.method, path_of(endpoint.path), content=body), 400)
    assert node.calls == []


@pytest.mark.parametrize("endpoint", WITH_BODY)
async def test_a_large_body_is_413_on_every_route_with_or_without_a_length(client: Client, endpoint: Any) -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b" " * (32 << 10)

    for content in (b" " * ((1 << 20) + 1), chunks()):
        check_shape(await client.request(endpoint.method, path_of(endpoint.path), content=content), 413)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/nothing", "/sandboxes/", "/v2/sandboxes/x/y", "/sandboxes/a%2Fb/pause/x"])
async def test_an_unknown_path_is_404(client: Client, method: str, path: str) -> None:
    body = check_shape(await client.request(method, path), 404)
    assert "no such route" in body["message"]


@pytest.mark.parametrize(("method", "path"), [("PUT", "/sandboxes"), ("PATCH", "/health"), ("POST", "/templates")])
async def test_a_wrong_method_is_405_and_names_the_right_ones(client: Client, method: str, path: str) -> None:
    answer = await client.request(method, path)
    check_shape(answer, 405)
    assert answer.headers["allow"]


@pytest.mark.parametrize("raw", ["doesnotexist", "i" + "A" * 20, "%00", "..%2F..", "i" + "0" * 400, "%E2%98%83"])
@pytest.mark.parametrize("endpoint", [param for param in ROUTES if "{sandbox_id}" in param.values[0].path])
async def test_what_is_no_sandbox_id_is_404(client: Client, endpoint: Any, raw: str) -> None:
    content = b'{"timeout": 5}' if endpoint.body.__name__ != "NoBody" else b""
    path = endpoint.path.replace("{sandbox_id}", raw)
    check_shape(await client.request(endpoint.method, path, content=content), 404)


async def test_a_path_that_is_not_utf8_is_400(client: Client) -> None:
    check_shape(await client.get("/templates/aliases/%ff"), 400)


async def test_an_unknown_template_is_404(client: Client) -> None:
    check_shape(await client.post("/v2/sandboxes", json={"templateID": "nothing"}), 404)


REFUSED = [
    ("timeout", {"timeout": -1}),
    ("timeout", {"timeout": 0}),
    ("timeout", {"timeout": 30 * 86_400 + 1}),
    ("timeout", {"timeout": 10**30}),
    ("timeout", {"timeout": "60"}),
    ("timeout", {"timeout": True}),
    ("autoPause", {"autoPause": "yes"}),
    ("autoPauseMemory", {"autoPauseMemory": False}),
    ("mcp", {"mcp": {"server": {}}}),
    ("iam", {"iam": {"tokens": {"a": {}}}}),
    ("volumeMounts", {"volumeMounts": [{"name": "v", "path": "/v"}]}),
    ("network.allowOut", {"network": {"allowOut": ["1.1.1.1"]}}),
    ("network.denyOut", {"network": {"denyOut": ["1.1.1.1"]}}),
    ("network.dnsServers", {"network": {"dnsServers": ["1.1.1.1"]}}),
    ("network.egressProxy", {"network": {"egressProxy": {"address": "x"}}}),
    ("network.httpsPorts", {"network": {"httpsPorts": [443]}}),
    ("network.rules", {"network": {"rules": {"example.com": []}}}),
    ("network.maskRequestHost", {"network": {"maskRequestHost": "a\r\nX-Evil: 1"}}),
    ("metadata", {"metadata": {"a": 1}}),
    ("metadata", {"metadata": [1]}),
    ("metadata", {"metadata": {"a": "x" * (64 << 10)}}),
    ("envVars", {"envVars": {"A=B": "1"}}),
    ("envVars", {"envVars": {"": "1"}}),
    ("envVars", {"envVars": {"A": "\0"}}),
    ("templateID", {"templateID": ""}),
    ("templateID", {"templateID": None}),
    ("templateID", {"templateID": "x" * 300}),
]


@pytest.mark.parametrize(("name", "extra"), REFUSED)
async def test_bad_values_and_missing_features_are_refused_by_name(
    client: Client, node: FakeNode, name: str, extra: dict[str, Any]
) -> None:
    body = check_shape(await client.post("/v2/sandboxes", json={"templateID": "base", **extra}), 400)
    assert name in body["message"]
    assert node.calls == []


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1e300", "9" * 5_000])
async def test_numbers_beyond_any_range_are_400(client: Client, number: str) -> None:
    answer = await client.post("/v2/sandboxes", content=f'{{"templateID": "base", "timeout": {number}}}')
    body = check_shape(answer, 400)
    assert "timeout" in body["message"]
    assert len(body["message"]) < 300


async def test_private_ingress_needs_a_secured_sandbox(client: Client) -> None:
    body = {"templateID": "base", "network": {"allowPublicTraffic": False}}
    assert "secure" in check_shape(await client.post("/sandboxes", json=body), 400)["message"]


async def test_denying_all_egress_is_allow_internet_access_false(client: Client, node: FakeNode) -> None:
    body = {"templateID": "base", "network": {"denyOut": ["0.0.0.0/0"]}}
    assert (await client.post("/v2/sandboxes", json=body)).status_code == 201
    assert node.list_sandboxes()[0].spec.network.allow_internet is False


@pytest.mark.parametrize(
    ("verb", "body", "name"),
    [
        ("fork", {"count": 0}, "count"),
        ("fork", {"count": -1}, "count"),
        ("fork", {"count": 101}, "count"),
        ("fork", {"count": 1.5}, "count"),
        ("fork", {"count": True}, "count"),
        ("fork", {"timeout": 0}, "timeout"),
        ("pause", {"memory": False}, "memory"),
        ("pause", {"requireHealthyGuest": True}, "requireHealthyGuest"),
        ("snapshots", {"memory": False}, "memory"),
        ("snapshots", {"name": "no spaces"}, "name"),
        ("snapshots", {"name": "a/b/c"}, "name"),
        ("snapshots", {"name": "../x"}, "name"),
        ("snapshots", {"name": "s" + "0" * 20}, "name"),
        ("connect", {"memory": False}, "memory"),
        ("connect", {"timeout": -5}, "timeout"),
        ("resume", {"memory": False}, "memory"),
        ("timeout", {}, "timeout"),
        ("timeout", {"timeout": -1}, "timeout"),
        ("timeout", {"timeout": None}, "timeout"),
        ("refreshes", {"duration": -1}, "duration"),
    ],
)
async def test_bad_values_on_a_sandbox_are_refused_by_name(
    client: Client, verb: str, body: dict[str, Any], name: str
) -> None:
    made = (await client.post("/v2/sandboxes", json={"templateID": "base"})).json()
    answer = await client.post(f"/sandboxes/{made['sandboxID']}/{verb}", json=body)
    assert name in check_shape(answer, 400)["message"]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "\u0661"}, "limit"),
        ({"order": "up"}, "order"),
        ({"nextToken": "x"}, "nextToken"),
        ({"nextToken": "MQ"}, "nextToken"),
        ({"nextToken": "\u00e4"}, "nextToken"),
        ({"nextToken": "A" * 10_000}, "nextToken"),
        ({"state": "asleep"}, "state"),
        ({"startedAfter": "yesterday"}, "startedAfter"),
        ({"metadata": "novalue"}, "metadata"),
    ],
)
async def test_bad_queries_are_refused_by_name(client: Client, query: dict[str, str], name: str) -> None:
    assert name in check_shape(await client.get("/v2/sandboxes", params=query), 400)["message"]


@pytest.mark.parametrize("cls", ALL_CLASSES)
async def test_every_error_class_becomes_its_line_of_the_table(client: Client, node: FakeNode, cls: Any) -> None:
    node.fail_next("create", cls("what happened"))
    answer = await client.post("/v2/sandboxes", json={"templateID": "base"})
    line = answer_for(cls("x"))
    body = check_shape(answer, line.status)
    assert body["message"] == "what happened"
    assert body.get("error_code") == line.error_code
    assert answer.headers.get("should-retry") == {None: None, True: "true", False: "false"}[line.should_retry]


def test_the_statuses_that_clients_depend_on() -> None:
    wanted = {
        errors.InvalidRequest: 400,
        errors.Unsupported: 400,
        api_errors.NotServed: 501,
        errors.Unauthorized: 401,
        errors.SandboxNotFound: 404,
        errors.TemplateNotFound: 404,
        errors.Conflict: 409,
        errors.AtCapacity: 429,
        errors.NodeStopping: 503,
        errors.StorageFull: 507,
        errors.StoreUnavailable: 503,
        errors.RegistryError: 502,
        errors.ImageNotFound: 404,
        errors.GuestUnresponsive: 504,
        errors.VmmTimeout: 500,
        errors.HostUnsuitable: 500,
    }
    assert {cls: answer_for(cls("x")).status for cls in wanted} == wanted
    retried = {cls for cls, line in ANSWERS.items() if line.retry_after_s is not None}
    assert retried == {
        errors.AtCapacity,
        errors.RegistryError,
        errors.NodeStopping,
        errors.StoreUnavailable,
        api_errors.IdempotencyInProgress,
    }


def test_an_error_without_text_still_has_a_message() -> None:
    assert json.loads(error_response(errors.Conflict()).body)["message"]


@pytest.mark.parametrize(
    ("endpoint", "planted"),
    [(param, name) for param, name in (("/v2/sandboxes", "list_sandboxes"), (f"/sandboxes/{ANY_ID}", "get"))],
)
async def test_a_bug_is_500_with_an_id_that_the_log_has_and_nothing_else(
    client: Client, node: FakeNode, caplog: pytest.LogCaptureFixture, endpoint: str, planted: str
) -> None:
    node.fail_next(planted, RuntimeError("secret detail"))
    body = check_shape(await client.get(endpoint), 500)
    assert "secret" not in json.dumps(body)
    bug = next(record for record in caplog.records if "bug" in record.message)
    incident = body["message"].rsplit(" ", 1)[1]
    assert incident in bug.message
    assert bug.exc_info is not None
    assert isinstance(bug.exc_info[1], RuntimeError)


async def test_each_changing_request_is_logged_with_its_duration_and_no_reading_one(
    client: Client, node: FakeNode, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agentenv.api")
    gate = node.hold("create")
    create = asyncio.create_task(client.post("/v2/sandboxes", json={"templateID": "base"}))
    for _ in range(20):
        await asyncio.sleep(0)
    assert node.calls == ["create"]
    clock.advance(0.25)
    gate.set()
    await create
    await client.get("/v2/sandboxes")
    await client.delete(f"/sandboxes/{ANY_ID}")
    lines = [record.message for record in caplog.records if record.name == "agentenv.api"]
    assert len(lines) == 2
    assert "operation='createSandbox' status=201 duration_ms=250.0" in lines[0]
    assert f"target='{ANY_ID}' error='SandboxNotFound'" in lines[1]
