"""A disk as an OCI image. The dump of its files is a tar of the test's own."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.oci import build_image, digest_of, tar_of

from agentenv.errors import ImageError, InvalidRequest, StorageFull
from agentenv.images import export
from agentenv.images.archive import OciArchiveSource
from agentenv.images.config import parse_config
from agentenv.images.export import ExportJob, export_archive, export_layout
from agentenv.images.layout import LayoutSource
from agentenv.images.reference import LocalReference, Transport
from agentenv.model import Progress

FILES = tar_of({"etc/": b"", "etc/hostname": b"x\n", "big": bytes(range(256)) * 20_000})
CONFIG = {"Env": ["A=1"], "User": "me", "WorkingDir": "/w", "Entrypoint": ["/e"], "Cmd": ["c"], "StopSignal": "SIGINT"}
ORIGINAL = parse_config(build_image([{"a": b"1"}, {"b": b"2"}], config=CONFIG).config, "it")


class FakeDump:
    """Streams a tar; may end badly."""

    def __init__(self, tar: bytes = FILES, error: Exception | None = None) -> None:
        self.tar = tar
        self.error = error
        self.asked: list[tuple[Path, ...]] = []

    @asynccontextmanager
    async def dump(
        self, layers: Sequence[Path], size_bytes: int, scratch: Path, deadline_s: float
    ) -> AsyncIterator[asyncio.StreamReader]:
        self.asked.append(tuple(layers))
        stream = asyncio.StreamReader()
        stream.feed_data(self.tar)
        stream.feed_eof()
        yield stream
        if self.error is not None:
            raise self.error


def silent(_: Progress) -> None:
    return


def job(**changes: object) -> ExportJob:
    made = ExportJob((Path("/l1"), Path("/l2")), 1 << 30, ORIGINAL, reference="v1", comment="snapshot s1")
    return replace(made, **changes)  # type: ignore[arg-type]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unpacked(content: bytes, compression: str) -> bytes:
    command = {"none": ["cat"], "gzip": ["gzip", "-dc"], "zstd": ["zstd", "-dcq"]}[compression]
    return subprocess.run(command, input=content, capture_output=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
async def test_the_layout_is_an_image_with_its_configuration_kept(tmp_path: Path, compression: str) -> None:
    dump = FakeDump()
    made = await export_layout(dump, job(compression=compression), tmp_path / "out", silent)
    assert dump.asked == [(Path("/l1"), Path("/l2"))]
    source = LayoutSource(LocalReference(Transport.OCI, str(tmp_path / "out"), "v1"))
    found = await source.image()
    assert found.digest == made.manifest_digest
    assert [layer.diff_id for layer in found.layers] == [digest_of(FILES)] == [made.diff_id]
    body = json.loads(found.config.raw)
    assert body["config"] == CONFIG
    assert body["x-unknown"] == {"kept": True}
    assert [entry["comment"] for entry in body["history"]] == ["snapshot s1"]
    packed = (await source.fetch_layer(found.layers[0], tmp_path / "x", lambda _: None)).read_bytes()
    assert digest_of(packed) == made.layer_digest
    assert unpacked(packed, compression) == FILES
    assert compression == "none" or len(packed) < len(FILES) / 4


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
async def test_equal_disks_give_equal_bytes(tmp_path: Path, compression: str) -> None:
    for name in ("a", "b"):
        await export_layout(FakeDump(), job(compression=compression), tmp_path / name, silent)
        await export_archive(FakeDump(), job(compression=compression), tmp_path / f"{name}.tar", silent)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


async def test_an_archive_is_read_like_the_layout(tmp_path: Path) -> None:
    made = await export_archive(FakeDump(), job(), tmp_path / "a.tar", silent)
    source = OciArchiveSource(LocalReference(Transport.OCI_ARCHIVE, str(tmp_path / "a.tar"), "v1"))
    assert (await source.image()).digest == made.manifest_digest
    await source.aclose()


async def test_a_disk_of_no_image_has_a_plain_configuration(tmp_path: Path) -> None:
    await export_layout(FakeDump(), job(config=None, reference=None), tmp_path / "out", silent)
    found = await LayoutSource(LocalReference(Transport.OCI, str(tmp_path / "out"))).image()
    assert (found.config.os, found.config.architecture, found.config.env) == ("linux", "amd64", ())


async def test_a_dump_that_failed_at_its_end_leaves_nothing(tmp_path: Path) -> None:
    for exported in (export_layout, export_archive):
        with pytest.raises(ImageError, match="bad inode"):
            await exported(FakeDump(error=ImageError("bad inode")), job(), tmp_path / "out", silent)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("turns", range(1, 60, 4))
async def test_a_cancel_at_any_moment_leaves_nothing_or_the_whole(tmp_path: Path, turns: int) -> None:
    for exported in (export_layout, export_archive):
        into = tmp_path / exported.__name__
        task = asyncio.ensure_future(exported(FakeDump(), job(), into, silent))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [path.name for path in tmp_path.iterdir()] == ([] if task.cancelled() else [into.name])
        for path in tmp_path.iterdir():
            path.rename(tmp_path.with_name(f"{tmp_path.name}-{into.name}"))


async def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "_write_documents", full)
    with pytest.raises(StorageFull, match="disk is full"):
        await export_layout(FakeDump(), job(), tmp_path / "out", silent)
    assert list(tmp_path.iterdir()) == []


async def test_what_exists_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for exported in (export_layout, export_archive):
        with pytest.raises(InvalidRequest, match="exists already"):
            await exported(FakeDump(), job(), tmp_path / "out", silent)
    assert (tmp_path / "out").read_text() == "mine"


async def test_an_unknown_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="none, gzip, zstd"):
        await export_layout(FakeDump(), job(compression="lz4"), tmp_path / "out", silent)
