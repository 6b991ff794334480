"""The client against the real API application on a fake node: the same words on both sides of the wire."""

from __future__ import annotations

import httpx
import pytest

from agentenv.api import ApiKeys, ApiSettings, create_app
from agentenv.client import AenvClient, Sandbox, errors
from agentenv.clock import FakeClock
from agentenv.node.fake import FakeNode

KEY = "e2b_" + "0" * 40


@pytest.fixture
async def client():
    clock = FakeClock()
    app = create_app(FakeNode(clock), ApiKeys([KEY]), ApiSettings(), clock)
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
