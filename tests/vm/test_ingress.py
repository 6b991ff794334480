"""A user's own server in a real guest behind the proxy: by header, host and path; streams, WebSocket, pauses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect as websocket

from tests.vm.conftest import NodeUnderTest

pytestmark = pytest.mark.vm

PORT = 8080
GUEST_WEB = Path(__file__).parent.parent / "sdk" / "guest_web.py"
TOKEN_HEADER = "e2b-traffic-access-token"


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30) as made:
        yield made


def test_by_header_host_and_path(node: NodeUnderTest, sandbox: Sandbox, client: httpx.Client) -> None:
    _serve(sandbox)
    url, port = node.running.sandbox_url, node.running.sandbox_url.rpartition(":")[2]
    by_header = client.get(f"{url}/a?b=c", headers=_headers(sandbox.sandbox_id))
    assert by_header.json() == {"path": "/a?b=c", "host": url.removeprefix("http://"), "token": None}
    host = f"{PORT}-{sandbox.sandbox_id}.localhost:{port}"
    assert sandbox.get_host(PORT) == host
    assert client.get(f"{url}/a?b=c", headers={"Host": host}).json()["host"] == host
    by_path = client.get(f"{url}/proxy/{sandbox.sandbox_id}/{PORT}/a%20b?c=%2F")
    assert by_path.json()["path"] == "/a%20b?c=%2F"
    assert client.post(f"{url}/", headers=_headers(sandbox.sandbox_id), content=b"x" * 100_000).status_code == 501


def test_a_streams_first_chunk_comes_before_the_second_is_sent(
    node: NodeUnderTest, sandbox: Sandbox, client: httpx.Client
) -> None:
    _serve(sandbox)
    headers = _headers(sandbox.sandbox_id)
    with client.stream("GET", f"{node.running.sandbox_url}/stream", headers=headers) as stream:
        chunks = stream.iter_raw()
        assert next(chunks) == b"first"
        client.get(f"{node.running.sandbox_url}/go", headers=headers).raise_for_status()
        assert next(chunks) == b"second"


def test_a_websocket_echoes_and_a_pause_ends_it(node: NodeUnderTest, sandbox: Sandbox) -> None:
    _serve(sandbox)
    url = f"ws://{node.running.sandbox_url.removeprefix('http://')}"
    with websocket(f"{url}/ws", additional_headers=_headers(sandbox.sandbox_id), close_timeout=1) as by_header:
        by_header.send("one")
        assert by_header.recv(10) == "one"
        with websocket(f"{url}/proxy/{sandbox.sandbox_id}/{PORT}/ws", close_timeout=1) as by_path:
            by_path.send("two")
            assert by_path.recv(10) == "two"
        sandbox.pause()
        with pytest.raises(ConnectionClosedError):
            by_header.recv(10)


def test_a_pause_resets_open_streams_and_the_url_works_again_after_connect(
    node: NodeUnderTest, sandbox: Sandbox, client: httpx.Client
) -> None:
    _serve(sandbox)
    url, headers = node.running.sandbox_url, _headers(sandbox.sandbox_id)
    with client.stream("GET", f"{url}/stream", headers=headers) as stream:
        chunks = stream.iter_raw()
        assert next(chunks) == b"first"
        sandbox.pause()
        with pytest.raises(httpx.TransportError):
            next(chunks)
    refused = client.get(f"{url}/", headers=headers)
    assert refused.status_code == 502
    assert refused.json() == {"sandboxId": sandbox.sandbox_id, "message": "The sandbox was not found", "code": 502}
    sandbox.connect(timeout=300)
    assert client.get(f"{url}/after", headers=headers).json()["path"] == "/after"


def test_traffic_wakes_a_paused_sandbox_that_allows_it(node: NodeUnderTest, client: httpx.Client) -> None:
    box = _create(node, autoResume={"enabled": True}, timeout=60)
    _serve(box)
    for safety in ("held", "durable"):
        box.pause()
        if safety == "durable":
            node.wait_durable(box.sandbox_id)
        woken = client.get(f"{node.running.sandbox_url}/wake", headers=_headers(box.sandbox_id))
        assert (woken.status_code, woken.json()["path"]) == (200, "/wake")
        assert node.detail(box.sandbox_id)["state"] == "running"
    box.pause()
    assert box.commands.run("echo woken by a command").stdout == "woken by a command\n"


def test_private_ingress_wants_the_token_and_keeps_it(node: NodeUnderTest, client: httpx.Client) -> None:
    body = {"templateID": "base", "timeout": 60, "network": {"allowPublicTraffic": False}}
    made = node.api.post("/v2/sandboxes", json=body).raise_for_status().json()
    _serve(Sandbox.connect(made["sandboxID"], timeout=60))
    url, headers = node.running.sandbox_url, _headers(made["sandboxID"])
    for by_path in (f"{url}/", f"{url}/proxy/{made['sandboxID']}/{PORT}/"):
        missing = client.get(by_path, headers={} if "/proxy/" in by_path else headers)
        assert missing.status_code == 403
        assert f"'{TOKEN_HEADER}' is missing" in missing.json()["message"]
    wrong = client.get(f"{url}/", headers={**headers, TOKEN_HEADER: "0" * 64})
    assert (wrong.status_code, "is invalid" in wrong.json()["message"]) == (403, True)
    right = client.get(f"{url}/", headers={**headers, TOKEN_HEADER: made["trafficAccessToken"]})
    assert right.status_code == 200
    assert right.json()["token"] is None, "the guest was given the token"
    assert client.get(f"{url}/", headers={**headers, "X-API-KEY": node.running.api_key}).status_code == 403


def _create(node: NodeUnderTest, **body: Any) -> Sandbox:
    made = node.api.post("/v2/sandboxes", json={"templateID": "base", **body}).raise_for_status().json()
    return Sandbox.connect(made["sandboxID"], timeout=60)


def _headers(sandbox_id: str) -> dict[str, str]:
    return {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(PORT)}


def _serve(box: Sandbox) -> None:
    """Start the web server in the guest and wait until its port is open."""
    box.files.write("/home/user/web.py", GUEST_WEB.read_bytes())
    box.commands.run(f"exec python3 /home/user/web.py {PORT}", background=True, timeout=0)
    wait = f"for i in $(seq 100); do (echo > /dev/tcp/127.0.0.1/{PORT}) 2> /dev/null && exit 0; sleep 0.1; done; exit 1"
    box.commands.run(wait, timeout=60)
