"""Downloads over real sockets and onto a real disk that is full."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.oci import digest_of

from agentenv.errors import RegistryError, StorageFull
from agentenv.images import _download, media
from agentenv.images._retry import RetryPolicy
from agentenv.images.endpoints import RegistrySettings
from agentenv.images.manifest import Descriptor
from agentenv.images.reference import RegistryReference
from agentenv.images.registry import RegistryClient

CONTENT = os.urandom(3 << 20)
BLOB = Descriptor(media.OCI_LAYER, digest_of(CONTENT), len(CONTENT))


class Breaking:
    """A web server that closes each connection after `piece` bytes of a body."""

    def __init__(self, piece: int) -> None:
        self.piece = piece
        self.ranges: list[int] = []
        self.server: asyncio.Server | None = None

    async def start(self) -> RegistryReference:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        return RegistryReference(f"127.0.0.1:{port}", "a/b", "t")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        start = int(head.partition("range: bytes=")[2].partition("-")[0] or 0)
        self.ranges.append(start)
        status = f"206 x\r\ncontent-range: bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}" if start else "200 x"
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(CONTENT) - start}\r\n\r\n".encode())
        writer.write(CONTENT[start : start + self.piece])
        await writer.drain()
        writer.close()


@pytest.fixture
async def client() -> AsyncIterator[RegistryClient]:
    async def at_once(_: float) -> None:
        return

    made = RegistryClient(RegistrySettings(), retry=RetryPolicy(attempts_max=3), sleep=at_once)
    yield made
    await made.aclose()


async def test_connections_that_break_are_resumed(client: RegistryClient, tmp_path: Path) -> None:
    server = Breaking(1_000_000)
    reference = await server.start()
    await client.blob(reference, BLOB, tmp_path / "b", lambda _: None)
    assert (tmp_path / "b").read_bytes() == CONTENT
    assert server.ranges == [0, 1_000_000, 2_000_000, 3_000_000]
    assert server.server is not None
    server.server.close()


async def test_connections_that_bring_nothing_are_given_up(client: RegistryClient, tmp_path: Path) -> None:
    server = Breaking(0)
    reference = await server.start()
    with pytest.raises(RegistryError, match="given up after 3"):
        await client.blob(reference, BLOB, tmp_path / "b", lambda _: None)
    assert server.server is not None
    server.server.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "aenv-test", folder], check=True, timeout=20)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True, timeout=20)


@pytest.mark.host
@pytest.mark.parametrize("is_foreseen", [True, False])
async def test_a_full_disk_is_named_with_what_is_needed(
    client: RegistryClient, small_disk: Path, is_foreseen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when somebody else took the room meanwhile."""
    if not is_foreseen:
        monkeypatch.setattr(_download.BlobDownload, "_free_bytes", lambda _: len(CONTENT))
    server = Breaking(len(CONTENT))
    reference = await server.start()
    with pytest.raises(StorageFull, match=rf"layer {BLOB.digest} needs \d+ bytes in {small_disk}"):
        await client.blob(reference, BLOB, small_disk / "b", lambda _: None)
    assert server.server is not None
    server.server.close()
