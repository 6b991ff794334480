"""The client against the real API application on a fake node: the same words on both sides of the wire."""

from __future__ import annotations

import httpx
import pytest

from agentenv import model
from agentenv.api import ApiKeys, ApiSettings, create_app
from agentenv.api.fake import FakeImages, FakeStorage
from agentenv.client import AenvClient, ImageInfo, Progress, Sandbox, TemplateInfo, errors
from agentenv.clock import FakeClock
from agentenv.errors import Conflict, ImageError
from agentenv.node.fake import FakeNode

KEY = "e2b_" + "0" * 40


@pytest.fixture
def node():
    return FakeNode(FakeClock())


@pytest.fixture
def images(node):
    return FakeImages(node.add_template)


@pytest.fixture
def storage():
    return FakeStorage()


@pytest.fixture
async def client(node, images, storage):
    settings = ApiSettings(progress_interval_s=0.001)
    app = create_app(node, ApiKeys([KEY]), settings, node.clock, images=images, storage=storage)
    async with AenvClient("http://node", KEY, http_transport=httpx.ASGITransport(app)) as connected:
        yield connected


async def test_life_of_a_sandbox(client):
    box = await client.sandboxes.create(
        "base", timeout_s=60, metadata={"a&b=": "x y é"}, env={"K": "v"}, auto_pause=False, allow_internet=False
    )
    info = await client.sandboxes.get(box.sandbox_id)
    assert (info.state, info.metadata) == ("running", {"a&b=": "x y é"})
    assert info.envd_access_token
    await client.sandboxes.set_timeout(box.sandbox_id, 100)
    await client.sandboxes.pause(box.sandbox_id)
    with pytest.raises(errors.Conflict):
        await client.sandboxes.pause(box.sandbox_id)
    _, was_resumed = await client.sandboxes.connect(box.sandbox_id, timeout_s=10)
    assert was_resumed
    _, was_resumed = await client.sandboxes.connect(box.sandbox_id)
    assert not was_resumed
    await client.sandboxes.kill(box.sandbox_id)
    with pytest.raises(errors.NotFound):
        await client.sandboxes.get(box.sandbox_id)
    with pytest.raises(errors.NotFound):
        await client.sandboxes.kill(box.sandbox_id)


async def test_list_pages_and_filters(client):
    ids = {(await client.sandboxes.create(metadata={"n": str(n), "k=&": "ä ö"})).sandbox_id for n in range(7)}
    listed = [item.sandbox_id async for item in client.sandboxes.iterate(page_items=3)]
    assert (set(listed), len(listed)) == (ids, 7)
    found = [item async for item in client.sandboxes.iterate(metadata={"n": "3", "k=&": "ä ö"})]
    assert [item.metadata["n"] for item in found] == ["3"]
    assert [item async for item in client.sandboxes.iterate(states=("paused",))] == []


async def test_fork_and_resume(client):
    box = await client.sandboxes.create()
    children = await client.sandboxes.fork(box.sandbox_id, count=3, timeout_s=20)
    assert all(isinstance(child, Sandbox) for child in children)
    assert len({child.sandbox_id for child in children if isinstance(child, Sandbox)} | {box.sandbox_id}) == 4
    await client.sandboxes.pause(box.sandbox_id)
    assert (await client.sandboxes.resume(box.sandbox_id, timeout_s=5)).sandbox_id == box.sandbox_id


async def test_snapshots_and_templates(client):
    box = await client.sandboxes.create()
    snapshot = await client.sandboxes.snapshot(box.sandbox_id, name="one")
    assert snapshot.snapshot_id in [item.snapshot_id async for item in client.snapshots.iterate()]
    assert [item async for item in client.snapshots.iterate(sandbox_id=box.sandbox_id)]
    assert (await client.sandboxes.create(snapshot.snapshot_id)).sandbox_id != box.sandbox_id
    await client.snapshots.delete(snapshot.snapshot_id)
    with pytest.raises(errors.NotFound):
        await client.snapshots.delete(snapshot.snapshot_id)
    assert (await client.templates.list())[0].template_id


async def test_node_describes_itself(client):
    assert await client.node()


async def test_wrong_key(client):
    async with AenvClient("http://node", "e2b_00", http_transport=client._transport._client._transport) as stranger:
        with pytest.raises(errors.Unauthorized):
            await stranger.sandboxes.get("i" + "0" * 20)


async def test_a_template_of_an_image_is_built_once_and_can_be_started(client, images):
    seen = []
    built = await client.templates.build(image="python:3.12", disk_size_mb=512, progress=seen.append)
    assert seen == [Progress("building python:3.12", 0, None), Progress("reading", 1, 2)]
    assert (await client.sandboxes.create(built.template_id)).sandbox_id
    assert (await client.templates.build(image="python:3.12", disk_size_mb=512)).template_id == built.template_id
    assert images.built[0][2] == model.Resources(1, 512, 512)


async def test_a_build_can_be_iterated(client):
    events = [
        event
        async for event in client.templates.build_events(
            "tool", dockerfile="FROM python:3.12\n", build_args={"A": "1"}, cpu_count=2
        )
    ]
    assert [type(event) for event in events] == [Progress, Progress, TemplateInfo]
    assert events[-1].names == ("tool",)


async def test_images(client):
    pulled = await client.images.pull("python:3.12", disk_size_mb=100)
    assert isinstance(pulled, ImageInfo)
    assert (pulled.references, pulled.disk_mib) == (("python:3.12",), 100)
    assert await client.images.list() == [pulled]
    await client.images.delete(pulled.digest)
    with pytest.raises(errors.NotFound):
        await client.images.delete(pulled.digest)


async def test_an_export_comes_in_pieces(client, images):
    async with client.images.export("base", compression="none", reference="a/b:c") as pieces:
        assert b"".join([piece async for piece in pieces]) == b"an OCI archive"
    assert images.exported == [("base", model.ExportOptions("none", "a/b:c"))]
    images.fail_next("export", model_error := ImageError("layer 3 is damaged"))
    with pytest.raises(errors.ServerError, match=str(model_error)):
        async with client.images.export("base"):
            pass


async def test_errors_in_a_stream_are_the_classes_of_every_call(client, images):
    images.fail_next("pull", ImageError("layer 3 is damaged"))
    with pytest.raises(errors.ServerError, match="layer 3 is damaged") as caught:
        await client.images.pull("a")
    assert (caught.value.code, caught.value.error_code) == (500, "operation_failed")
    with pytest.raises(errors.BadRequest, match="reference"):
        await client.images.pull("a b")


async def test_storage(client, storage):
    shown = await client.storage.show()
    assert [tier.name for tier in shown.tiers] == ["staging", "repository", "cache"]
    assert (shown.tiers[1].shared_bytes, shown.tiers[1].free_bytes) == (1 << 30, None)
    assert shown.tiers[2].counters["misses"] == 10
    assert (await client.storage.collect(grace_s=0.5)).freed_bytes == 4 << 20
    assert storage.graces == [0.5]
    assert (await client.storage.verify()).is_whole
    storage.damages = [model.Damage("cache", "blocks/cd", "unreadable", ("sandbox i1",))]
    seen = []
    report = await client.storage.verify(progress=seen.append)
    assert (report.is_whole, report.damages[0].dependents, len(seen)) == (False, ("sandbox i1",), 2)
    assert (await client.storage.repair()).is_whole
    storage.fail_next("repair", Conflict("a verify runs already"))
    with pytest.raises(errors.Conflict):
        await client.storage.repair()
