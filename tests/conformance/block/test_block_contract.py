"""The contract of `BlockClient`, over the fake and over a real blockd."""

from __future__ import annotations

import asyncio
import os

import pytest
from block_bench import Bench, kind_of, read, write

MIB = 1 << 20


async def test_hello_names_the_mounts_that_exports_are_on(bench: Bench) -> None:
    """Paths of exports are below them."""
    hello = await bench.client.hello()
    memory = await bench.client.export_memory("m", MIB, [])
    disk = await bench.client.export_disk("d", MIB, [], bench.files / "u")
    assert (str(memory.parent), str(disk.parent)) == (hello.memory_mount, hello.disk_mount)
    assert hello.version == 1


async def test_an_image_without_layers_reads_zero(bench: Bench) -> None:
    """A first boot maps one."""
    path = await bench.client.export_memory("zero", MIB, [])
    assert path.stat().st_size == MIB
    assert read(path, 0, MIB) == bytes(MIB)


async def test_exporting_again_is_fine_with_equal_fields_only(bench: Bench) -> None:
    """So a caller that lost an answer asks again, and one that is mistaken is told."""
    client, upper = bench.client, bench.files / "u"
    first = await client.export_disk("d", MIB, [], upper)
    assert await client.export_disk("d", MIB, [], upper) == first
    assert await kind_of(client.export_disk("d", 2 * MIB, [], upper)) == "exists"
    assert await kind_of(client.export_memory("d", MIB, [])) == "exists"


async def test_two_exports_never_share_an_upper(bench: Bench) -> None:
    """They would destroy each other."""
    await bench.client.export_disk("a", MIB, [], bench.files / "u")
    assert await kind_of(bench.client.export_disk("b", MIB, [], bench.files / "u")) == "invalid"


@pytest.mark.parametrize("name", ["", "..", "a/b", ".x", "x" * 129])
async def test_names_that_are_no_file_names_are_refused(bench: Bench, name: str) -> None:
    """They become names on the mount."""
    assert await kind_of(bench.client.export_memory(name, MIB, [])) == "invalid"


async def test_sizes_are_whole_pages_or_sectors(bench: Bench) -> None:
    """And more than nothing."""
    assert await kind_of(bench.client.export_memory("m", 4097, [])) == "invalid"
    assert await kind_of(bench.client.export_disk("d", 0, [], bench.files / "u")) == "invalid"


async def test_a_missing_layer_is_not_found(bench: Bench) -> None:
    """And nothing is exported."""
    assert await kind_of(bench.client.export_memory("m", MIB, [bench.files / "nobody"])) == "not_found"
    assert await bench.client.exports() == []


async def test_inode_numbers_are_never_used_again(bench: Bench) -> None:
    """A VMM that still maps the old one must not read the new one."""
    await bench.client.export_memory("m", MIB, [])
    (first,) = await bench.client.exports()
    await bench.client.unexport("m")
    await bench.client.export_memory("m", MIB, [])
    (second,) = await bench.client.exports()
    assert first.inode != second.inode


async def test_unexport_is_idempotent_and_keeps_the_upper(bench: Bench) -> None:
    """Exporting the same upper again finds what was written."""
    path = await bench.client.export_disk("d", MIB, [], bench.files / "u")
    write(path, 4096, b"kept" * 128)
    await bench.client.unexport("d")
    await bench.client.unexport("d")
    assert not path.exists()
    path = await bench.client.export_disk("d", MIB, [], bench.files / "u")
    assert read(path, 4096, 512) == b"kept" * 128


async def test_a_sealed_upper_is_a_layer_for_others_and_the_disk_goes_on(bench: Bench) -> None:
    """What is written after the seal is not in the layer."""
    client, files = bench.client, bench.files
    path = await client.export_disk("d", MIB, [], files / "u0")
    write(path, 0, b"a" * 4096)
    sealed = await client.seal_disk("d", files / "u1")
    assert sealed.layer == str(files / "u0")
    assert sealed.data_bytes >= 4096
    write(path, 0, b"b" * 512)
    clone = await client.export_disk("clone", MIB, [sealed.layer], files / "u2")
    assert read(clone, 0, 4096) == b"a" * 4096
    assert read(path, 0, 1024) == b"b" * 512 + b"a" * 512
    exports = {export.name: export for export in await client.exports()}
    assert (exports["d"].layers, exports["d"].upper) == ((sealed.layer,), str(files / "u1"))


async def test_a_seal_can_be_asked_twice(bench: Bench) -> None:
    """The same new upper means the same seal, whose answer was lost."""
    client, files = bench.client, bench.files
    await client.export_disk("d", MIB, [], files / "u0")
    first = await client.seal_disk("d", files / "u1")
    assert await client.seal_disk("d", files / "u1") == first
    (export,) = await client.exports()
    assert export.layers == (str(files / "u0"),)


async def test_a_seal_without_a_new_upper_ends_writing(bench: Bench) -> None:
    """And there is nothing to seal after it, but the same seal may be asked again."""
    client, files = bench.client, bench.files
    await client.export_disk("d", MIB, [], files / "u0")
    assert await client.seal_disk("d", None) == await client.seal_disk("d", None)
    (export,) = await client.exports()
    assert export.upper is None
    assert await kind_of(client.seal_disk("d", files / "u1")) == "invalid"


async def test_a_memory_image_cannot_be_sealed(bench: Bench) -> None:
    """It never changes."""
    await bench.client.export_memory("m", MIB, [])
    assert await kind_of(bench.client.seal_disk("m", None)) == "invalid"


async def test_a_new_upper_that_is_there_already_is_refused(bench: Bench) -> None:
    """It may be somebody's layer, and the disk goes on with the old one."""
    client, files = bench.client, bench.files
    (files / "u1").write_bytes(b"precious")
    path = await client.export_disk("d", MIB, [], files / "u0")
    assert await kind_of(client.seal_disk("d", files / "u1")) == "exists"
    write(path, 0, b"x" * 512)
    assert (files / "u1").read_bytes() == b"precious"


async def test_import_and_merge_make_layers_that_read_the_same(bench: Bench) -> None:
    """And never write over a file that is there."""
    client, files = bench.client, bench.files
    raw = bytearray(MIB)
    raw[8192:12288] = os.urandom(4096)
    (files / "raw").write_bytes(raw)
    imported = await client.import_raw(files / "raw", files / "l0")
    assert imported.size_bytes == MIB
    path = await client.export_disk("d", MIB, [files / "l0"], files / "u0")
    write(path, 0, b"top" + bytes(509))
    await client.seal_disk("d", None)
    merged = await client.merge([files / "l0", files / "u0"], files / "l1")
    image = await client.export_memory("m", MIB, [merged.layer])
    raw[0:3] = b"top"
    assert read(image, 0, MIB) == raw
    assert await kind_of(client.merge([files / "l0"], files / "l1")) == "exists"
    assert await kind_of(client.import_raw(files / "raw", files / "l0")) == "exists"
    assert await kind_of(client.import_raw(files / "nobody", files / "l2")) == "not_found"


async def test_equal_content_has_an_equal_digest_whichever_form_the_file_has(bench: Bench) -> None:
    """A sealed upper and its compact copy are the same layer to the repository."""
    client, files = bench.client, bench.files
    path = await client.export_disk("d", MIB, [], files / "u0")
    write(path, 65536, b"x" * 4096)
    await client.seal_disk("d", None)
    sealed = await client.digest(files / "u0")
    assert len(sealed.digest) == 64
    assert sealed.sparse
    compact = await client.compact(files / "u0", files / "dense")
    assert compact.layer == str(files / "dense")
    assert (await client.digest(files / "dense")).digest == sealed.digest
    again = await client.export_memory("m", MIB, [compact.layer])
    assert read(again, 65536, 4096) == b"x" * 4096
    assert await kind_of(client.compact(files / "u0", files / "dense")) == "exists"
    assert await kind_of(client.digest(files / "nobody")) == "not_found"


async def test_other_content_has_another_digest(bench: Bench) -> None:
    """Also where only a place differs."""
    client, files = bench.client, bench.files
    digests = set()
    for name, offset in (("a", 0), ("b", 4096), ("c", 0)):
        path = await client.export_disk(name, MIB, [], files / name)
        write(path, offset, (b"z" if name == "c" else b"x") * 4096)
        await client.seal_disk(name, None)
        digests.add((await client.digest(files / name)).digest)
    assert len(digests) == 3


async def test_without_a_cache_its_state_is_empty(bench: Bench) -> None:
    """`aenv storage` asks every node."""
    state = await bench.client.cache()
    assert (state.size_bytes, state.size_bytes_max, state.blobs) == (0, 0, ())
    assert await kind_of(bench.client.cache_evict()) == "invalid"


async def test_sync_names_what_is_missing(bench: Bench) -> None:
    """And succeeds for what is there."""
    (files_path := bench.files / "f").write_bytes(b"x")
    await bench.client.sync([files_path])
    assert await kind_of(bench.client.sync([bench.files / "nobody"])) == "not_found"


async def test_an_abandoned_export_says_so(bench: Bench) -> None:
    """It stays listed until it is unexported."""
    await bench.client.export_memory("m", MIB, [])
    assert await bench.client.abandon("m") == 0
    (export,) = await bench.client.exports()
    assert export.abandoned
    assert await kind_of(bench.client.abandon("nobody")) == "not_found"


async def test_captures_refuse_what_cannot_be(bench: Bench) -> None:
    """An unknown image, a dead process, a disk for an image, an unknown job."""
    client, files = bench.client, bench.files
    await client.export_memory("m", MIB, [])
    await client.export_disk("d", MIB, [], files / "u")
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()

    async def start(parent: str, pid: int) -> object:
        return await client.capture_start(
            "j", pid=pid, address=0, length_bytes=MIB, parent=parent, layer=files / "l", hold="process"
        )

    assert await kind_of(start("nobody", os.getpid())) == "not_found"
    assert await kind_of(start("d", os.getpid())) == "invalid"
    assert await kind_of(start("m", dead.pid)) == "not_found"
    assert await kind_of(client.capture_finish("j")) == "not_found"
    await client.capture_cancel("j")
    assert not (files / "l").exists()


async def test_stats_count_what_is_there(bench: Bench) -> None:
    """Exports and captures of now."""
    await bench.client.export_memory("m", MIB, [])
    stats = await bench.client.stats()
    assert (stats.exports, stats.captures, stats.buffer_bytes) == (1, 0, 0)
