"""Each route's happy path, with the exact status that the SDKs parse."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from api_case import start

from agentenv.clock import FakeClock
from agentenv.model import ExpiryAction, SandboxState
from agentenv.node.fake import FakeNode

Client = httpx.AsyncClient


async def test_v2_create_is_always_secured_and_tells_our_domain(client: Client) -> None:
    made = await start(client, metadata={"owner": "me"})
    assert made["envdAccessToken"]
    assert made["domain"] == "localhost:8000"
    assert {"templateID", "sandboxID", "clientID", "envdVersion"} <= made.keys()
    assert "trafficAccessToken" not in made


@pytest.mark.parametrize(("secure", "has_token"), [(None, False), (False, False), (True, True)])
async def test_v1_create_is_secured_only_when_asked(client: Client, secure: bool | None, has_token: bool) -> None:
    answer = await client.post("/sandboxes", json={"templateID": "base", "secure": secure})
    assert answer.status_code == 201
    assert ("envdAccessToken" in answer.json()) is has_token


async def test_default_lifetimes_differ_between_v1_and_v2(client: Client, node: FakeNode) -> None:
    await start(client)
    await client.post("/sandboxes", json={"templateID": "base"})
    assert sorted(view.spec.timeout_s for view in node.list_sandboxes()) == [15, 300]


@pytest.mark.parametrize(
    ("auto_pause", "action"),
    [({}, "pause"), ({"autoPause": None}, "pause"), ({"autoPause": True}, "pause"), ({"autoPause": False}, "kill")],
)
async def test_only_an_explicit_false_deletes_at_expiry(
    client: Client, node: FakeNode, auto_pause: dict[str, Any], action: str
) -> None:
    await start(client, **auto_pause)
    assert node.list_sandboxes()[0].spec.on_timeout is ExpiryAction(action)


async def test_create_options_reach_the_node(client: Client, node: FakeNode) -> None:
    made = await start(
        client,
        timeout=60,
        autoResume={"enabled": True},
        allow_internet_access=False,
        network={"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}"},
        metadata={"a": "1", "gone": None},
        envVars={"PATH_X": "y"},
    )
    spec = node.get(made["sandboxID"]).spec
    assert spec.auto_resume
    assert not spec.network.allow_internet
    assert not spec.allow_public_traffic
    assert spec.mask_request_host == "localhost:${PORT}"
    assert spec.metadata == {"a": "1"}
    assert spec.env_vars == {"PATH_X": "y"}
    assert made["trafficAccessToken"]


async def test_the_older_name_of_env_vars_is_understood(client: Client, node: FakeNode) -> None:
    made = await start(client, envs={"A": "1"})
    assert node.get(made["sandboxID"]).spec.env_vars == {"A": "1"}


async def test_nulls_and_unknown_keys_mean_absent(client: Client) -> None:
    empty = dict.fromkeys(["timeout", "autoPause", "autoResume", "network", "metadata", "envVars", "mcp", "iam"])
    await start(client, **empty, volumeMounts=[], somethingNew={"x": [1]})


@pytest.mark.parametrize("version", ["", "/v2"])
@pytest.mark.parametrize("content", [b"", b"{}", b"null", b" \n", b'{"timeout":60}'])
async def test_connect_answers_200_when_running_and_201_when_resumed(
    client: Client, node: FakeNode, version: str, content: bytes
) -> None:
    made = await start(client)
    path = f"{version}/sandboxes/{made['sandboxID']}/connect"
    running = await client.post(path, content=content)
    assert running.status_code == 200
    assert running.json() == made
    assert (await client.post(f"/sandboxes/{made['sandboxID']}/pause")).status_code == 204
    resumed = await client.post(path, content=content)
    assert resumed.status_code == 201
    assert resumed.json() == made


async def test_connect_only_extends(client: Client, node: FakeNode) -> None:
    made = await start(client, timeout=1_000)
    before = node.get(made["sandboxID"]).end_at
    await client.post(f"/v2/sandboxes/{made['sandboxID']}/connect", json={"timeout": 1})
    assert node.get(made["sandboxID"]).end_at == before


async def test_get_shows_everything_that_clients_read(client: Client, node: FakeNode) -> None:
    made = await start(client, metadata={"k": "v"}, allow_internet_access=False, autoPause=False)
    answer = await client.get(f"/sandboxes/{made['sandboxID']}")
    assert answer.status_code == 200
    detail = answer.json()
    assert detail["state"] == "running"
    assert detail["startedAt"].endswith("Z")
    assert detail["metadata"] == {"k": "v"}
    assert detail["allowInternetAccess"] is False
    assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    assert detail["network"] == {"allowPublicTraffic": True}
    assert "pauseMode" not in detail


async def test_old_clients_append_the_client_id_to_sandbox_ids(client: Client) -> None:
    made = await start(client)
    answer = await client.get(f"/sandboxes/{made['sandboxID']}-{made['clientID']}")
    assert answer.json()["sandboxID"] == made["sandboxID"]


@pytest.mark.parametrize("state", [SandboxState.PAUSING, SandboxState.PAUSED])
async def test_pausing_is_shown_as_paused(client: Client, node: FakeNode, state: SandboxState) -> None:
    made = await start(client)
    node.replace(made["sandboxID"], state=state)
    assert (await client.get(f"/sandboxes/{made['sandboxID']}")).json()["state"] == "paused"


async def test_kill_works_once_in_any_state(client: Client) -> None:
    made = await start(client)
    await client.post(f"/sandboxes/{made['sandboxID']}/pause")
    assert (await client.delete(f"/sandboxes/{made['sandboxID']}")).status_code == 204
    assert (await client.delete(f"/sandboxes/{made['sandboxID']}")).status_code == 404


async def test_set_timeout_may_shorten_and_zero_expires_now(client: Client, node: FakeNode) -> None:
    made = await start(client, timeout=300, autoPause=False)
    path = f"/sandboxes/{made['sandboxID']}/timeout"
    assert (await client.post(path, json={"timeout": 5})).status_code == 204
    assert node.get(made["sandboxID"]).end_at == node.clock.wall() + 5
    assert (await client.post(path, json={"timeout": 0})).status_code == 204
    assert node.list_sandboxes() == []


async def test_refreshes_never_shorten(client: Client, node: FakeNode) -> None:
    made = await start(client, timeout=100)
    path = f"/sandboxes/{made['sandboxID']}/refreshes"
    for duration, left in ((10, 100), (200, 200)):
        assert (await client.post(path, json={"duration": duration})).status_code == 204
        assert node.get(made["sandboxID"]).end_at == node.clock.wall() + left


async def test_a_second_pause_is_a_conflict(client: Client) -> None:
    made = await start(client)
    path = f"/sandboxes/{made['sandboxID']}/pause"
    statuses = [(await client.post(path, json={"memory": True})).status_code for _ in range(2)]
    assert statuses == [204, 409]


async def test_resume_of_a_running_sandbox_is_a_conflict(client: Client, node: FakeNode) -> None:
    made = await start(client)
    path = f"/sandboxes/{made['sandboxID']}/resume"
    assert (await client.post(path)).status_code == 409
    await client.post(f"/sandboxes/{made['sandboxID']}/pause")
    assert (await client.post(path, json={"autoPause": False})).status_code == 201
    view = node.get(made["sandboxID"])
    assert view.spec.on_timeout is ExpiryAction.KILL
    assert view.end_at == node.clock.wall() + 15


async def test_fork_answers_one_entry_per_child(client: Client, node: FakeNode) -> None:
    from agentenv.errors import AtCapacity

    made = await start(client)
    node.fail_next("fork_child", AtCapacity("the node is full"))
    answer = await client.post(f"/sandboxes/{made['sandboxID']}/fork", json={"count": 3, "timeout": 60})
    assert answer.status_code == 201
    assert answer.headers["X-Aenv-Frozen-Ms"] == "12.500"
    entries = answer.json()
    assert [list(entry) for entry in entries] == [["sandbox"], ["sandbox"], ["error"]]
    assert entries[2]["error"] == {
        "code": 429,
        "message": "the node is full",
        "error_code": "sandbox_capacity_unavailable",
    }
    tokens = {made["envdAccessToken"], *(entry["sandbox"]["envdAccessToken"] for entry in entries[:2])}
    assert len(tokens) == 3


async def test_a_snapshot_is_named_and_its_id_works_everywhere(client: Client) -> None:
    made = await start(client)
    path = f"/sandboxes/{made['sandboxID']}/snapshots"
    answer = await client.post(path, json={"name": "Team/Work"})
    assert answer.status_code == 201
    assert answer.headers["X-Aenv-Frozen-Ms"] == "12.500"
    named = answer.json()
    assert named == {"snapshotID": "team/work:default", "names": ["team/work:default"]}
    unnamed = (await client.post(path)).json()
    assert unnamed["names"] == []
    assert unnamed["snapshotID"].endswith(":default")
    for snapshot in (named, unnamed):
        child = await start(client, templateID=snapshot["snapshotID"])
        listed = (await client.get("/v2/sandboxes", params={"template": snapshot["snapshotID"]})).json()
        assert [entry["sandboxID"] for entry in listed] == [child["sandboxID"]]
        encoded = snapshot["snapshotID"].replace("/", "%2F").replace(":", "%3A")
        assert (await client.delete(f"/templates/{encoded}")).status_code == 204
        assert (await client.delete(f"/templates/{encoded}")).status_code == 404


async def test_snapshots_are_listed_by_source_and_by_name(client: Client, clock: FakeClock) -> None:
    first, second = await start(client), await start(client)
    for sandbox, name in ((first, "a"), (first, "a:v2"), (second, "b")):
        clock.advance(1)
        await client.post(f"/sandboxes/{sandbox['sandboxID']}/snapshots", json={"name": name})

    async def ids(**query: str) -> list[str]:
        answer = await client.get("/snapshots", params=query)
        assert answer.status_code == 200
        return [entry["snapshotID"] for entry in answer.json()]

    assert await ids() == ["b:default", "a:v2", "a:default"]
    assert await ids(sandboxID=first["sandboxID"]) == ["a:v2", "a:default"]
    assert await ids(name="a") == ["a:v2", "a:default"]
    assert await ids(name="a:v2") == ["a:v2"]
    assert await ids(sandboxID="nonsense") == []


async def test_templates_are_listed_and_found_by_alias(client: Client, node: FakeNode) -> None:
    node.add_template("team/tool:v1")
    await start(client, templateID="team/tool:v1")
    listed = (await client.get("/templates", params={"teamID": "t"})).json()
    by_name = {entry["names"][0]: entry for entry in listed}
    assert by_name["team/tool"]["aliases"] == ["tool"]
    assert by_name["team/tool"]["spawnCount"] == 1
    assert by_name["base"]["buildStatus"] == "ready"
    found = await client.get("/templates/aliases/base")
    assert (found.status_code, found.json()["public"]) == (200, False)
    assert (await client.get("/templates/aliases/team%2Ftool%3Av1")).status_code == 200
    assert (await client.get("/templates/aliases/nothing")).status_code == 404


async def test_health_needs_no_key_and_has_no_body(client: Client) -> None:
    del client.headers["X-API-KEY"]
    answer = await client.get("/health")
    assert (answer.status_code, answer.content) == (204, b"")


async def test_our_own_view_tells_how_safe_a_pause_is(client: Client) -> None:
    made = await start(client)
    await client.post(f"/sandboxes/{made['sandboxID']}/pause")
    own = (await client.get(f"/aenv/sandboxes/{made['sandboxID']}")).json()
    assert (own["state"], own["pauseSafety"]) == ("paused", "held")
    assert (await client.get("/aenv/node")).json()["driver"] == "fake"


async def test_tombstones_tell_why_a_sandbox_ended(client: Client) -> None:
    made = await start(client)
    path = f"/aenv/tombstones/{made['sandboxID']}"
    assert (await client.get(path)).status_code == 404
    await client.delete(f"/sandboxes/{made['sandboxID']}")
    assert (await client.get(path)).json()["reason"] == "deleted"
    assert "deleted" in (await client.get(f"/sandboxes/{made['sandboxID']}")).json()["message"]


async def test_v1_list_shows_running_ones_only(client: Client) -> None:
    running, paused = await start(client), await start(client)
    await client.post(f"/sandboxes/{paused['sandboxID']}/pause")
    listed = (await client.get("/sandboxes")).json()
    assert [entry["sandboxID"] for entry in listed] == [running["sandboxID"]]
