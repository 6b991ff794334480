"""The registry client against a registry that misbehaves. Nothing sleeps: waiting moves a clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_registry import Broken, FakeRegistry, always, digest_of, once

from agentenv.clock import FakeClock
from agentenv.errors import ImageNotFound, RegistryDenied, RegistryError, StorageFull
from agentenv.images import media
from agentenv.images.endpoints import HostSettings, RegistrySettings
from agentenv.images.manifest import Descriptor, Manifest
from agentenv.images.reference import RegistryReference
from agentenv.images.registry import RegistryClient

HOST = "reg.test"
REF = RegistryReference(HOST, "a/b", "t")
CONTENT = bytes(range(256)) * 20_000


def blob_of(content: bytes) -> Descriptor:
    return Descriptor(f"{media.OCI_LAYER}+gzip", digest_of(content), len(content))


def manifest_body(*layers: bytes) -> dict[str, Any]:
    def described(content: bytes, media_type: str) -> dict[str, Any]:
        return {"mediaType": media_type, "digest": digest_of(content), "size": len(content)}

    return {
        "schemaVersion": 2,
        "mediaType": media.OCI_MANIFEST,
        "config": described(b"{}", media.OCI_CONFIG),
        "layers": [described(layer, media.OCI_LAYER) for layer in layers],
    }


class World:
    """A client, its registry, and what it waited."""

    def __init__(self, settings: RegistrySettings) -> None:
        self.registry = FakeRegistry()
        self.clock = FakeClock()
        self.waits: list[float] = []
        self.bytes = 0
        self.client = RegistryClient(settings, clock=self.clock, sleep=self._sleep, transport=self.registry.transport())

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.clock.advance(seconds)

    def _count(self, delta: int) -> None:
        self.bytes += delta

    async def pull(self, content: bytes, into: Path) -> bytes:
        await self.client.blob(REF, blob_of(content), into, self._count)
        return into.read_bytes()


LOGIN = HostSettings(username="user", password="secret")
MIRRORED = RegistrySettings({HOST: HostSettings(mirrors=("https://m1.test", "m2.test/cache"))})


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(getattr(request, "param", RegistrySettings()))
    yield made
    await made.client.aclose()


login = pytest.mark.parametrize("world", [RegistrySettings({HOST: LOGIN})], indirect=True)
mirrored = pytest.mark.parametrize("world", [MIRRORED], indirect=True)


async def test_a_tag_is_read_and_a_digest_verified(world: World) -> None:
    digest = world.registry.add_manifest(manifest_body(b"x"), tag="t")
    found = await world.client.manifest(REF)
    assert isinstance(found, Manifest)
    assert found.digest == digest
    assert await world.client.manifest(REF.with_digest(digest)) == found
    world.registry.manifests[digest] = (media.OCI_MANIFEST, b"{}")
    with pytest.raises(RegistryError, match="digest"):
        await world.client.manifest(REF.with_digest(digest))


async def test_what_is_not_there_is_not_found(world: World) -> None:
    with pytest.raises(ImageNotFound, match=r"reg\.test/v2/a/b/manifests/t.*404.*not here"):
        await world.client.manifest(REF)
    assert world.waits == []


@login
@pytest.mark.parametrize("scheme", ["basic", "bearer"])
async def test_authorization_is_found_out_once(world: World, scheme: str) -> None:
    world.registry.auth[HOST] = scheme
    world.registry.add_manifest(manifest_body(b"x"), tag="t")
    for _ in range(3):
        await world.client.manifest(REF)
    unauthorized = [r for r in world.registry.requests if "authorization" not in r.headers]
    assert len(unauthorized) == 1
    assert world.registry.tokens_given == (1 if scheme == "bearer" else 0)


@login
async def test_a_token_is_renewed_when_it_ends(world: World) -> None:
    world.registry.auth[HOST] = "bearer"
    world.registry.add_manifest(manifest_body(b"x"), tag="t")
    await world.client.manifest(REF)
    world.clock.advance(295)
    await world.client.manifest(REF)
    assert world.registry.tokens_given == 2


async def test_a_refusal_says_that_there_were_no_credentials(world: World) -> None:
    world.registry.auth[HOST] = "bearer"
    with pytest.raises(RegistryDenied, match="a/b without credentials"):
        await world.client.manifest(REF)


@pytest.mark.parametrize(
    "world", [RegistrySettings({HOST: HostSettings(username="user", password="wrong")})], indirect=True
)
@pytest.mark.parametrize("scheme", ["basic", "bearer"])
async def test_a_refusal_names_the_user_and_never_the_password(world: World, scheme: str) -> None:
    world.registry.auth[HOST] = scheme
    with pytest.raises(RegistryDenied, match="user") as caught:
        await world.client.manifest(REF)
    assert "wrong" not in str(caught.value)


@login
async def test_redirects_never_see_the_authorization(world: World, tmp_path: Path) -> None:
    world.registry.auth[HOST] = "basic"
    world.registry.redirects[HOST] = "https://cdn.test"
    world.registry.add_blob(CONTENT)
    assert await world.pull(CONTENT, tmp_path / "b") == CONTENT
    cdn = [r for r in world.registry.requests if r.url.host == "cdn.test"]
    assert len(cdn) == 1
    assert "authorization" not in cdn[0].headers


async def test_redirects_to_plain_http_are_refused(world: World, tmp_path: Path) -> None:
    world.registry.redirects[HOST] = "http://cdn.test"
    with pytest.raises(RegistryError, match="without encryption"):
        await world.pull(CONTENT, tmp_path / "b")


async def test_redirects_in_a_circle_end(world: World, tmp_path: Path) -> None:
    world.registry.redirects[HOST] = f"https://{HOST}"
    with pytest.raises(RegistryError, match="redirects"):
        await world.pull(CONTENT, tmp_path / "b")


async def test_a_token_service_without_encryption_gets_no_password(world: World) -> None:
    demand = {"www-authenticate": 'Bearer realm="http://auth.test/token"'}
    world.registry.faults.append(always("manifests", lambda _: httpx.Response(401, headers=demand)))
    with pytest.raises(RegistryError, match="without encryption"):
        await world.client.manifest(REF)


async def test_429_waits_as_long_as_it_is_told(world: World) -> None:
    world.registry.add_manifest(manifest_body(b"x"), tag="t")
    world.registry.faults.append(once("manifests", lambda _: httpx.Response(429, headers={"retry-after": "7"})))
    await world.client.manifest(REF)
    assert world.waits == [7.0]


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408])
async def test_what_may_pass_is_repeated_with_back_off_and_given_up(world: World, status: int) -> None:
    world.registry.faults.append(always("manifests", lambda _: httpx.Response(status)))
    with pytest.raises(RegistryError, match=f"answered {status}.*given up after 6"):
        await world.client.manifest(REF)
    assert world.waits == [0.5, 1.0, 2.0, 4.0, 8.0]


async def test_a_wait_beyond_the_deadline_is_not_begun(world: World) -> None:
    world.registry.faults.append(always("manifests", lambda _: httpx.Response(503, headers={"retry-after": "3600"})))
    with pytest.raises(RegistryError, match="503"):
        await world.client.manifest(REF)
    assert world.waits == []


async def test_time_outs_and_broken_connections_are_repeated(world: World) -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("", request=request)

    world.registry.add_manifest(manifest_body(b"x"), tag="t")
    world.registry.faults.append(once("manifests", unreachable))
    world.registry.faults.append(once("manifests", lambda _: httpx.Response(200, stream=Broken(b"{"))))
    await world.client.manifest(REF)
    assert len(world.waits) == 2


async def test_a_manifest_beyond_the_limit_is_refused(world: World) -> None:
    world.registry.add_manifest(b" " * (5 << 20), tag="t")
    with pytest.raises(RegistryError, match="more than"):
        await world.client.manifest(REF)


async def test_a_blob_is_resumed_where_it_broke_off(world: World, tmp_path: Path) -> None:
    world.registry.add_blob(CONTENT)
    headers = {"etag": '"v1"'}
    for at in (3_000_000, 4_000_000):
        start = 0 if at == 3_000_000 else 3_000_000
        answer_headers = headers | ({"content-range": f"bytes {start}-{len(CONTENT) - 1}/*"} if start else {})
        status = 206 if start else 200
        part = CONTENT[start:at]
        world.registry.faults.append(
            once("blobs", lambda _, s=status, h=answer_headers, p=part: httpx.Response(s, headers=h, stream=Broken(p)))
        )
    assert await world.pull(CONTENT, tmp_path / "b") == CONTENT
    asked = [(r.headers.get("range"), r.headers.get("if-range")) for r in world.registry.requests]
    assert asked == [(None, None), ("bytes=3000000-", '"v1"'), ("bytes=4000000-", '"v1"')]
    assert world.bytes == len(CONTENT)
    # Progress was made each time, so the wait did not grow.
    assert world.waits == [0.5, 0.5]


async def test_a_changed_etag_or_a_server_without_ranges_begins_again(world: World, tmp_path: Path) -> None:
    world.registry.add_blob(CONTENT)
    world.registry.etag = '"v2"'
    broken = httpx.Response(200, headers={"etag": '"v1"'}, stream=Broken(CONTENT[:2_000_000]))
    world.registry.faults.append(once("blobs", lambda _: broken))
    assert await world.pull(CONTENT, tmp_path / "b") == CONTENT
    assert world.bytes == len(CONTENT)


async def test_what_an_earlier_download_left_is_used(world: World, tmp_path: Path) -> None:
    world.registry.add_blob(CONTENT)
    (tmp_path / "b").write_bytes(CONTENT[:1_234_567])
    assert await world.pull(CONTENT, tmp_path / "b") == CONTENT
    assert [r.headers.get("range") for r in world.registry.requests] == ["bytes=1234567-"]
    assert world.bytes == len(CONTENT)


async def test_a_wrong_beginning_is_fetched_again(world: World, tmp_path: Path) -> None:
    world.registry.add_blob(CONTENT)
    (tmp_path / "b").write_bytes(b"z" * 1_000)
    assert await world.pull(CONTENT, tmp_path / "b") == CONTENT
    assert world.bytes == len(CONTENT)


async def test_a_file_that_is_there_whole_is_only_verified(world: World, tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(CONTENT)
    assert await world.pull(CONTENT, tmp_path / "b") == CONTENT
    assert world.registry.requests == []


async def test_a_wrong_digest_is_an_error_and_leaves_no_bytes(world: World, tmp_path: Path) -> None:
    wrong = CONTENT[:-1] + b"!"
    world.registry.blobs[digest_of(CONTENT)] = wrong
    with pytest.raises(RegistryError, match="another digest"):
        await world.pull(CONTENT, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b""
    assert world.bytes == 0


async def test_more_bytes_than_promised_are_refused(world: World, tmp_path: Path) -> None:
    world.registry.blobs[digest_of(CONTENT)] = CONTENT + b"!"
    with pytest.raises(RegistryError, match="sends more than"):
        await world.pull(CONTENT, tmp_path / "b")


async def test_a_body_that_always_ends_early_is_given_up(world: World, tmp_path: Path) -> None:
    world.registry.blobs[digest_of(CONTENT)] = CONTENT[:-1]
    with pytest.raises(RegistryError, match=r"ended after 5119999 of 5120000 bytes.*given up"):
        await world.pull(CONTENT, tmp_path / "b")


async def test_a_range_that_was_not_asked_for_is_refused(world: World, tmp_path: Path) -> None:
    headers = {"content-range": f"bytes 5-{len(CONTENT) - 1}/*"}
    world.registry.faults.append(always("blobs", lambda _: httpx.Response(206, content=CONTENT[5:], headers=headers)))
    with pytest.raises(RegistryError, match="another one"):
        await world.pull(CONTENT, tmp_path / "b")


async def test_a_trickle_is_given_up(world: World, tmp_path: Path) -> None:
    """The clock moves ten minutes with each piece."""

    async def slow() -> AsyncIterator[bytes]:
        for at in range(0, len(CONTENT), 100_000):
            world.clock.advance(600)
            yield CONTENT[at : at + 100_000]

    world.registry.faults.append(always("blobs", lambda _: httpx.Response(200, content=slow())))
    with pytest.raises(RegistryError, match="slower than 64 KiB/s"):
        await world.pull(CONTENT, tmp_path / "b")


async def test_no_room_is_told_before_the_first_byte(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.images._download.BlobDownload._free_bytes", lambda _: 4096)
    with pytest.raises(StorageFull, match=r"needs 5120000 bytes in .*, where 4096 are free"):
        await world.pull(CONTENT, tmp_path / "b")
    assert world.registry.requests == []


@mirrored
async def test_mirrors_are_asked_in_order_before_the_registry(world: World, tmp_path: Path) -> None:
    world.registry.add_manifest(manifest_body(b"x"), tag="t")
    await world.client.manifest(REF)
    assert world.registry.paths() == ["m1.test/v2/a/b/manifests/t"]
    world.registry.faults.append(always("m1.test", lambda _: httpx.Response(404)))
    await world.client.manifest(REF)
    assert world.registry.paths()[1:] == ["m1.test/v2/a/b/manifests/t", "m2.test/v2/cache/a/b/manifests/t"]


@mirrored
async def test_a_lying_mirror_costs_a_fallback(world: World, tmp_path: Path) -> None:
    world.registry.add_blob(CONTENT)
    world.registry.faults.append(always("m1.test", lambda _: httpx.Response(200, content=b"z" * len(CONTENT))))
    assert await world.pull(CONTENT, tmp_path / "b") == CONTENT


@mirrored
async def test_a_mirror_that_breaks_off_is_continued_elsewhere(world: World, tmp_path: Path) -> None:
    world.registry.add_blob(CONTENT)
    world.registry.faults.append(always("m1.test", lambda _: httpx.Response(200, stream=Broken(CONTENT[:3_000_000]))))
    assert await world.pull(CONTENT, tmp_path / "b") == CONTENT
    assert world.registry.requests[-1].headers["range"] == "bytes=3000000-"


@mirrored
async def test_a_dead_mirror_is_left_alone_for_a_while(world: World) -> None:
    def dead(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    world.registry.add_manifest(manifest_body(b"x"), tag="t")
    world.registry.faults.append(always("m1.test", dead))
    await world.client.manifest(REF)
    await world.client.manifest(REF)
    assert [path.split("/")[0] for path in world.registry.paths()] == ["m1.test", "m1.test", "m2.test", "m2.test"]
    world.clock.advance(61)
    await world.client.manifest(REF)
    assert world.registry.paths()[4].startswith("m1.test")


@mirrored
async def test_only_the_registry_itself_says_that_there_is_nothing(world: World) -> None:
    world.registry.faults.append(always(f"//{HOST}", lambda _: httpx.Response(500)))
    with pytest.raises(RegistryError, match="500") as caught:
        await world.client.manifest(REF)
    assert "404" in caught.value.__notes__[0]


async def test_referrers_come_from_the_api_or_from_the_tag(world: World) -> None:
    subject = "sha256:" + "a" * 64
    entry = {"mediaType": media.OCI_MANIFEST, "digest": digest_of(b"r"), "size": 1, "artifactType": "x/y"}
    index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [entry]}
    assert await world.client.referrers(REF, subject) == []
    world.registry.add_manifest(index, media.OCI_INDEX, "sha256-" + "a" * 64)
    assert [found.artifact_type for found in await world.client.referrers(REF, subject)] == ["x/y"]
    world.registry.referrers[subject] = json.dumps(index | {"manifests": []}).encode()
    assert await world.client.referrers(REF, subject) == []


@pytest.mark.parametrize("part", ["referrers", "manifests"])
@pytest.mark.parametrize("status", [500, 403])
async def test_an_error_is_never_taken_for_no_referrers(world: World, part: str, status: int) -> None:
    world.registry.faults.append(always(part, lambda _: httpx.Response(status)))
    with pytest.raises(RegistryError):
        await world.client.referrers(REF, "sha256:" + "a" * 64)


async def test_pages_of_referrers_are_followed_on_the_same_host_only(world: World) -> None:
    subject = "sha256:" + "a" * 64
    entry = {"mediaType": media.OCI_MANIFEST, "digest": digest_of(b"r"), "size": 1}
    index = json.dumps({"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [entry]}).encode()
    world.registry.referrers[subject] = index
    links = iter(["</v2/a/b/referrers/" + subject + "?page=2>; rel=next", "<https://evil.test/x>; rel=next"])
    link = {"link": next(links)}
    world.registry.faults.append(once("referrers", lambda _: httpx.Response(200, content=index, headers=link)))
    assert len(await world.client.referrers(REF, subject)) == 2
    evil = {"link": next(links)}
    world.registry.faults.append(once("referrers", lambda _: httpx.Response(200, content=index, headers=evil)))
    with pytest.raises(RegistryError, match="another host"):
        await world.client.referrers(REF, subject)
