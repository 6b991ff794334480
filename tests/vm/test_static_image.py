"""A template of an image that holds one static binary and nothing else: no shell, no users, no folders but its own."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.node import aenv
from e2b import CommandExitException, Sandbox

from agentenv.client import AenvClient, RunResult
from agentenv.templates.rootfs import build_scratch_rootfs
from tests.vm.conftest import NodeUnderTest

pytestmark = pytest.mark.vm

NAME = "one-static-binary"
BINARY = "/bin/busybox"
DISK_MIB = 64


@pytest.fixture(scope="module")
def template(node: NodeUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the template; its image is removed before the first sandbox, which shows that it was imported."""
    busybox = shutil.which("busybox")
    if busybox is None or b"/ld-linux-" in Path(busybox).read_bytes():
        pytest.skip("no statically linked busybox on this machine (Debian: busybox-static)")
    work = tmp_path_factory.mktemp("image")
    image = asyncio.run(build_scratch_rootfs(work, DISK_MIB, {BINARY: Path(busybox)}))
    body = {"name": NAME, "image": str(image), "memoryMB": 128}
    made = node.api.post("/aenv/templates", json=body, timeout=300)
    assert made.status_code == 201, made.text
    shutil.rmtree(work)
    yield NAME
    assert node.api.delete(f"/templates/{made.json()['templateID']}").status_code == 204


def test_the_binary_runs_from_the_library_and_the_command(node: NodeUnderTest, template: str) -> None:
    box = Sandbox.create(template, timeout=120)
    done = _run(box.sandbox_id, [BINARY, "echo", "two  words"])
    assert (done.exit_code, done.stdout, done.stderr) == (0, b"two  words\n", b"")
    fed = _run(box.sandbox_id, [BINARY, "sha256sum"], stdin=b"x" * 100_000)
    assert fed.stdout.split()[0].decode() == hashlib.sha256(b"x" * 100_000).hexdigest()
    by_command = _exec(box.sandbox_id, BINARY, "sh", "-c", "id -u; pwd; exit 5")
    assert (by_command.returncode, by_command.stdout) == (5, b"0\n/\n")
    # One word goes to a shell unless told otherwise, as documented; there is none here.
    for options, named in (((), b"/bin/sh"), (("--no-shell",), b"/bin/none")):
        missing = _exec(box.sandbox_id, "/bin/none", options=options)
        assert missing.returncode == 127
        assert named in missing.stderr
    with pytest.raises(CommandExitException) as no_shell:
        box.commands.run("echo needs a shell")
    assert no_shell.value.exit_code == 127


def test_files_pause_and_fork_need_nothing_of_the_image(node: NodeUnderTest, template: str) -> None:
    box = Sandbox.create(template, timeout=120)
    info = box.get_info()
    assert info.memory_mb == 128
    box.files.write("/data/deep/file", b"\0binary\xff")
    assert bytes(box.files.read("/data/deep/file", format="bytes")) == b"\0binary\xff"
    assert {entry.name for entry in box.files.list("/")} >= {"bin", "data", "etc", "proc", "tmp"}
    assert [entry.name for entry in box.files.list("/bin")] == ["busybox"]
    # Renamed into place: a file that shrinks while it is read breaks the download off, as it must.
    loop = "i=0; while :; do i=$((i+1)); echo $i > /data/new; /bin/busybox mv /data/new /data/tick; "
    loop += "/bin/busybox sleep 0.1; done"
    _exec(box.sandbox_id, BINARY, "sh", "-c", loop, options=("--detach",))
    node.wait("its first tick", lambda: box.files.exists("/data/tick"))
    for safety in ("held", "durable"):
        box.pause()
        if safety == "durable":
            node.wait_durable(box.sandbox_id)
        box.connect(timeout=120)
        assert bytes(box.files.read("/data/deep/file", format="bytes")) == b"\0binary\xff"
    child = box.fork(timeout=120)[0]
    assert isinstance(child, Sandbox)
    for one in (box, child):
        before = _tick(one)
        node.wait("another tick", lambda one=one, before=before: _tick(one) > before)  # type: ignore[misc]


def test_a_bad_image_is_a_400_that_names_it(node: NodeUnderTest, tmp_path: Path) -> None:
    not_ext4 = tmp_path / "notes.txt"
    not_ext4.write_text("no file system\n" * 1000)
    empty = tmp_path / "empty"
    empty.touch()
    # Without its dot the last would be the name of an image in a registry.
    for image in (str(not_ext4), str(empty), str(tmp_path), str(tmp_path / "missing.ext4"), "./relative.ext4"):
        refused = node.api.post("/aenv/templates", json={"name": "bad", "image": image})
        assert (refused.status_code, refused.json()["code"]) == (400, 400), refused.text
        assert image in refused.json()["message"]
    magic_only = tmp_path / "magic.ext4"
    magic_only.write_bytes(bytes(1080) + b"\x53\xef" + bytes((1 << 20) - 1082))
    body = {"name": "bad", "image": str(magic_only), "memoryMB": 128}
    refused = node.api.post("/aenv/templates", json=body, timeout=120)
    assert (refused.status_code, str(magic_only) in refused.json()["message"]) == (400, True), refused.text
    assert not any("bad" in listed["names"] for listed in node.api.get("/templates").json())


def _tick(box: Sandbox) -> int:
    """The loop's count; 0 in the instant in which its file is written anew."""
    return int(box.files.read("/data/tick") or 0)


def _run(sandbox_id: str, argv: list[str], stdin: bytes | None = None) -> RunResult:
    async def work() -> RunResult:
        async with AenvClient() as client:
            sandbox, _info = await client.sandboxes.open(sandbox_id)
            return await sandbox.run(argv, stdin=stdin)

    return asyncio.run(work())


def _exec(sandbox_id: str, *argv: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
    command = [*aenv(), "exec", *options, sandbox_id, "--", *argv]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
