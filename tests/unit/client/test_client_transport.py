"""Retries, limits and errors of one exchange, against a scripted transport."""

from __future__ import annotations

import httpx
import pytest

from agentenv.client import AenvClient, errors
from agentenv.client.transport import RETRIES_MAX


class Script:
    """Answers in order, and records requests and waits."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.waits = []

    def __call__(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(self, seconds):
        self.waits.append(seconds)

    def client(self):
        return AenvClient("http://server", "key", http_transport=httpx.MockTransport(self), sleep=self.sleep)


def busy(status=503, **headers):
    body = {"code": status, "message": "busy"}
    return httpx.Response(status, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


async def test_idempotent_calls_wait_as_told_and_repeat():
    script = Script(busy(retry_after="2"), busy(429), httpx.Response(204))
    async with script.client() as client:
        await client.sandboxes.kill("i1")
    assert script.waits == [2.0, 0.4]


async def test_repeating_ends():
    script = Script(*[busy() for _ in range(RETRIES_MAX + 1)])
    async with script.client() as client:
        with pytest.raises(errors.Unavailable, match="busy"):
            await client.sandboxes.get("i1")
    assert len(script.waits) == RETRIES_MAX


@pytest.mark.parametrize("headers", [{"should_retry": "false"}, {"retry_after": "3600"}])
async def test_the_server_can_forbid_it_or_ask_for_too_long_a_wait(headers):
    script = Script(busy(**headers))
    async with script.client() as client:
        with pytest.raises(errors.Unavailable) as caught:
            await client.sandboxes.get("i1")
    assert script.waits == []
    assert caught.value.retry_after_s == (3600.0 if "retry_after" in headers else None)


@pytest.mark.parametrize("call", ["pause", "snapshot", "fork", "resume"])
async def test_calls_that_are_not_idempotent_are_sent_once(call):
    script = Script(busy())
    async with script.client() as client:
        with pytest.raises(errors.Unavailable):
            await getattr(client.sandboxes, call)("i1")
    assert len(script.requests) == 1


async def test_a_repeated_create_carries_the_same_key():
    made = {"sandboxID": "i1", "templateID": "base", "clientID": "c", "envdVersion": "0.6.13"}
    script = Script(busy(), httpx.Response(201, json=made))
    async with script.client() as client:
        assert (await client.sandboxes.create()).sandbox_id == "i1"
    keys = [request.headers["idempotency-key"] for request in script.requests]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (httpx.ConnectError("refused"), errors.ConnectionFailed),
        (httpx.ConnectTimeout("slow"), errors.ConnectionFailed),
        (httpx.ReadTimeout("slow"), errors.RequestTimeout),
        (httpx.PoolTimeout("slow"), errors.RequestTimeout),
        (httpx.ReadError("reset"), errors.ConnectionLost),
        (httpx.RemoteProtocolError("closed"), errors.ConnectionLost),
        (httpx.LocalProtocolError("bad"), errors.ProtocolError),
        (httpx.UnsupportedProtocol("ftp"), errors.ConfigurationError),
    ],
)
async def test_failures_below_http_become_classes_and_keep_the_cause(cause, kind):
    async with Script(cause).client() as client:
        with pytest.raises(kind) as caught:
            await client.sandboxes.get("i1")
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(("status", "kind"), errors.BY_STATUS.items())
async def test_statuses_become_classes(status, kind):
    answer = httpx.Response(status, json={"code": status, "message": "text", "error_code": "word"})
    async with Script(answer).client() as client:
        with pytest.raises(errors.ApiError) as caught:
            await client.sandboxes.pause("i1")
    assert type(caught.value) is (errors.KeyRejected if status == 401 else kind)
    assert (str(caught.value), caught.value.code, caught.value.error_code) == ("text", status, "word")


async def test_another_success_code_is_not_success():
    async with Script(httpx.Response(200, json={})).client() as client:
        with pytest.raises(errors.ProtocolError):
            await client.sandboxes.kill("i1")


async def test_a_server_that_repeats_its_page_is_caught():
    def page():
        return httpx.Response(200, json=[], headers={"X-Next-Token": "same"})

    async with Script(page(), page()).client() as client:
        with pytest.raises(errors.ProtocolError, match="repeats"):
            _ = [item async for item in client.sandboxes.iterate()]


async def test_key_goes_to_the_api_and_never_to_a_sandbox():
    script = Script(httpx.Response(204), httpx.Response(204))
    async with script.client() as client:
        await client.sandboxes.kill("i1")
        await client.sandboxes.handle("i1", "token").health()
    assert script.requests[0].headers["x-api-key"] == "key"
    assert "x-api-key" not in script.requests[1].headers
    assert script.requests[1].headers["x-access-token"] == "token"


async def test_ids_are_quoted_in_paths():
    script = Script(httpx.Response(204))
    async with script.client() as client:
        await client.snapshots.delete("team/name:tag?x")
    assert script.requests[0].url.raw_path == b"/templates/team%2Fname%3Atag%3Fx"


async def test_health_is_false_for_502_only():
    gone = {"sandboxId": "i1", "message": "The sandbox was not found", "code": 502}
    async with Script(httpx.Response(502, json=gone), httpx.Response(401, content=b"")).client() as client:
        sandbox = client.sandboxes.handle("i1")
        assert await sandbox.health() is False
        with pytest.raises(errors.Unauthorized):
            await sandbox.health()
