"""JSON of others: however deep, large or wrong it is, the error names where it came from."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import httpx
import pytest
from fake_registry import FakeRegistry, always

from agentenv.clock import FakeClock
from agentenv.errors import ImageError, RegistryError
from agentenv.images._json import json_object, json_value
from agentenv.images.archive import DockerArchiveSource
from agentenv.images.endpoints import RegistrySettings
from agentenv.images.reference import LocalReference, RegistryReference, Transport
from agentenv.images.registry import RegistryClient

# Deeper than the parser's stack.
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (DEEP, "it: not JSON"),
        (b"\xff", "it: not JSON"),
        (b"{", "it: not JSON"),
        (b"[]", "it: not a JSON object"),
        (b"[" * 200_001, "it: 200001 bytes; the limit is 200000"),
    ],
    ids=["deep", "no text", "cut", "list", "large"],
)
def test_what_is_no_object_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(ImageError, match=says):
        json_object(raw, "it", 200_000)


def test_what_is_one_is_read() -> None:
    assert json_object(b'{"a": [1]}', "it", 10) == {"a": [1]}
    assert json_value(b"[1]", "it", 3) == [1]


async def test_a_deep_docker_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(DEEP)
        tar.addfile(info, io.BytesIO(DEEP))
    source = DockerArchiveSource(LocalReference(Transport.DOCKER_ARCHIVE, str(path)))
    try:
        with pytest.raises(ImageError, match=r"manifest\.json: not JSON"):
            await source.image()
    finally:
        await source.aclose()


async def test_a_deep_token_is_refused() -> None:
    registry, clock = FakeRegistry(), FakeClock()
    registry.auth["reg.test"] = "bearer"
    registry.faults.append(always("/token", lambda _: httpx.Response(200, content=DEEP)))

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    client = RegistryClient(RegistrySettings(), clock=clock, sleep=sleep, transport=registry.transport())
    with pytest.raises(RegistryError, match="without a token"):
        await client.manifest(RegistryReference("reg.test", "a/b", "t"))
    await client.aclose()
