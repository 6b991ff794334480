"""aenv-storage, started as the server starts it, against a real S3 server, a full disk and a kill."""

from __future__ import annotations

import hashlib
import json
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.host import built
from tests.support.fault_proxy import SLOW_DOWN, FaultProxy, Stall, proxy_in_thread
from tests.support.s3 import REGION, S3Server, s3_server

from agentenv.errors import StorageFull
from agentenv.model import Blob
from agentenv.snapshots import WorkerChecker, WorkerOptions, WorkerPublisher
from agentenv.snapshots.blobs import Descriptors, RemotePlaces, layer_key
from agentenv.snapshots.stores.credentials import Credentials
from agentenv.snapshots.stores.oss import OssSettings, OssStore
from agentenv.snapshots.stores.posix import PosixStore

MIB = 1 << 20
PART_BYTES = 8 * MIB
WAIT_S_MAX = 60.0


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests; each uses a bucket of its own."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture
def program() -> Path:
    return built("aenv-storage") / "aenv-storage"


def lsmt(data: bytes) -> bytes:
    """A sealed layer with `data` at the start of its image: another program's reading of spec/layers.md."""
    magic = b"LSMT\0\1\2\0" + bytes.fromhex("657e63d29444084ca2d2c8ec4fcfae8a")
    sectors, limit = len(data) // 512, 16_376
    runs = [(at, min(limit, sectors - at)) for at in range(0, sectors, limit)]
    index = b"".join(struct.pack("<QQ", at | count << 50, 8 + at) for at, count in runs)
    place = 4096 + len(data)
    end = struct.pack("<QQQ", place, len(runs), len(data))
    header, trailer = (magic + struct.pack("<II", 390, flags) + end for flags in (0b111, 0b110))
    versions = bytes(132 - 56) + bytes([1, 1])
    whole = [(part + versions).ljust(4096, b"\0") for part in (header, trailer)]
    return whole[0] + data + index.ljust(-(-len(index) // 4096) * 4096, b"\0") + whole[1]


class Bucket:
    """A bucket of the server, reached through a proxy that makes faults, and a folder with what a node has."""

    def __init__(self, server: S3Server, proxy: FaultProxy, folder: Path, program: Path) -> None:
        keys = Credentials(server.access_key_id, server.secret_access_key)
        self.settings = OssSettings(
            bucket=server.make_bucket(),
            region=REGION,
            endpoint=server.endpoint,
            addressing="path",
            prefix="nodes/a",
            allow_http=True,
            credentials=keys,
        )
        self.proxy, self.folder = proxy, folder
        self.store = OssStore(self.settings)
        self.options = WorkerOptions(
            program, folder / "stores.json", store_name="repository", journal_dir=folder / "uploads"
        )
        entry = replace(self.settings, endpoint=proxy.url).worker_entry()
        config = {"stores": {"repository": entry}, "registries": {}, "encryption_key": "0f" * 32}
        self.options.stores_file.write_text(json.dumps(config))
        self.layer = folder / "layer"
        # Three parts; compressible, and no part like another one.
        content = b"".join(hashlib.sha256(b"%d" % at).digest() * 16 for at in range(17 * MIB // 512))
        self.layer.write_bytes(lsmt(content))

    def command(self) -> list[str]:
        """In parts of the least size, so that a layer of a few megabytes has several."""
        program, folder = str(self.options.program), self.folder
        where = ["--stores", str(self.options.stores_file), "--store", "repository", "--prefix", "layers/"]
        parts = ["--journal-dir", str(folder / "uploads"), "--part-bytes", str(PART_BYTES)]
        return [program, "publish", "--layer", str(self.layer), *where, *parts]

    def publisher(self, **options: Any) -> WorkerPublisher:
        return WorkerPublisher(replace(self.options, **options), self.store)

    def sent(self, part: int) -> int:
        return sum(f"partNumber={part}&" in request.target for request in self.proxy.requests)

    def descriptor(self, blob: Blob) -> Path:
        return RemotePlaces(Descriptors(self.folder / "blobs")).path(blob.digest, blob)

    def checker(self) -> WorkerChecker:
        return WorkerChecker(self.options.program, self.options.stores_file)


@pytest.fixture
def bucket(s3: S3Server, tmp_path: Path, program: Path) -> Iterator[Bucket]:
    with proxy_in_thread(s3.host, s3.port) as proxy:
        yield Bucket(s3, proxy, tmp_path, program)


@pytest.mark.parametrize(
    ("compression", "encrypt"), [(None, False), ("lz4", False), ("zstd", False), (None, True), ("lz4", True)]
)
async def test_a_published_layer_is_in_the_bucket_whole_and_verifies(
    bucket: Bucket, compression: str | None, encrypt: bool
) -> None:
    blob = await bucket.publisher(compression=compression, encrypt=encrypt).layer(bucket.layer)
    plain = bucket.layer.read_bytes()
    assert (blob.plain_digest, blob.plain_size_bytes) == (hashlib.sha256(plain).hexdigest(), len(plain))
    stored = (await bucket.store.get(layer_key(blob.digest))).content
    assert (hashlib.sha256(stored).hexdigest(), len(stored)) == (blob.digest, blob.size_bytes)
    assert (stored == plain) == (compression is None and not encrypt)
    blocks = (await bucket.store.get(f"layers/{blob.digest}.blocks")).content
    assert hashlib.sha256(blocks).hexdigest() == blob.blocks_digest
    assert [blocks[28 + 32 * at : 60 + 32 * at] for at in range(-(-len(stored) // 65_536))] == [
        hashlib.sha256(stored[at : at + 65_536]).digest() for at in range(0, len(stored), 65_536)
    ]
    assert await bucket.checker().check(bucket.descriptor(blob), blob.digest) is None


async def test_damage_in_the_bucket_is_found(bucket: Bucket) -> None:
    blob = await bucket.publisher().layer(bucket.layer)
    stored = bytearray((await bucket.store.get(layer_key(blob.digest))).content)
    stored[9 * MIB] ^= 1
    await bucket.store.put(layer_key(blob.digest), bytes(stored))
    damage = await bucket.checker().check(bucket.descriptor(blob), blob.digest)
    assert damage is not None
    assert "block 144" in damage


def test_a_killed_upload_goes_on_where_it_was(bucket: Bucket) -> None:
    bucket.proxy.fail(Stall(), when=lambda request: "partNumber=2&" in request.target, times=-1)
    with subprocess.Popen(bucket.command(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            _until(lambda: _journal_lines(bucket) == 3)
        finally:
            process.send_signal(signal.SIGKILL)
    bucket.proxy.heal()
    again = subprocess.run(bucket.command(), capture_output=True, check=True, timeout=WAIT_S_MAX)
    assert [bucket.sent(part) for part in (1, 2, 3)] == [1, 2, 1]
    digest = json.loads(again.stdout)["digest"]
    assert digest == hashlib.sha256(bucket.layer.read_bytes()).hexdigest()
    assert list((bucket.folder / "uploads").iterdir()) == []


def test_a_store_that_asks_for_less_at_any_request_is_given_time(bucket: Bucket) -> None:
    at = 0
    while True:
        at += 1
        # Another content each time, so that all of it is sent.
        with bucket.layer.open("r+b") as layer:
            layer.seek(4096)
            layer.write(struct.pack("<Q", at))
        before = len(bucket.proxy.requests)
        bucket.proxy.fail(SLOW_DOWN, at=at)
        subprocess.run(bucket.command(), capture_output=True, check=True, timeout=WAIT_S_MAX)
        if len(bucket.proxy.requests) - before < at:
            break
        bucket.proxy.heal()
    assert at >= 8


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.host
@pytest.mark.parametrize("compression", [None, "lz4"])
async def test_a_full_disk_is_named_and_holds_nothing_half_made(
    tmp_path: Path, program: Path, compression: str | None
) -> None:
    layer = tmp_path / "layer"
    layer.write_bytes(lsmt(b"".join(hashlib.sha256(b"%d" % at).digest() for at in range(8 * MIB // 32))))
    (tmp_path / "stores.json").write_text('{"stores":{}}')
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        options = WorkerOptions(program, tmp_path / "stores.json", directory=disk, compression=compression)
        with pytest.raises(StorageFull, match="disk"):
            await WorkerPublisher(options, PosixStore(disk)).layer(layer)
        assert [path for path in disk.rglob("*") if path.is_file()] == []


def _journal_lines(bucket: Bucket) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (bucket.folder / "uploads").glob("*.json"))


def _until(done: Any) -> None:
    until = time.monotonic() + WAIT_S_MAX
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)
