"""The process behind a conversion: its command line, its errors as ours, and that it never outlives a cancel."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from agentenv.errors import HostUnsuitable, ImageError, InvalidRequest, StorageFull
from agentenv.images import program
from agentenv.images.media import Compression
from agentenv.images.program import ImageProgram, LayerTask

DIFF_ID = "sha256:" + "d" * 64


def task_in(folder: Path, *, blob: str | None = "sha256:" + "b" * 64) -> LayerTask:
    parents = (folder / "p1", folder / "p2")
    return LayerTask(1 << 30, parents, folder / "t", Compression.ZSTD, DIFF_ID, blob, 100, folder / "o", "u-u-i-d")


def scripted(folder: Path, body: str) -> ImageProgram:
    """A program of the test's own: a shell script that notes its arguments and its process."""
    path = folder / "aenv-image"
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{folder}/argv\necho $$ >{folder}/pid\n{body}\n')
    path.chmod(0o755)
    return ImageProgram(path)


async def apply(made: ImageProgram, folder: Path) -> list[tuple[int, int]]:
    said: list[tuple[int, int]] = []
    await made.apply(task_in(folder), lambda done, total: said.append((done, total)))
    return said


async def test_the_command_line_is_the_contract_s(tmp_path: Path) -> None:
    await apply(scripted(tmp_path, "echo '{}'"), tmp_path)
    assert (tmp_path / "argv").read_text().splitlines() == [
        *("apply", "--size-bytes", "1073741824", "--parent", f"{tmp_path}/p1", "--parent", f"{tmp_path}/p2"),
        *("--tar", f"{tmp_path}/t", "--compression", "zstd", "--expect-diff-id", DIFF_ID),
        *("--expect-blob", "sha256:" + "b" * 64, "--out", f"{tmp_path}/o", "--uuid", "u-u-i-d"),
    ]
    await scripted(tmp_path, "echo '{}'").apply(task_in(tmp_path, blob=None), lambda _done, _total: None)
    assert "--expect-blob" not in (tmp_path / "argv").read_text()


async def test_progress_is_passed_on(tmp_path: Path) -> None:
    lines = [{"done_bytes": 1, "total_bytes": 4}, {"done_bytes": 4, "total_bytes": None}]
    body = "".join(f"echo '{json.dumps(line)}' >&2\n" for line in lines)
    assert await apply(scripted(tmp_path, body), tmp_path) == [(1, 4), (4, 0)]


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (
            """echo '{"error":{"kind":"no_space","message":"3 MiB are missing"}}' >&2; exit 1""",
            StorageFull,
            "3 MiB are missing",
        ),
        (
            """echo '{"error":{"kind":"no_space","message":"full","missing_bytes":5000000}}' >&2; exit 1""",
            InvalidRequest,
            "full .*larger by 5 MiB",
        ),
        ("""echo '{"error":{"kind":"digest","message":"wrong digest"}}' >&2; exit 1""", ImageError, "wrong digest"),
        ("echo plain words >&2; exit 3", ImageError, "exited with 3: plain words"),
        ("kill -9 $$", ImageError, "ended by signal 9"),
        ("exit 2", ImageError, "exited with 2"),
        ("echo '[1]' >&2; echo '{\"error\":5}' >&2; exit 1", ImageError, "exited with 1"),
    ],
)
async def test_failures_say_what_the_program_said(tmp_path: Path, body: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"cannot convert layer {DIFF_ID}: .*{says}"):
        await apply(scripted(tmp_path, body), tmp_path)


async def test_a_missing_program_is_a_fault_of_the_host(tmp_path: Path) -> None:
    with pytest.raises(HostUnsuitable, match=r"cannot run .*nobody"):
        await apply(ImageProgram(tmp_path / "nobody"), tmp_path)


async def test_an_endless_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="answered more than"):
        await apply(scripted(tmp_path, "exec cat /dev/zero"), tmp_path)
    assert not alive(tmp_path)


async def test_a_line_without_end_is_only_output(tmp_path: Path) -> None:
    await apply(scripted(tmp_path, "head -c 300000 /dev/zero >&2; echo >&2"), tmp_path)


def alive(folder: Path) -> bool:
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("trap", ["", "trap '' TERM;"])
async def test_a_cancel_ends_the_process_before_it_goes_on(
    tmp_path: Path, trap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that does not listen."""
    monkeypatch.setattr(program, "END_S_MAX", 0.05)
    line = json.dumps({"done_bytes": 1, "total_bytes": 2})
    made = scripted(tmp_path, f"{trap} echo '{line}' >&2; while :; do sleep 0.01; done")
    begun = asyncio.Event()
    running = asyncio.ensure_future(made.apply(task_in(tmp_path), lambda _done, _total: begun.set()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(tmp_path)


async def test_a_process_that_hangs_is_ended_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "GRACE_S", 0.05)
    with pytest.raises(ImageError, match="took more than"):
        await apply(scripted(tmp_path, "exec sleep 1000"), tmp_path)
    assert not alive(tmp_path)


async def test_a_dump_is_whole_only_when_the_program_ended_well(tmp_path: Path) -> None:
    good = scripted(tmp_path, "head -c 300000 /dev/zero")
    async with good.dump([tmp_path / "l1", tmp_path / "l2"], 4096, tmp_path, 20) as stream:
        assert len(await stream.read(-1)) == 300_000
    assert (tmp_path / "argv").read_text().split() == [
        *("dump", "--layer", f"{tmp_path}/l1", "--layer", f"{tmp_path}/l2", "--size-bytes", "4096"),
        *("--out-tar", "-", "--scratch", str(tmp_path)),
    ]
    bad = scripted(tmp_path, """echo x; echo '{"error":{"kind":"corrupt","message":"bad inode 5"}}' >&2; exit 1""")
    with pytest.raises(ImageError, match="bad inode 5"):
        async with bad.dump([tmp_path / "l1"], 4096, tmp_path, 20) as stream:
            assert await stream.read(-1) == b"x\n"


async def test_a_dump_that_nobody_reads_on_is_ended(tmp_path: Path) -> None:
    endless = scripted(tmp_path, "exec cat /dev/zero")

    async def read_a_little() -> None:
        async with endless.dump([tmp_path / "l"], 4096, tmp_path, 20) as stream:
            await stream.readexactly(10)
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await read_a_little()
    assert not alive(tmp_path)
