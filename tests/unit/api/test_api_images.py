"""Templates of images, pulled images, and exported snapshots."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_case import KEY, Connection, until
from starlette.applications import Starlette

from agentenv.api import ApiKeys, ApiSettings, create_app
from agentenv.api.fake import FakeImages
from agentenv.clock import FakeClock
from agentenv.errors import ImageError, NotFound, StorageFull
from agentenv.model import Dockerfile, ExportOptions, ImageReference, Progress, Resources, SnapshotManifest
from agentenv.node.fake import FakeNode

Client = httpx.AsyncClient
NDJSON = {"Accept": "application/x-ndjson"}


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize(
    "reference",
    [
        "python:3.12",
        "docker.io/library/x@sha256:" + "0" * 64,
        "oci:/dir:tag",
        "oci-archive:/f.tar",
        "docker-archive:/f.tar",
    ],
)
async def test_an_image_that_is_no_path_is_a_reference_and_needs_no_name(
    client: Client, images: FakeImages, reference: str
) -> None:
    answer = await client.post("/aenv/templates", json={"image": reference, "cpuCount": 2, "diskSizeMB": 512})
    assert answer.status_code == 201, answer.text
    assert answer.json()["templateID"]
    assert images.built == [(ImageReference(reference), None, Resources(2, 512, 512))]


async def test_the_same_image_without_a_name_is_the_same_template(client: Client) -> None:
    body = {"image": "python:3.12"}
    first, second = [(await client.post("/aenv/templates", json=body)).json()["templateID"] for _ in range(2)]
    other = (await client.post("/aenv/templates", json={**body, "memoryMB": 1024})).json()["templateID"]
    assert first == second != other
    made = await client.post("/v2/sandboxes", json={"templateID": first})
    assert made.status_code == 201


async def test_a_dockerfile_with_its_arguments(client: Client, images: FakeImages) -> None:
    body = {"name": "tool", "dockerfile": "ARG V\nFROM python:3.12\n", "buildArgs": {"V": "1"}}
    answer = await client.post("/aenv/templates", json=body)
    assert answer.status_code == 201
    assert answer.json()["names"] == ["tool"]
    assert images.built[0][0] == Dockerfile("ARG V\nFROM python:3.12\n", {"V": "1"})


class RawBuilder:
    """Builds of everything but images."""

    defaults = Resources(1, 512, 8_192)

    def __init__(self, node: FakeNode) -> None:
        self.asked: list[tuple[str, Path | None]] = []
        self._node = node

    async def build(self, name: str, image: Path | None, resources: Resources) -> SnapshotManifest:
        self.asked.append((name, image))
        return self._node.add_template(f"{name}:default")


async def test_an_absolute_path_and_no_image_go_to_the_builder(node: FakeNode, clock: FakeClock) -> None:
    builder = RawBuilder(node)
    app = create_app(node, ApiKeys([KEY]), ApiSettings(progress_interval_s=0.001), clock, builder=builder)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://api", headers={"X-API-KEY": KEY}
    ) as client:
        assert (await client.post("/aenv/templates", json={"name": "a"})).status_code == 201
        answer = await client.post("/aenv/templates", json={"name": "b", "image": "/x.ext4"}, headers=NDJSON)
        assert "template" in lines_of(answer)[-1]
        # Without images only these two are served.
        assert (await client.post("/aenv/templates", json={"image": "python:3.12"})).status_code == 501
    assert builder.asked == [("a", None), ("b", Path("/x.ext4"))]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"image": ""}, "image"),
        ({"image": "./rootfs.ext4"}, "image"),
        ({"image": "~/x"}, "image"),
        ({"image": "-x"}, "image"),
        ({"image": "a b"}, "image"),
        ({"image": "a\nb"}, "image"),
        ({"image": "p\u0443thon"}, "image"),
        ({"image": "x" * 1_025}, "image"),
        ({"image": "a", "dockerfile": "FROM a", "name": "n"}, "dockerfile"),
        ({"image": "a", "buildArgs": {"A": "1"}}, "buildArgs"),
        ({"dockerfile": "FROM a"}, "name"),
        ({"image": "a", "diskSizeMB": 1}, "diskSizeMB"),
        ({"image": "a", "diskSizeMB": 1 << 40}, "diskSizeMB"),
        ({"image": "a", "cpuCount": 0}, "cpuCount"),
        ({"image": "a", "memoryMB": 1}, "memoryMB"),
        ({"dockerfile": "FROM a", "name": "n", "buildArgs": {"A": 1}}, "buildArgs"),
    ],
)
async def test_what_means_nothing_is_refused_by_name(
    client: Client, images: FakeImages, body: dict[str, Any], field: str
) -> None:
    answer = await client.post("/aenv/templates", json=body)
    assert answer.status_code == 400
    assert field in answer.json()["message"]
    assert images.calls == []


async def test_the_stream_tells_of_each_step_and_ends_with_the_template(client: Client, images: FakeImages) -> None:
    images.steps = [Progress("pulling", 1, 10), Progress("pulling", 10, 10), Progress("first boot")]
    answer = await client.post("/aenv/templates", json={"image": "python:3.12"}, headers=NDJSON)
    first, *middle, last = lines_of(answer)
    assert first == {"progress": "building python:3.12"}
    # Of what came in between of one step, only the latest.
    assert middle == [
        {"progress": "pulling", "doneBytes": 10, "totalBytes": 10},
        {"progress": "first boot"},
    ]
    assert list(last) == ["template"]
    plain = await client.post("/aenv/templates", json={"image": "python:3.12"})
    assert plain.json() == last["template"]


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (ImageError("layer 2 is no tar"), 500, "operation_failed"),
        (StorageFull("no room"), 507, "storage_full"),
        (NotFound("no such image"), 404, None),
    ],
)
async def test_an_error_is_the_last_line_and_the_same_as_without_a_stream(
    client: Client, images: FakeImages, error: Exception, code: int, word: str | None
) -> None:
    images.fail_next("build", error)
    plain = await client.post("/aenv/templates", json={"image": "a"})
    assert plain.status_code == code
    images.fail_next("build", error)
    answer = await client.post("/aenv/templates", json={"image": "a"}, headers=NDJSON)
    assert lines_of(answer)[-1] == {"error": plain.json()}
    assert plain.json().get("error_code") == word


async def test_what_is_refused_before_the_work_begins_is_no_stream(client: Client) -> None:
    answer = await client.post("/aenv/templates", json={"image": "a b"}, headers=NDJSON)
    assert answer.status_code == 400


async def test_a_bug_in_a_stream_is_logged_and_not_shown(
    client: Client, images: FakeImages, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "agentenv.api")
    images.fail_next("build", RuntimeError("secret"))
    last = lines_of(await client.post("/aenv/templates", json={"image": "a"}, headers=NDJSON))[-1]
    assert last["error"]["code"] == 500
    assert "secret" not in json.dumps(last)
    assert "operation='buildTemplate' status=500" in caplog.records[-1].message


async def test_pulled_images_are_listed_newest_first_and_forgotten_by_digest(client: Client) -> None:
    for reference in ("one", "two"):
        answer = await client.post("/aenv/images", json={"reference": reference, "diskSizeMB": 100})
        assert answer.status_code == 201
    listed = (await client.get("/aenv/images")).json()
    assert [item["references"] for item in listed] == [["two"], ["one"]]
    assert listed[0] == answer.json()
    assert listed[0].keys() == {"references", "digest", "layers", "sizeBytes", "diskSizeMB", "createdAt"}
    digest = listed[0]["digest"]
    for spelled in (digest.replace(":", "%3A"), listed[1]["digest"].removeprefix("sha256:")):
        assert (await client.delete(f"/aenv/images/{spelled}")).status_code == 204
    assert (await client.delete(f"/aenv/images/{digest}")).status_code == 404
    assert (await client.get("/aenv/images")).json() == []


async def test_a_pull_streams_too(client: Client) -> None:
    answer = await client.post("/aenv/images", json={"reference": "one"}, headers=NDJSON)
    assert lines_of(answer)[-1]["image"]["diskSizeMB"] == 8_192


@pytest.mark.parametrize("digest", ["x", "sha256:0", "sha512:" + "0" * 64, "0" * 63, "A" * 64, "..%2F" + "0" * 64])
async def test_what_is_no_digest_is_refused(client: Client, images: FakeImages, digest: str) -> None:
    assert (await client.delete(f"/aenv/images/{digest}")).status_code == 400
    assert images.calls == []


async def test_an_export_is_the_archive(client: Client, images: FakeImages) -> None:
    answer = await client.post(
        "/aenv/snapshots/team%2Fbase%3Av1/export", json={"compression": "zstd", "reference": "mine:1"}
    )
    assert (answer.status_code, answer.content) == (200, b"an OCI archive")
    assert answer.headers["content-type"] == "application/x-tar"
    assert "content-length" not in answer.headers
    assert images.exported == [("team/base:v1", ExportOptions("zstd", "mine:1"))]
    assert images.open_exports == 0
    await client.post("/aenv/snapshots/base/export")
    assert images.exported[1] == ("base", ExportOptions("gzip", None))


@pytest.mark.parametrize("body", [{"compression": "brotli"}, {"reference": "a b"}, {"compression": 1}])
async def test_export_options_are_checked(client: Client, images: FakeImages, body: dict[str, Any]) -> None:
    assert (await client.post("/aenv/snapshots/base/export", json=body)).status_code == 400
    assert images.exported == []


async def test_an_export_that_cannot_begin_is_an_ordinary_error(client: Client, images: FakeImages) -> None:
    images.fail_next("export", NotFound("no such snapshot"))
    answer = await client.post("/aenv/snapshots/nothing/export")
    assert (answer.status_code, answer.json()) == (404, {"code": 404, "message": "no such snapshot"})
    assert images.open_exports == 0


def export(app: Starlette) -> Connection:
    connection = Connection(app, "POST", "/aenv/snapshots/base/export")
    connection.body(b"")
    return connection


async def test_an_export_that_fails_half_way_has_no_end(
    app: Starlette, images: FakeImages, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "agentenv.api")
    images.archive_failure = StorageFull("the disk is gone")
    connection = export(app)
    await connection.task
    assert (connection.status, connection.received, connection.is_complete) == (200, b"an OCI archive", False)
    assert images.open_exports == 0
    assert "operation='exportSnapshot' status=507" in caplog.records[-1].message


@pytest.mark.parametrize("moment", ["export", "read"])
async def test_an_export_ends_with_its_client(app: Starlette, images: FakeImages, moment: str) -> None:
    images.hold(moment)
    connection = export(app)
    await until(lambda: moment in images.calls)
    connection.disconnect()
    await connection.task
    assert images.cancelled == [moment]
    assert images.open_exports == 0
    assert not connection.is_complete


async def test_the_end_of_an_archive_is_sent_after_everything_was_removed(app: Starlette, images: FakeImages) -> None:
    gate = images.hold("read")
    connection = export(app)
    await until(lambda: "read" in images.calls)
    assert (images.open_exports, connection.is_complete) == (1, False)
    gate.set()
    await connection.task
    assert (images.open_exports, connection.is_complete) == (0, True)


async def test_cancelling_the_request_leaves_no_export_open(app: Starlette, images: FakeImages) -> None:
    images.hold("read")
    connection = export(app)
    await until(lambda: "read" in images.calls)
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert images.open_exports == 0


async def test_without_images_every_route_of_them_is_501(node: FakeNode, clock: FakeClock) -> None:
    app = create_app(node, ApiKeys([KEY]), ApiSettings(), clock)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://api", headers={"X-API-KEY": KEY}
    ) as client:
        answers = [
            await client.get("/aenv/images"),
            await client.post("/aenv/images", json={"reference": "a"}),
            await client.delete("/aenv/images/" + "0" * 64),
            await client.post("/aenv/snapshots/base/export"),
            await client.post("/aenv/templates", json={"name": "a"}),
            await client.get("/aenv/storage"),
            await client.post("/aenv/storage/gc"),
            await client.post("/aenv/storage/verify"),
            await client.post("/aenv/storage/repair"),
        ]
    assert [answer.status_code for answer in answers] == [501] * 9
    assert all(answer.json()["code"] == 501 for answer in answers)
