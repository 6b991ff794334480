"""Modules of a tree that `depmod` never saw: dependencies come from the modules themselves."""

from __future__ import annotations

import lzma
import struct
from pathlib import Path

import pytest

from agentenv.errors import ImageError
from agentenv.guest.modules import collect_modules, dependencies


def module(depends: str) -> bytes:
    """A relocatable ELF with a .modinfo section and the section names, and nothing else."""
    modinfo = b"license=GPL\0depends=" + depends.encode() + b"\0name=x\0"
    names = b"\0.modinfo\0.shstrtab\0"
    content = modinfo + names
    sections_at = 64 + len(content)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, sections_at, 0, 64, 0, 0, 64, 3, 2
    )

    def section(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 1, 0)

    table = section(0, 0, 0) + section(1, 64, len(modinfo)) + section(10, 64 + len(modinfo), len(names))
    return header + content + table


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """virtio_net needs net_failover, which needs failover; `ext4` is built in; names have dashes in files."""
    root = tmp_path / "6.12.1"
    drivers = root / "kernel/drivers"
    drivers.mkdir(parents=True)
    (drivers / "virtio_net.ko.xz").write_bytes(lzma.compress(module("net_failover,ext4")))
    (drivers / "net_failover.ko").write_bytes(module("failover"))
    (drivers / "failover.ko").write_bytes(module(""))
    (drivers / "virtio-rng.ko").write_bytes(module(""))
    (root / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\n")
    return root


def test_dependencies_load_before_what_needs_them_and_are_decompressed(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    order = collect_modules(tree, ["virtio_rng", "virtio_net", "ext4"], out)
    assert order == ["virtio_rng", "failover", "net_failover", "virtio_net"]
    assert (out / "order").read_text() == "virtio_rng.ko\nfailover.ko\nnet_failover.ko\nvirtio_net.ko\n"
    assert (out / "virtio_net.ko").read_bytes() == module("net_failover,ext4")


def test_a_missing_module_is_named_with_what_needs_it(tree: Path, tmp_path: Path) -> None:
    (tree / "kernel/drivers/failover.ko").unlink()
    with pytest.raises(ImageError, match="no module failover, which net_failover needs"):
        collect_modules(tree, ["virtio_net"], tmp_path)


@pytest.mark.parametrize("length", [0, 3, 5, 63, 64, 100, 150])
def test_a_damaged_module_is_an_error_that_names_it(length: int) -> None:
    with pytest.raises(ImageError, match="module broken"):
        dependencies(module("failover")[:length], "broken")


def test_a_folder_without_modules_builtin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="is no modules folder"):
        collect_modules(tmp_path, ["virtio_net"], tmp_path)
