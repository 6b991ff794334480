"""The initramfs writer: what `cpio` reads back, and that equal input gives equal bytes."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from agentenv.guest.initramfs import (
    PROBE_MARKER,
    Entry,
    build_initramfs,
    build_probe_initramfs,
    write_cpio,
)


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "b.ko").write_bytes(b"bbb")
    (path / "a.ko").write_bytes(b"aa")
    (path / "order").write_text("b.ko\na.ko\n")
    return path


def test_the_archive_is_what_cpio_reads_back(tmp_path: Path) -> None:
    if shutil.which("cpio") is None and shutil.which("busybox") is None:
        pytest.skip("no cpio to read the archive with")
    init = tmp_path / "envd"
    init.write_bytes(b"\x7fELF not really")
    archive = build_initramfs(init, _folder(tmp_path / "modules"))
    reader = ["cpio"] if shutil.which("cpio") else ["busybox", "cpio"]
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run([*reader, "-id", "init", "modules/*"], input=archive, cwd=out, check=True, capture_output=True)
    assert (out / "init").read_bytes() == init.read_bytes()
    assert (out / "init").stat().st_mode & 0o777 == 0o755
    assert (out / "modules/order").read_text() == "b.ko\na.ko\n"
    assert (out / "modules/a.ko").read_bytes() == b"aa"


def test_equal_input_gives_equal_bytes_whatever_the_files_times_and_order(tmp_path: Path) -> None:
    init = tmp_path / "envd"
    init.write_bytes(b"daemon")
    first = build_initramfs(init, _folder(tmp_path / "one"))
    two = tmp_path / "two"
    two.mkdir()
    for name, content in (("order", b"b.ko\na.ko\n"), ("a.ko", b"aa"), ("b.ko", b"bbb")):
        (two / name).write_bytes(content)
    init.touch()
    assert build_initramfs(init, two) == first
    (two / "a.ko").write_bytes(b"aA")
    assert build_initramfs(init, two) != first


def test_modules_are_in_the_order_of_their_names_not_of_the_folder(tmp_path: Path) -> None:
    names = [f"m{number}.ko" for number in (7, 3, 9, 1, 8, 2, 6, 0, 5, 4)]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    init = tmp_path.parent / "envd"
    init.write_bytes(b"daemon")
    archive = build_initramfs(init, tmp_path)
    places = [archive.index(f"modules/{name}".encode()) for name in sorted(names)]
    assert places == sorted(places)


def test_a_header_has_the_documented_fields() -> None:
    archive = write_cpio([Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))])
    assert archive[:6] == b"070701"
    fields = [int(archive[6 + 8 * i : 14 + 8 * i], 16) for i in range(13)]
    assert fields == [1, stat.S_IFCHR | 0o600, 0, 0, 1, 0, 0, 0, 0, 5, 1, len("dev/console") + 1, 0]
    assert archive[110:122] == b"dev/console\0"
    assert len(archive) % 512 == 0


def test_the_probe_program_is_an_elf_that_prints_the_marker() -> None:
    archive = build_probe_initramfs()
    assert archive.count(PROBE_MARKER) == 1
    assert b"\x7fELF\x02\x01\x01" in archive
    assert len(archive) < 2048


def test_the_probe_program_prints_the_marker_on_this_machine(tmp_path: Path) -> None:
    archive = build_probe_initramfs()
    start = archive.index(b"\x7fELF")
    program = tmp_path / "init"
    program.write_bytes(archive[start : archive.index(PROBE_MARKER) + len(PROBE_MARKER) + 1])
    program.chmod(0o755)
    child = subprocess.Popen([program], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == PROBE_MARKER + b"\n"
    finally:
        child.kill()
        child.communicate()
