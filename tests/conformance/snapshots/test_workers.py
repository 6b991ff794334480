"""The real aenv-storage behind publishers and checkers, over a directory and a bucket, with spec/'s own layers."""

from __future__ import annotations

import asyncio
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

from agentenv.errors import OperationFailed, RepositoryDamaged
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
    store: Store,
    state: Path,
    program: Path,
    *,
    compression: str | None = None,
    encrypt: bool = False,
    key: str | None = KEY,
) -> CommittedRepository:
    """A node's repository as the server opens it."""
    key = key if encrypt else None
    options = RepositoryOptions(state, program, "here", compression, key)
    entry = store.settings.worker_entry() if isinstance(store, OssStore) else None
    write_stores_file(options.stores_file, repository=entry, registries={}, encryption_key=key)
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


@pytest.mark.parametrize("kind", ["posix", "oss"])
async def test_device_states_and_tokens_are_encrypted_for_every_node_with_the_key(
    s3: S3Server, program: Path, tmp_path: Path, kind: str
) -> None:
    store: Store = PosixStore(tmp_path / "repository") if kind == "posix" else OssStore(oss_settings(s3, "nodes/a"))
    repository = opened(store, tmp_path / "a", program, encrypt=True)
    await repository.load()
    layer = await repository.publish_layer(local_layer(repository, "base.lsmt", "a" * 24))
    registers = b"the registers of a machine" * 10_000
    local = repository.staging.state("b" * 24)
    local.write_bytes(registers)
    state = await repository.publish_state(local)
    assert (state.plain_digest, state.encryption) == (hashlib.sha256(registers).hexdigest(), "aes-256-gcm")
    assert await repository.publish_state(local) == state
    snapshot = dataclasses.replace(described("s1", [layer], state), token_owner="box", guest_token="5ec2e7")
    made = await repository.commit(snapshot)
    for folder in ("layers/", "states/", "manifests/", "snapshots/"):
        for entry in await store.list(folder):
            content = (await store.get(entry.key)).content
            assert b"registers of a machine" not in content
            assert b"5ec2e7" not in content
            assert state.plain_digest.encode() not in content

    other = opened(store, tmp_path / "b", program, encrypt=True)
    assert await other.load() == [made]
    # Many forks start at once.
    (path,) = set(await asyncio.gather(*(other.state(state.digest) for _ in range(8))))
    assert path == tmp_path / "b" / "blobs" / f"{state.digest}.state"
    assert path.read_bytes() == registers
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(registers[:-1])
    assert (await other.state(state.digest)).read_bytes() == registers
    assert (await other.verify(ignored)).damages == ()
    # It is known, so it stays.
    assert (await other.sweep(0)).removed_files == 0
    assert path.exists()
    await store.delete(f"states/{state.digest}.state")
    path.unlink()
    with pytest.raises(RepositoryDamaged, match="is missing"):
        await other.state(state.digest)


@pytest.mark.parametrize(("encrypt", "key"), [(True, KEY[::-1]), (False, None)])
async def test_a_node_without_the_key_reads_nothing_and_spoils_nothing(
    program: Path, tmp_path: Path, encrypt: bool, key: str | None
) -> None:
    store = PosixStore(tmp_path / "repository")
    repository = opened(store, tmp_path / "a", program, encrypt=True)
    await repository.load()
    layer = await repository.publish_layer(local_layer(repository, "base.lsmt", "a" * 24))
    (repository.staging.state("b" * 24)).write_bytes(b"registers")
    state = await repository.publish_state(repository.staging.state("b" * 24))
    made = await repository.commit(
        dataclasses.replace(described("s1", [layer], state), token_owner="box", guest_token="5ec2e7")
    )
    other = opened(store, tmp_path / "b", program, encrypt=encrypt, key=key)
    assert await other.load() == []
    with pytest.raises(RepositoryDamaged, match=r"snapshot\.encryption_key_file"):
        await other.get("s1")
    other.know([state])
    with pytest.raises(OperationFailed, match=r"snapshot\.encryption_key_file"):
        await other.state(state.digest)
    # Nor is what it cannot read put aside.
    with pytest.raises(OperationFailed, match=r"snapshot\.encryption_key_file"):
        await other.repair(ignored)
    again = opened(store, tmp_path / "a", program, encrypt=True)
    assert await again.load() == [made]
    assert (await again.state(state.digest)).read_bytes() == b"registers"


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
