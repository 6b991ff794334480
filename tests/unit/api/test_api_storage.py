"""The three tiers: what is shown, collected, verified and repaired."""

from __future__ import annotations

import dataclasses
import json

import httpx
import pytest

from agentenv.api.fake import FakeStorage
from agentenv.errors import Conflict, StoreUnavailable
from agentenv.model import Damage, TierUnavailable

Client = httpx.AsyncClient
DAMAGES = [
    Damage("repository", "layers/ab.lsmt", "block 3 differs from its digest", ("template base:default",)),
    Damage("cache", "blocks/cd", "unreadable"),
]


async def test_the_three_tiers_are_shown(client: Client) -> None:
    shown = (await client.get("/aenv/storage")).json()
    assert (shown["backend"], shown["encrypted"], shown["snapshots"]) == ("oss", False, 3)
    assert shown["staging"] == {
        "location": "/var/lib/aenv/staging",
        "sizeBytes": 5 << 20,
        "files": 2,
        "sharedBytes": 0,
        "garbageBytes": 1 << 20,
        "sizeBytesMax": None,
        "freeBytes": 7 << 30,
        "counters": {},
        "unavailable": None,
    }
    assert shown["repository"]["freeBytes"] is None
    assert shown["cache"]["counters"]["hits"] == 90


async def test_a_repository_out_of_reach_leaves_the_other_tiers(client: Client, storage: FakeStorage) -> None:
    out = TierUnavailable("s3://bucket/aenv", "the store does not answer")
    storage.report = dataclasses.replace(storage.report, repository=out)
    answer = await client.get("/aenv/storage")
    assert answer.status_code == 200
    shown = answer.json()
    assert shown["repository"] == {
        "location": "s3://bucket/aenv",
        **dict.fromkeys(("sizeBytes", "files", "sharedBytes", "garbageBytes", "sizeBytesMax", "freeBytes")),
        "counters": {},
        "unavailable": "the store does not answer",
    }
    assert (shown["staging"]["sizeBytes"], shown["cache"]["counters"]["hits"]) == (5 << 20, 90)


@pytest.mark.parametrize("verb", ["gc", "verify", "repair"])
async def test_what_needs_the_store_is_503_without_it(client: Client, storage: FakeStorage, verb: str) -> None:
    storage.fail_next("collect" if verb == "gc" else verb, StoreUnavailable("the store does not answer"))
    assert (await client.post(f"/aenv/storage/{verb}")).status_code == 503


async def test_garbage_is_collected_with_the_asked_grace(client: Client, storage: FakeStorage) -> None:
    answer = await client.post("/aenv/storage/gc", json={"graceS": 0})
    assert answer.status_code == 200
    assert answer.json() == {
        "graceS": 0.0, "removedFiles": 4, "freedBytes": 4 << 20, "youngFiles": 1, "youngBytes": 1024,
        "forgottenLayers": 2,
    }  # fmt: skip
    assert (await client.post("/aenv/storage/gc")).json()["graceS"] == 3600.0
    assert storage.graces == [0, None]


@pytest.mark.parametrize("grace", [-1, 30 * 86_400 + 1, 1e300, "1", True])
async def test_a_grace_out_of_range_is_refused(client: Client, storage: FakeStorage, grace: object) -> None:
    answer = await client.post("/aenv/storage/gc", json={"graceS": grace})
    assert answer.status_code == 400
    assert "graceS" in answer.json()["message"]
    assert storage.calls == []


async def test_a_verify_tells_what_is_damaged_and_what_depends_on_it(client: Client, storage: FakeStorage) -> None:
    storage.damages = list(DAMAGES)
    report = (await client.post("/aenv/storage/verify")).json()
    assert (report["checkedFiles"], report["checkedBytes"]) == (51, 3 << 30)
    assert report["damages"][0] == {
        "tier": "repository",
        "item": "layers/ab.lsmt",
        "detail": "block 3 differs from its digest",
        "dependents": ["template base:default"],
        "repaired": False,
    }


@pytest.mark.parametrize("verb", ["verify", "repair"])
async def test_both_stream_and_end_with_the_report(client: Client, storage: FakeStorage, verb: str) -> None:
    storage.damages = list(DAMAGES)
    answer = await client.post(f"/aenv/storage/{verb}", headers={"Accept": "application/x-ndjson"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert {"progress": "reading", "doneBytes": 1, "totalBytes": 2} in lines
    assert [item["repaired"] for item in lines[-1]["report"]["damages"]] == [False, verb == "repair"]


async def test_a_second_verify_is_a_conflict_in_the_last_line(client: Client, storage: FakeStorage) -> None:
    storage.fail_next("verify", Conflict("a verify runs already"))
    answer = await client.post("/aenv/storage/verify", headers={"Accept": "application/x-ndjson"})
    assert json.loads(answer.text.splitlines()[-1])["error"]["code"] == 409
