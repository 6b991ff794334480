"""The real aenv-storage behind publishers and checkers, over a directory and a bucket, with spec/'s own layers."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest
from tests.conformance.snapshots.conftest import oss_settings
from tests.host import built
from tests.support.fault_proxy import SLOW_DOWN, FaultProxy, Reset, Status
from tests.support.s3 import S3Server
from tests.unit.snapshots.repository_world import PlainDigest, described

from agentenv.errors import OperationFailed
from agentenv.model import Progress
from agentenv.snapshots import CommittedRepository, PosixStore, Process, Store, ids_of
from agentenv.snapshots.blobs import layer_key
from agentenv.snapshots.opening import RepositoryOptions, open_repository, write_stores_file
from agentenv.snapshots.publishing import run_worker
from agentenv.snapshots.stores.oss import OssSettings, OssStore

LAYERS = Path(__file__).parents[3] / "spec" / "layers"
KEY = "0123456789abcdef" * 4


class WorkerDigester:
    """`aenv-storage digest`, in the place of blockd's operation of the same name."""

    def __init__(self, program: Path) -> None:
        self._program = program

    async def digest(self, path: str | Path) -> PlainDigest:
        answer = await run_worker([str(self._program), "digest", "--layer", str(path)])
        return PlainDigest(answer["digest"], answer["size_bytes"])


@pytest.fixture
def program() -> Path:
    return built("aenv-storage") / "aenv-storage"


def opened(
    store: Store, state: Path, program: Path, *, compression: str | None = None, encrypt: bool = False
) -> CommittedRepository:
    """A node's repository as the server opens it."""
    options = RepositoryOptions(state, program, "here", compression, encrypt)
    entry = store.settings.worker_entry() if isinstance(store, OssStore) else None
    write_stores_file(options.stores_file, repository=entry, registries={}, encryption_key=KEY if encrypt else None)
    return open_repository(store, options, Process("node-a"), WorkerDigester(program))


def local_layer(repository: CommittedRepository, name: str, layer_id: str) -> Path:
    """A layer of spec/ in staging."""
    path = repository.staging.layer(layer_id)
    shutil.copyfile(LAYERS / name, path)
    return path


def ignored(_: Progress) -> None:
    """Nobody looks."""


async def test_a_sparse_layer_is_linked_under_its_canonical_digest(program: Path, tmp_path: Path) -> None:
    repository = opened(PosixStore(tmp_path / "repository"), tmp_path / "state", program)
    await repository.load()
    local = local_layer(repository, "sparse.lsmt", "a" * 24)
    blob = await repository.publish_layer(local)
    assert blob.digest == hashlib.sha256((LAYERS / "dense.lsmt").read_bytes()).hexdigest()
    assert repository.path(blob.digest).samefile(local)
    # The dense form of the same content is the same blob.
    assert await repository.publish_layer(local_layer(repository, "dense.lsmt", "b" * 24)) == blob
    assert (await repository.verify(ignored)).damages == ()


@pytest.mark.parametrize(("compression", "encrypt"), [("lz4", False), ("zstd", True), (None, True)])
@pytest.mark.parametrize("kind", ["posix", "oss"])
async def test_what_is_stored_otherwise_is_verified_and_damage_is_named(
    s3: S3Server, program: Path, tmp_path: Path, kind: str, compression: str | None, encrypt: bool
) -> None:
    store: Store = PosixStore(tmp_path / "repository") if kind == "posix" else OssStore(oss_settings(s3, "nodes/a"))
    repository = opened(store, tmp_path / "state", program, compression=compression, encrypt=encrypt)
    await repository.load()
    blob = await repository.publish_layer(local_layer(repository, "sparse.lsmt", "a" * 24))
    assert blob.plain_digest == hashlib.sha256((LAYERS / "dense.lsmt").read_bytes()).hexdigest()
    assert (blob.compression, blob.encryption) == (compression, "aes-256-gcm" if encrypt else None)
    state = repository.staging.state("b" * 24)
    state.write_bytes(b"registers")
    made = await repository.commit(described("s1", [blob], await repository.publish_state(state)))
    stored = (await store.get(layer_key(blob.digest))).content
    assert hashlib.sha256(stored).hexdigest() == blob.digest
    assert len(stored) == blob.size_bytes
    assert (await repository.verify(ignored)).damages == ()
    flipped = bytearray(stored)
    flipped[len(flipped) // 2] ^= 1
    await store.put(layer_key(blob.digest), bytes(flipped))
    (damage,) = (await repository.verify(ignored)).damages
    assert (damage.item, damage.dependents) == (layer_key(blob.digest), ("snapshot s1",))
    # Staging still has it.
    (mended,) = (await repository.repair(ignored)).damages
    assert mended.repaired
    assert (await repository.verify(ignored)).damages == ()
    repository.release({blob.digest, *ids_of(made)})


async def test_a_bucket_has_the_dense_form_and_its_blocks(s3: S3Server, program: Path, tmp_path: Path) -> None:
    store = OssStore(oss_settings(s3))
    repository = opened(store, tmp_path / "state", program)
    await repository.load()
    blob = await repository.publish_layer(local_layer(repository, "sparse.lsmt", "a" * 24))
    dense = (LAYERS / "dense.lsmt").read_bytes()
    assert (blob.digest, blob.size_bytes) == (hashlib.sha256(dense).hexdigest(), len(dense))
    assert (await store.get(layer_key(blob.digest))).content == dense
    blocks = (await store.get(f"layers/{blob.digest}.blocks")).content
    assert hashlib.sha256(blocks).hexdigest() == blob.blocks_digest
    assert repository.path(blob.digest).name == f"{blob.digest}.blob"
    # Without its blocks it is not there, and is uploaded again.
    await store.delete(f"layers/{blob.digest}.blocks")
    assert await repository.publish_layer(local_layer(repository, "dense.lsmt", "b" * 24)) == blob
    assert await store.stat(f"layers/{blob.digest}.blocks") is not None


async def test_an_upload_passes_through_faults_at_every_request(s3: S3Server, program: Path, tmp_path: Path) -> None:
    async with FaultProxy(s3.host, s3.port) as proxy:

        async def publish(number: int) -> None:
            settings: OssSettings = dataclasses.replace(oss_settings(s3), endpoint=proxy.url)
            repository = opened(OssStore(settings), tmp_path / str(number), program)
            await repository.load()
            if number:
                proxy.fail([Status(500), SLOW_DOWN, Reset()][number % 3], at=number)
            blob = await repository.publish_layer(local_layer(repository, "base.lsmt", "a" * 24))
            proxy.heal()
            stored = (await OssStore(settings).get(layer_key(blob.digest))).content
            assert stored == (LAYERS / "base.lsmt").read_bytes()

        await publish(0)
        count = len(proxy.requests)
        for number in range(1, count + 1):
            proxy.heal()
            await publish(number)


async def test_a_bucket_that_is_not_there_is_named(s3: S3Server, program: Path, tmp_path: Path) -> None:
    settings = dataclasses.replace(oss_settings(s3), bucket="nowhere")
    repository = opened(OssStore(settings), tmp_path / "a", program)
    with pytest.raises(OperationFailed, match="nowhere"):
        await repository.publish_layer(local_layer(repository, "base.lsmt", "a" * 24))
