"""Progress streams: pace, heart beats, budgets, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from api_case import KEY, Connection, until
from starlette.applications import Starlette
from starlette.datastructures import Headers

from agentenv.api import ApiKeys, ApiSettings, create_app, streams
from agentenv.api.call import Endpoint
from agentenv.api.fake import FakeImages
from agentenv.api.routes import ENDPOINTS
from agentenv.api.streams import LINES_WAITING_MAX, accepts_ndjson
from agentenv.clock import FakeClock
from agentenv.model import Progress
from agentenv.node.fake import FakeNode

BODY = json.dumps({"reference": "python:3.12"}).encode()
ACCEPT = {"accept": "application/x-ndjson"}


def pull(app: Starlette) -> Connection:
    connection = Connection(app, "POST", "/aenv/images", ACCEPT)
    connection.body(BODY)
    return connection


def app_with(node: FakeNode, clock: FakeClock, images: FakeImages, **settings: Any) -> Starlette:
    chosen = ApiSettings(**{"progress_interval_s": 0.001, **settings})
    return create_app(node, ApiKeys([KEY]), chosen, clock, images=images)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/x-ndjson", True),
        ("application/json, Application/X-NDJSON;q=0.5", True),
        ("*/*", False),
        ("application/*", False),
        ("application/json", False),
    ],
)
def test_only_a_client_that_names_ndjson_gets_it(accept: str, wanted: bool) -> None:
    assert accepts_ndjson(Headers({"accept": accept})) is wanted


async def test_a_step_is_told_while_the_work_goes_on(app: Starlette, images: FakeImages) -> None:
    gate = images.hold("pull")
    connection = pull(app)
    await until(lambda: len(connection.sent) >= 2)
    assert connection.status == 200
    assert connection.lines[0] == {"progress": "pulling python:3.12"}
    gate.set()
    await connection.task
    assert connection.is_complete
    assert {"progress": "reading", "doneBytes": 1, "totalBytes": 2} in connection.lines
    assert "image" in connection.lines[-1]


async def test_a_silent_step_is_repeated(node: FakeNode, clock: FakeClock, images: FakeImages) -> None:
    gate = images.hold("pull")
    connection = pull(app_with(node, clock, images, progress_heartbeat_s=0.0))
    async with asyncio.timeout(10):
        while len(connection.sent) < 6:
            await asyncio.sleep(0.001)
    gate.set()
    await connection.task
    assert connection.lines[2] == connection.lines[3] == {"progress": "reading", "doneBytes": 1, "totalBytes": 2}


async def test_a_client_that_goes_away_ends_its_wait_and_leaves_nothing(
    app: Starlette, images: FakeImages, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "agentenv.api")
    images.hold("pull")
    connection = pull(app)
    await until(lambda: "pull" in images.calls)
    tasks = asyncio.all_tasks()
    connection.disconnect()
    await connection.task
    assert images.cancelled == ["pull"]
    assert not connection.is_complete
    assert asyncio.all_tasks() <= tasks - {connection.task}
    assert "operation='pullImage' status=499" in caplog.records[-1].message


async def test_cancelling_the_request_cancels_the_work(app: Starlette, images: FakeImages) -> None:
    images.hold("pull")
    connection = pull(app)
    await until(lambda: "pull" in images.calls)
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert images.cancelled == ["pull"]


async def test_a_stream_keeps_to_the_budget_of_its_route(
    app: Starlette, images: FakeImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.hold("pull")
    armed = streams.ProgressStream.arm
    monkeypatch.setattr(
        streams.ProgressStream, "arm", lambda self, operation, budget_s, ended: armed(self, operation, 0.01, ended)
    )
    connection = pull(app)
    await connection.task
    assert connection.lines[-1]["error"]["error_code"] == "request_budget_exceeded"
    assert images.cancelled == ["pull"]


async def test_a_client_that_does_not_read_is_given_up(
    app: Starlette, images: FakeImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SEND_S_MAX", 0.01)
    images.hold("pull")
    connection = Connection(app, "POST", "/aenv/images", ACCEPT, reads=False)
    connection.body(BODY)
    await connection.task
    assert images.cancelled == ["pull"]
    assert connection.sent == []


def test_what_waits_for_a_slow_client_is_bounded_and_the_last_is_kept() -> None:
    news = streams._News()
    for number in range(10 * LINES_WAITING_MAX):
        news.report(Progress(f"step {number}"))
    waiting = news.taken()
    assert (len(waiting), waiting[-1].text) == (LINES_WAITING_MAX, f"step {10 * LINES_WAITING_MAX - 1}")
    assert news.taken() == []


def test_every_stream_has_a_budget_of_its_own() -> None:
    streamed: list[Endpoint[Any]] = [endpoint for endpoint in ENDPOINTS if endpoint.lines is not None]
    assert len(streamed) == 4
    assert all(endpoint.budget_s for endpoint in streamed)
