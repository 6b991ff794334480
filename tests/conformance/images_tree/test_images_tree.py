"""Every feature of image layers, converted by us and unpacked by umoci: the trees are the same, file by file."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tar_cases import CASES, Layer, sparse_archive
from tree_records import Tree, without_times
from umoci_bench import DISK_BYTES, Bench

pytestmark = pytest.mark.host

# umoci sets a folder's time back after a change in it, but not where a whiteout of a folder above made the change.
_DATED_BY_UMOCI = {"opaque_folders": {"a/b"}, "hard_links": {"d"}, "hostile_paths": {"b", "not", "not/there"}}


@pytest.mark.parametrize("name", CASES)
def test_the_tree_is_what_umoci_makes(bench: Bench, name: str) -> None:
    """Type, mode, owner, size, content, time, attributes, targets, numbers and links of every file."""
    archives = CASES[name](bench.folder)
    for archive in archives:
        bench.apply(archive)
    _assert_same(bench.tree(), bench.reference(archives), _unnamed(archives) | _DATED_BY_UMOCI.get(name, set()))


def test_the_oldest_sparse_format_gives_the_same_files(bench: Bench, tmp_path: Path) -> None:
    """GNU's first format, which umoci refuses: compared with the newest one."""
    bench.apply(sparse_archive(tmp_path, "posix", "--sparse-version=1.0"))
    newest = bench.tree()
    report = bench.apply(sparse_archive(tmp_path, "gnu"))
    assert report["files"] == len(newest)
    assert bench.tree() == newest
    assert report["data_bytes"] < 1 << 20, "the holes take room"


def test_zstd_and_several_members_are_read(bench: Bench, tmp_path: Path) -> None:
    """The tree does not depend on how the blob was packed."""
    archive = CASES["files_of_all_sizes"](tmp_path)[0]
    bench.apply(archive)
    (tmp_path / "plain").write_bytes(archive)
    packed = subprocess.run(["zstd", "-q", "-c", tmp_path / "plain"], check=True, capture_output=True).stdout
    (tmp_path / "packed").write_bytes(packed)
    reports = [
        bench.run(
            *("apply", "--size-bytes", str(DISK_BYTES), "--tar", str(tmp_path / source)),
            *("--out", str(tmp_path / f"{source}.lsmt"), "--uuid", "6a1f0a4e-9d0a-4d53-8a43-3a1b7f2c9e10"),
        )
        for source in ("plain", "packed")
    ]
    assert reports[0]["diff_id"] == reports[1]["diff_id"]
    assert (tmp_path / "plain.lsmt").read_bytes() == (tmp_path / "packed.lsmt").read_bytes()


def test_a_failure_says_what_and_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    """Kinds by which the server decides, and a folder without leftovers."""
    out = tmp_path / "out"
    out.mkdir()
    bomb = tmp_path / "bomb.tar"
    bomb.write_bytes(Layer().file("zeros", bytes(20 << 20)).bytes())
    arguments = ["--size-bytes", str(64 << 20), "--tar", str(bomb), "--out", str(out / "layer")]
    cases = {
        ("--max-bytes", "1000000"): "invalid",
        ("--expect-diff-id", f"sha256:{'0' * 64}"): "corrupt",
        ("--compression", "zstd"): "corrupt",
        ("--parent", str(tmp_path / "none")): "not_found",
    }
    for options, kind in cases.items():
        assert _failure(bench, "apply", *arguments, *options)["kind"] == kind, options
        assert list(out.iterdir()) == []
    too_small = ["--size-bytes", str(16 << 20), "--tar", str(bomb), "--out", str(out / "layer")]
    failure = _failure(bench, "apply", *too_small)
    assert failure["kind"] == "no_space"
    assert 4 << 20 < failure["missing_bytes"] < 10 << 20
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("free_kib", [256, 9 << 10, 60 << 10])
def test_a_full_host_disk_is_not_the_images(bench: Bench, tmp_path: Path, free_kib: int) -> None:
    """Full while the file system is made, while files are written, and while the layer is."""
    source = tmp_path / "layer.tar"
    source.write_bytes(Layer().file("data", bytes([7]) * (40 << 20)).bytes())
    disk = tmp_path / "disk"
    disk.mkdir()
    # Mounted in a namespace that ends with the command.
    script = f'mount -t tmpfs -o size={free_kib}k tmpfs {disk} && "$@"; status=$?; ls -A {disk} >&2; exit $status'
    command = ["apply", "--size-bytes", str(DISK_BYTES), "--tar", str(source), "--out", str(disk / "layer")]
    done = bench.in_namespace(script, *command)
    assert done.returncode == 1
    # The name of a file left behind would come after it.
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["kind"] == "no_space"
    assert "missing_bytes" not in error


def test_a_stop_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    """SIGTERM in the middle of a conversion."""
    out = tmp_path / "out"
    out.mkdir()
    command = ["apply", "--size-bytes", str(DISK_BYTES), "--tar", "-", "--out", str(out / "layer")]
    process = bench.start(*command)
    try:
        assert process.stdin is not None
        process.stdin.write(Layer().file("data", bytes(8 << 20)).bytes()[: 4 << 20])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    assert list(out.iterdir()) == []


def _failure(bench: Bench, *arguments: str) -> dict[str, Any]:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        bench.run(*arguments)
    assert caught.value.returncode == 1
    error: dict[str, Any] = json.loads(caught.value.stderr.splitlines()[-1])["error"]
    return error


def _assert_same(ours: Tree, reference: Tree, unnamed: set[str]) -> None:
    ours, reference = without_times(ours, unnamed), without_times(reference, unnamed)
    assert sorted(ours) == sorted(reference)
    different = {path: (ours[path], reference[path]) for path in ours if ours[path] != reference[path]}
    assert different == {}


def _unnamed(archives: list[bytes]) -> set[str]:
    """Folders that are only implied by what is in them."""
    named: set[str] = set()
    implied: set[str] = set()
    for archive in archives:
        with tarfile.open(fileobj=io.BytesIO(archive), errors="surrogateescape") as reader:
            for member in reader:
                path = Path(member.name)
                named.add(str(path))
                implied.update(str(parent) for parent in path.parents)
    return implied - named
