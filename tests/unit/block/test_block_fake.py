"""What tests of others lean on in the fake, beyond the contract that the conformance suite holds it to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.block import FakeBlock
from agentenv.errors import BlockError, StorageFull

GIB = 1 << 30


async def test_planted_faults_are_raised_in_order_and_once(tmp_path: Path) -> None:
    """Then the operation works."""
    fake = FakeBlock(tmp_path)
    fake.fail_next("export_memory", StorageFull("full"))
    fake.fail_next("export_memory", BlockError("gone", "unreachable"))
    with pytest.raises(StorageFull):
        await fake.export_memory("m", 4096, [])
    with pytest.raises(BlockError, match="gone"):
        await fake.export_memory("m", 4096, [])
    await fake.export_memory("m", 4096, [])
    assert fake.calls["export_memory"] == 3


async def test_large_empty_images_take_no_room(tmp_path: Path) -> None:
    """Nodes are tested with the sizes that users have."""
    fake = FakeBlock(tmp_path)
    image = await fake.export_memory("m", GIB, [])
    disk = await fake.export_disk("d", GIB, [], tmp_path / "u0")
    await fake.seal_disk("d", tmp_path / "u1")
    assert image.stat().st_size == disk.stat().st_size == GIB
    assert image.stat().st_blocks + disk.stat().st_blocks < 1000


async def test_a_capture_yields_a_layer_of_the_parents_content(tmp_path: Path) -> None:
    """There is no process to read, but the chain of images goes on."""
    fake = FakeBlock(tmp_path)
    (tmp_path / "raw").write_bytes(b"x" * 4096)
    await fake.import_raw(tmp_path / "raw", tmp_path / "l0")
    await fake.export_memory("m", 4096, [tmp_path / "l0"])
    started = await fake.capture_start(
        "j", pid=os.getpid(), address=0, length_bytes=4096, parent="m", layer=tmp_path / "l1", hold="buffer"
    )
    finished = await fake.capture_finish("j")
    assert started.dirty_bytes == finished.data_bytes == fake.dirty_bytes
    assert (await fake.export_memory("next", 4096, [tmp_path / "l0", finished.layer])).read_bytes() == b"x" * 4096


async def test_what_was_synced_can_be_asked(tmp_path: Path) -> None:
    """So that a test can hold the order of sync and record."""
    fake = FakeBlock(tmp_path)
    (tmp_path / "f").touch()
    await fake.sync([tmp_path / "f"])
    assert fake.synced == [str(tmp_path / "f")]


async def test_descriptors_read_as_what_they_stand_for(tmp_path: Path) -> None:
    """A file at once; an object of a store by the hook that a test sets."""
    fake = FakeBlock(tmp_path)
    (tmp_path / "layer").write_bytes(b"x" * 4096)
    local, remote = tmp_path / "local.blob", tmp_path / "remote.blob"
    local.write_text(f'{{"aenv_blob":1,"source":{{"kind":"file","path":"{tmp_path}/layer"}}}}')
    remote.write_text('{"aenv_blob":1,"source":{"kind":"object","store":"s","key":"k"}}')
    assert (await fake.export_memory("m", 4096, [local])).read_bytes() == b"x" * 4096
    with pytest.raises(BlockError) as caught:
        await fake.export_memory("n", 4096, [remote])
    assert caught.value.kind == "unsupported"
    fake.remote_blob = lambda descriptor: tmp_path / ("layer" if descriptor["source"]["key"] == "k" else "nobody")
    assert (await fake.export_memory("n", 4096, [remote])).read_bytes() == b"x" * 4096


async def test_traces_prefetches_and_fills_can_be_asked(tmp_path: Path) -> None:
    """So that a test can hold when the node asks for them."""
    fake = FakeBlock(tmp_path)
    await fake.trace_start("t")
    assert await fake.trace_finish("t", tmp_path / "trace") == 0
    await fake.prefetch(tmp_path / "trace", [tmp_path / "a.blob"])
    await fake.fill([tmp_path / "a.blob"], 1 << 20)
    assert fake.prefetched == [str(tmp_path / "trace")]
    assert fake.filled == [str(tmp_path / "a.blob")]
    with pytest.raises(BlockError) as caught:
        await fake.trace_finish("t", tmp_path / "trace")
    assert caught.value.kind == "not_found"
