"""Images made without mounting: the scratch image for real, and what is left after a failure or a cancel."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.errors import HostUnsuitable, ImageError
from agentenv.templates import apt_sources, rootfs
from agentenv.templates._command import run_command
from agentenv.templates.ext4 import make_ext4
from agentenv.templates.rootfs import build_base_rootfs, build_scratch_rootfs

pytestmark = pytest.mark.skipif(shutil.which("mke2fs") is None, reason="e2fsprogs is not installed")


def _debugfs(image: Path, request: str) -> str:
    return subprocess.run(["debugfs", "-R", request, image], check=True, capture_output=True, text=True).stdout


def _dump(image: Path) -> str:
    return subprocess.run(["dumpe2fs", image], check=True, capture_output=True, text=True).stdout


async def test_a_scratch_image_holds_exactly_its_files(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF static")
    image = await build_scratch_rootfs(tmp_path / "work", 32, {"/bin/server": program})
    assert image.stat().st_size == 32 << 20
    assert image.stat().st_blocks * 512 < 4 << 20, "the image is sparse"
    assert "Mode:  0755" in _debugfs(image, "stat /bin/server")
    assert "User:     0   Group:     0" in _debugfs(image, "stat /bin/server")
    assert _debugfs(image, "cat /bin/server") == "\x7fELF static"
    names = [line.split()[-1] for line in _debugfs(image, "ls -l /").splitlines() if line.strip()]
    assert sorted(names) == [".", "..", "bin", "lost+found"]
    assert [entry.name for entry in (tmp_path / "work").iterdir()] == [image.name], "no scratch folder is left"


@pytest.mark.parametrize("name", ["../escape", "/", "a/../../b"])
async def test_a_path_that_leads_out_of_the_image_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError, match="no path of a file"):
        await build_scratch_rootfs(tmp_path, 32, {name: Path("/bin/true")})
    assert list(tmp_path.iterdir()) == []


async def test_content_that_does_not_fit_is_an_image_error_and_leaves_nothing(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(20 << 20))
    with pytest.raises(ImageError, match="write the ext4 image"):
        await build_scratch_rootfs(tmp_path / "work", 16, {"/large": large})
    assert list((tmp_path / "work").iterdir()) == []


async def test_disk_sizes_out_of_range_are_refused(tmp_path: Path) -> None:
    for size in (15, (1 << 20) + 1):
        with pytest.raises(ImageError, match="out of range"):
            await make_ext4(tmp_path, tmp_path / "image", size, "seed", lambda _: None)


async def test_the_file_system_suits_a_clones_disk(tmp_path: Path) -> None:
    """No work left for the guest, no reserved blocks, a small journal, xattrs, the same identity for the same seed."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_text("x")
    os.setxattr(tmp_path / "root" / "file", "user.note", b"kept")
    for name in ("one", "two"):
        await make_ext4(tmp_path / "root", tmp_path / name, 1024, "seed", lambda _: None)
    one, two = (_dump(tmp_path / name) for name in ("one", "two"))
    fields = {key: value.strip() for key, _, value in (line.partition(":") for line in one.splitlines())}
    assert fields["Reserved block count"] == "0"
    assert fields["Block size"] == "4096"
    assert fields["Total journal size"] == "16M"
    assert fields["Filesystem volume name"] == "aenv-root"
    groups = [line for line in one.splitlines() if re.match(r"Group \d+:", line)]
    assert groups
    assert all("ITABLE_ZEROED" in line for line in groups)
    assert fields["Filesystem UUID"] in two
    assert "user.note" in _debugfs(tmp_path / "one", "ea_list /file")
    assert (tmp_path / "one").stat().st_blocks * 512 < 32 << 20


async def test_a_tool_that_fails_is_quoted() -> None:
    with pytest.raises(ImageError, match=r"cannot try: sh exited with 3: first \| second"):
        await run_command(["sh", "-c", "echo first; echo second >&2; exit 3"], 10, "try")
    with pytest.raises(HostUnsuitable, match="no-such-tool is not installed"):
        await run_command(["no-such-tool"], 10, "try")


async def test_a_late_or_cancelled_tool_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 60 & echo $! >{pid_file}; echo up; wait"]
    with pytest.raises(ImageError, match=r"took more than 0\.5 s"):
        await run_command(command, 0.5, "wait")
    assert not _is_alive(int(pid_file.read_text()))
    up = asyncio.Event()
    running = asyncio.create_task(run_command(command, 60, "wait", lambda _: up.set()))
    await up.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not _is_alive(int(pid_file.read_text()))


def _is_alive(pid: int) -> bool:
    """Not gone and no zombie: a child killed with its group may wait for init a moment."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.fixture
def small_bootstrap(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Plays mmdebstrap: the few files that the set-up touches, and a line of output."""
    told = asyncio.Event()

    async def bootstrap(root: Path, *_: object) -> None:
        for name in ("etc", "var/cache/apt/archives", "var/lib/apt/lists"):
            (root / name).mkdir(parents=True)
        (root / "etc/nsswitch.conf").write_text("passwd: files\nhosts: files dns myhostname\n")
        (root / "var/lib/apt/lists/index").write_text("large")
        (root / "etc/resolv.conf").symlink_to("/etc/passwd")
        told.set()

    monkeypatch.setattr(rootfs, "_bootstrap", bootstrap)
    monkeypatch.setattr(rootfs, "host_suite", lambda: "bookworm")
    monkeypatch.setattr(rootfs, "host_sources", lambda suite: apt_sources.host_sources(suite, Path("/nonexistent")))
    return told


async def test_the_base_image_is_set_up_and_made_once(tmp_path: Path, small_bootstrap: asyncio.Event) -> None:
    lines: list[str] = []
    image = await build_base_rootfs(tmp_path, 64, lines.append)
    assert "hosts: files myhostname dns" in _debugfs(image, "cat /etc/nsswitch.conf")
    assert "0440" in _debugfs(image, "stat /etc/sudoers.d/user")
    assert _debugfs(image, "cat /etc/resolv.conf") == "", "the link was replaced, not followed"
    assert "index" not in _debugfs(image, "ls /var/lib/apt/lists")
    small_bootstrap.clear()
    assert await build_base_rootfs(tmp_path, 64, lines.append) == image
    assert not small_bootstrap.is_set()
    assert lines[-1].startswith("using the root file system")
    assert await build_base_rootfs(tmp_path, 65, lines.append) != image


async def test_a_cancelled_base_build_leaves_nothing(
    tmp_path: Path, small_bootstrap: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        small_bootstrap.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(rootfs, "make_ext4", never)
    build = asyncio.create_task(build_base_rootfs(tmp_path, 64, lambda _: None))
    await small_bootstrap.wait()
    build.cancel()
    with pytest.raises(asyncio.CancelledError):
        await build
    assert list(tmp_path.iterdir()) == []


async def test_the_folder_of_a_killed_build_is_removed_and_one_in_use_is_kept(
    tmp_path: Path, small_bootstrap: asyncio.Event
) -> None:
    (tmp_path / ".rootfs-killed" / "root").mkdir(parents=True)
    async with rootfs._scratch(tmp_path, 0) as in_use:
        image = await build_base_rootfs(tmp_path, 64, lambda _: None)
        assert sorted(tmp_path.iterdir()) == sorted([in_use, image])
    assert list(tmp_path.iterdir()) == [image]
