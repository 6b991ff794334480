"""Lists: every item exactly once whatever happens between two pages, and filters as the SDKs encode them."""

from __future__ import annotations

import urllib.parse
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.api.filters import parse_metadata
from agentenv.api.paging import PageRequest, SortKey, parse_page, take
from agentenv.clock import FakeClock
from agentenv.model import SandboxState
from agentenv.node.fake import FakeNode

Client = httpx.AsyncClient
# Few times, so that equal ones are common.
PAGES_MAX = 100
KEYS = st.tuples(st.integers(0, 5), st.text("abc0", min_size=1, max_size=3))


def walk(pages: list[set[SortKey]], limit: int, ascending: bool) -> list[SortKey]:
    """Read all pages; the list is `pages[n]` when page n is read (the last one from then on).

    A still list never ends with an empty page.
    """
    seen: list[SortKey] = []
    token, number = None, 0
    while True:
        items = pages[min(number, len(pages) - 1)]
        order = "asc" if ascending else "desc"
        page = parse_page(str(limit), order, token)
        chosen, token = take(items, lambda key: key, page)
        assert chosen or number == 0 or len(pages) > 1
        seen += chosen
        number += 1
        if token is None:
            return seen
        assert number < PAGES_MAX, "paging does not end"


@settings(deadline=None)
@given(st.sets(KEYS, max_size=40), st.integers(1, 9), st.booleans())
def test_pages_of_a_still_list_are_the_sorted_list(keys: set[SortKey], limit: int, ascending: bool) -> None:
    assert walk([keys], limit, ascending) == sorted(keys, reverse=not ascending)


@settings(deadline=None)
@given(
    st.sets(KEYS, max_size=25), st.lists(st.tuples(KEYS, st.booleans()), max_size=25), st.integers(1, 5), st.booleans()
)
def test_changes_between_pages_neither_repeat_nor_lose_what_was_there_all_the_time(
    keys: set[SortKey], changes: list[tuple[SortKey, bool]], limit: int, ascending: bool
) -> None:
    pages = [set(keys)]
    for key, insert in changes:
        pages.append(pages[-1] | {key} if insert else pages[-1] - {key})
    seen = walk(pages, limit, ascending)
    assert len(seen) == len(set(seen))
    assert set.intersection(*pages) <= set(seen)
    assert seen == sorted(seen, reverse=not ascending)


@settings(deadline=None)
@given(st.text())
def test_any_token_is_either_ours_or_refused(token: str) -> None:
    from agentenv.errors import InvalidRequest

    try:
        page = parse_page(None, None, token)
    except InvalidRequest:
        return
    assert isinstance(page, PageRequest)


@pytest.fixture
async def many(client: Client, node: FakeNode, clock: FakeClock) -> list[str]:
    """Seven sandboxes, oldest first; the third is paused. Two were started in the same microsecond."""
    ids: list[str] = []
    for number in range(7):
        clock.advance(0.0 if number == 4 else 1.000001)
        body = {"templateID": "base", "metadata": {"n": str(number), "odd": str(number % 2)}}
        ids.append((await client.post("/v2/sandboxes", json=body)).json()["sandboxID"])
    await client.post(f"/sandboxes/{ids[2]}/pause")
    return ids


async def test_the_token_is_absent_on_the_last_page_only(client: Client, many: list[str]) -> None:
    seen: list[str] = []
    query: dict[str, str] = {"limit": "3"}
    for _ in range(PAGES_MAX):
        answer = await client.get("/v2/sandboxes", params=query)
        assert answer.headers["X-Total-Running"] == "6"
        seen += [entry["sandboxID"] for entry in answer.json()]
        if "X-Next-Token" not in answer.headers:
            break
        query["nextToken"] = answer.headers["X-Next-Token"]
    assert len(seen) == 7
    assert set(seen) == set(many)
    assert seen[-1] == many[0]


async def test_ascending_order_and_a_token_of_the_other_order(client: Client, many: list[str]) -> None:
    answer = await client.get("/v2/sandboxes", params={"order": "asc", "limit": "2"})
    assert [entry["sandboxID"] for entry in answer.json()] == many[:2]
    token = answer.headers["X-Next-Token"]
    assert (await client.get("/v2/sandboxes", params={"nextToken": token})).status_code == 400


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ([("state", "paused")], 1),
        ([("state", "running")], 6),
        ([("state", "running,paused")], 7),
        ([("state", "running"), ("state", "paused")], 7),
        ([("template", "base")], 7),
        ([("template", "base:default")], 7),
        ([("template", "unknown")], 0),
    ],
)
async def test_state_and_template_filters(
    client: Client, many: list[str], query: list[tuple[str, str]], count: int
) -> None:
    assert len((await client.get("/v2/sandboxes", params=query)).json()) == count


async def test_started_after_is_inclusive_to_the_microsecond(client: Client, many: list[str]) -> None:
    entries = (await client.get("/v2/sandboxes", params={"order": "asc"})).json()
    third = entries[2]["startedAt"]
    for spelling in (third, third.replace("Z", "+00:00")):
        answer = await client.get("/v2/sandboxes", params={"startedAfter": spelling})
        assert len(answer.json()) == 5
    # A client that forgot to escape the plus.
    assert len((await client.get(f"/v2/sandboxes?startedAfter={third.replace('Z', '+00:00')}")).json()) == 5


def sdk_encoding(metadata: dict[str, str]) -> str:
    """What both SDKs put into the one query parameter, before their HTTP library encodes it again."""
    return urllib.parse.urlencode({urllib.parse.quote(k): urllib.parse.quote(v) for k, v in metadata.items()})


TRICKY = {"a b": "1&2=3", "p+q": "100%", "ünï": "/x?y", "%41": "%2541"}


async def test_metadata_is_decoded_as_often_as_the_sdk_encodes_it(client: Client, many: list[str]) -> None:
    await client.post("/v2/sandboxes", json={"templateID": "base", "metadata": TRICKY})
    for metadata in ({"odd": "1"}, {"odd": "1", "n": "3"}, TRICKY):
        answer = await client.get("/v2/sandboxes", params={"metadata": sdk_encoding(metadata)})
        found = [entry["metadata"] for entry in answer.json()]
        assert found
        assert all(metadata.items() <= entry.items() for entry in found)
    v1 = await client.get("/sandboxes", params={"metadata": sdk_encoding(TRICKY)})
    assert len(v1.json()) == 1


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=8), max_size=5))
def test_metadata_survives_the_sdks_encoding(metadata: dict[str, str]) -> None:
    from hypothesis import assume

    try:
        encoded = sdk_encoding(metadata)
    except UnicodeEncodeError:
        assume(False)
    assert parse_metadata(encoded) == metadata


async def test_a_client_that_encodes_once_is_understood(client: Client, many: list[str]) -> None:
    answer = await client.get("/v2/sandboxes?metadata=odd%3D1%26n%3D3")
    assert len(answer.json()) == 1


@pytest.mark.parametrize("state", [SandboxState.CREATING, SandboxState.KILLING])
async def test_what_is_being_made_or_killed_is_not_listed(
    client: Client, node: FakeNode, many: list[str], state: Any
) -> None:
    node.replace(many[0], state=state)
    assert len((await client.get("/v2/sandboxes")).json()) == 6
    assert (await client.get(f"/sandboxes/{many[0]}")).status_code == 404


async def test_a_capture_shows_the_state_that_the_sandbox_keeps(
    client: Client, node: FakeNode, many: list[str]
) -> None:
    node.replace(many[0], state=SandboxState.SNAPSHOTTING)
    node.replace(many[2], state=SandboxState.SNAPSHOTTING)
    states = [(await client.get(f"/sandboxes/{many[n]}")).json()["state"] for n in (0, 2)]
    assert states == ["running", "paused"]


async def test_snapshots_come_in_pages_too(client: Client, many: list[str], clock: FakeClock) -> None:
    for _ in range(5):
        clock.advance(1)
        await client.post(f"/sandboxes/{many[0]}/snapshots")
    seen: list[str] = []
    query: dict[str, str] = {"limit": "2"}
    for _ in range(3):
        answer = await client.get("/snapshots", params=query)
        seen += [entry["snapshotID"] for entry in answer.json()]
        query["nextToken"] = answer.headers.get("X-Next-Token", "")
    assert len(seen) == len(set(seen)) == 5
    assert query["nextToken"] == ""
