"""Publishers: what is linked, what a worker process says and how it ends, and the file that it reads."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from tests.unit.snapshots.repository_world import FakeDigester

from agentenv.errors import OperationFailed, RepositoryDamaged, StorageFull, StoreRefused, StoreUnavailable
from agentenv.snapshots import (
    LinkPublisher,
    MemoryStore,
    PosixStore,
    Process,
    WorkerChecker,
    WorkerOptions,
    WorkerPublisher,
)
from agentenv.snapshots import publishing as publishing_module
from agentenv.snapshots.opening import RepositoryOptions, open_repository, write_stores_file
from agentenv.snapshots.publishing import WorkerFailed, run_worker
from agentenv.snapshots.stores.files import Files

RESULT = {
    "digest": "a" * 64,
    "size_bytes": 10,
    "plain_digest": "b" * 64,
    "plain_size_bytes": 20,
    "blocks_digest": "c" * 64,
    "encryption": "aes-256-gcm",
    "reused": False,
}


def worker(tmp_path: Path, body: str) -> Path:
    """A program that does this."""
    program = tmp_path / "worker"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
    program.chmod(0o700)
    return program


def options(program: Path, tmp_path: Path, **given: object) -> WorkerOptions:
    return WorkerOptions(program, tmp_path / "stores.json", store_name="repository", **given)  # type: ignore[arg-type]


async def test_a_workers_answer_becomes_a_blob(tmp_path: Path) -> None:
    program = worker(
        tmp_path,
        f"open({str(tmp_path / 'argv')!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
        "print(json.dumps({'done_bytes': 5, 'total_bytes': 20}), file=sys.stderr)\n"
        "print('a library says something', file=sys.stderr)\n"
        f"print({json.dumps(RESULT)!r})",
    )
    seen: list[tuple[int, int]] = []
    given = options(program, tmp_path, compression="lz4", encrypt=True, journal_dir=tmp_path / "journal")
    publisher = WorkerPublisher(given, MemoryStore(), lambda done, total: seen.append((done, total)))
    blob = await publisher.layer(tmp_path / "layer")
    assert (blob.digest, blob.size_bytes, blob.plain_size_bytes) == ("a" * 64, 10, 20)
    assert (blob.blocks_digest, blob.encryption, blob.compression) == ("c" * 64, "aes-256-gcm", "lz4")
    assert seen == [(5, 20)]
    assert " ".join(json.loads((tmp_path / "argv").read_text())) == (
        f"publish --layer {tmp_path}/layer --prefix layers/ --compress lz4 --stores {tmp_path}/stores.json "
        f"--store repository --encrypt --journal-dir {tmp_path}/journal"
    )
    state = await publisher.state(tmp_path / "state")
    assert (state.digest, state.encryption, state.compression) == ("a" * 64, "aes-256-gcm", None)
    assert " ".join(json.loads((tmp_path / "argv").read_text())) == (
        f"put-file --file {tmp_path}/state --prefix states/ --stores {tmp_path}/stores.json "
        f"--store repository --encrypt --journal-dir {tmp_path}/journal"
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("no_space", StorageFull),
        ("transient", StoreUnavailable),
        ("denied", StoreRefused),
        ("corrupt", RepositoryDamaged),
        ("busy", WorkerFailed),
        ("something new", WorkerFailed),
    ],
)
async def test_a_workers_error_is_ours_by_its_kind(tmp_path: Path, kind: str, expected: type[Exception]) -> None:
    said = json.dumps({"error": {"kind": kind, "message": "why"}})
    program = worker(tmp_path, f"print({said!r}, file=sys.stderr); sys.exit(1)")
    with pytest.raises(expected, match="why") as caught:
        await run_worker([str(program), "publish"])
    assert type(caught.value) is expected


@pytest.mark.parametrize("body", ["sys.exit(1)", "os.kill(os.getpid(), 9)", "print('nonsense')", "print('{}')"])
async def test_a_worker_that_ends_without_a_word_is_an_error(tmp_path: Path, body: str) -> None:
    publisher = WorkerPublisher(options(worker(tmp_path, body), tmp_path), MemoryStore())
    with pytest.raises(OperationFailed, match="aenv-storage publish"):
        await publisher.layer(tmp_path / "layer")


async def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperationFailed, match="nowhere"):
        await run_worker([str(tmp_path / "nowhere"), "publish"])


async def test_a_cancel_ends_the_worker(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    program = worker(tmp_path, f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    running = asyncio.create_task(run_worker([str(program), "publish"]))
    pid = int(await asyncio.to_thread(pid_file.read_text))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not Path(f"/proc/{pid}").exists()


async def test_a_worker_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing_module, "SILENCE_S_MAX", 0.2)
    with pytest.raises(StoreUnavailable, match=r"nothing for 0\.2 s"):
        await run_worker([str(worker(tmp_path, "time.sleep(600)")), "publish"])


async def test_what_cannot_be_linked_is_published_otherwise(tmp_path: Path) -> None:
    class OtherFileSystem(Files):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(18, "Invalid cross-device link")

    store = PosixStore(tmp_path / "repository", OtherFileSystem())
    local = tmp_path / "layer"
    local.write_bytes(b"one")
    program = worker(tmp_path, f"print({json.dumps(RESULT)!r})")
    otherwise = WorkerPublisher(options(program, tmp_path), store)
    assert (await LinkPublisher(store, FakeDigester(), otherwise).layer(local)).digest == "a" * 64
    with pytest.raises(OperationFailed, match="cannot be linked"):
        await LinkPublisher(store, FakeDigester()).layer(local)


async def test_a_checker_tells_damage_from_trouble(tmp_path: Path) -> None:
    def program(kind: str) -> Path:
        said = json.dumps({"error": {"kind": kind, "message": "block 7 is wrong"}})
        return worker(tmp_path, f"print({said!r}, file=sys.stderr); sys.exit(1)")

    checker = WorkerChecker(program("corrupt"), tmp_path / "stores.json")
    assert await checker.check(tmp_path / "layer.lsmt", None) == "aenv-storage verify: block 7 is wrong"
    checker = WorkerChecker(program("not_found"), tmp_path / "stores.json")
    assert await checker.check(tmp_path / "layer.blob", "a" * 64) == "is missing"
    checker = WorkerChecker(program("transient"), tmp_path / "stores.json")
    with pytest.raises(StoreUnavailable):
        await checker.check(tmp_path / "layer.blob", "a" * 64)
    checker = WorkerChecker(worker(tmp_path, "print('{\"ok\":true}')"), tmp_path / "stores.json")
    assert await checker.check(tmp_path / "layer.lsmt", "a" * 64) is None


async def test_a_repository_is_put_together_for_a_directory(tmp_path: Path) -> None:
    opening = RepositoryOptions(tmp_path / "state", tmp_path / "aenv-storage", "here")
    repository = open_repository(PosixStore(tmp_path / "repository"), opening, Process("node-a"), FakeDigester())
    assert await repository.load() == []
    local = repository.staging.layer("a" * 24)
    local.write_bytes(b"one")
    blob = await repository.publish_layer(local)
    assert repository.path(blob.digest).samefile(local)
    assert (await repository.usage()).location == "here"


def test_stores_json_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "state" / "stores.json"
    for key in (None, "k" * 64):
        write_stores_file(path, repository={"kind": "s3"}, registries={"h": {"url": "https://h"}}, encryption_key=key)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text()) == {
            "stores": {"repository": {"kind": "s3"}},
            "registries": {"h": {"url": "https://h"}},
            "encryption_key": key,
        }
    assert os.listdir(path.parent) == ["stores.json"]
