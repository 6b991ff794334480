"""A node whose repository is compressed and encrypted: guests notice nothing, and nothing in it can be read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from bench.node import NodeFailed, RunningNode, clean, free_port, start_node, stop_server
from e2b import Sandbox
from e2b.connection_config import ApiParams

from agentenv.config import load
from tests.vm.conftest import host_leftovers

pytestmark = pytest.mark.vm

# Written by guests to disk and memory. In two parts, so that only a guest has them as one.
MARK = ("a-plain-text-", "that-nobody-but-its-guest-may-read")
# A node that refuses its configuration must do so before it does anything slow.
REFUSED_S_MAX = 60.0


@dataclass
class Encrypted:
    """A repository, its key, and the nodes over it."""

    root: Path
    settings: dict[str, str]
    node: RunningNode

    @property
    def repository(self) -> Path:
        return self.root / "repository"

    def start(self, name: str, key: Path | None, port: int | None = None) -> RunningNode:
        given = dict(self.settings)
        if key is not None:
            given["AENV_SNAPSHOT_ENCRYPTION_KEY_FILE"] = str(key)
        with (self.root / f"{name}.log").open("a") as log:
            return start_node(self.root / name, port or free_port(), log, ensure_base=False, **given)

    def restart(self) -> None:
        """A new server of the same address."""
        port = int(self.node.api_url.rsplit(":", 1)[1])
        stop_server(self.node)
        self.node = self.start("a", self.root / "key", port)

    def remove(self, name: str) -> None:
        run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(self.root / name)}).run_dir
        if (self.root / name).exists():
            clean(self.root / name, sys.stderr)
        shutil.rmtree(self.root / name, ignore_errors=True)
        assert host_leftovers(self.root / name, run_dir) == []

    def client(self) -> ApiParams:
        node = self.node
        return {"api_url": node.api_url, "sandbox_url": node.sandbox_url, "api_key": node.api_key}

    def api(self) -> httpx.Client:
        return httpx.Client(base_url=self.node.api_url, headers={"X-API-KEY": self.node.api_key}, timeout=60)

    def wait_durable(self, sandbox_id: str) -> None:
        until = time.monotonic() + 60
        with self.api() as api:
            while api.get(f"/aenv/sandboxes/{sandbox_id}").json()["pauseSafety"] != "durable":
                assert time.monotonic() < until, f"{sandbox_id} is not durable"
                time.sleep(0.1)


def new_key(path: Path) -> Path:
    path.touch(mode=0o600)
    path.write_text(subprocess.check_output(["openssl", "rand", "-hex", "32"], text=True))
    return path


def holding(text: str, folder: Path) -> list[str]:
    """The files below the folder that hold this text."""
    found = subprocess.run(["grep", "-rlaF", text, str(folder)], capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1), found.stderr
    return found.stdout.splitlines()


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Encrypted]:
    root = Path(tempfile.mkdtemp(prefix="aenv-enc-", dir="/var/tmp"))
    settings = {
        "AENV_SNAPSHOT_POSIX_FS_PATH": str(root / "repository"),
        "AENV_SNAPSHOT_COMPRESSION": "lz4",
        "AENV_POOL_WARM_PER_TEMPLATE": "0",
        "AENV_SANDBOX_PAUSE_LINGER_S": "0",
    }
    given = {**settings, "AENV_SNAPSHOT_ENCRYPTION_KEY_FILE": str(new_key(root / "key"))}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY"):
            patch.delenv(name, raising=False)
        made: Encrypted | None = None
        try:
            with (root / "a.log").open("a") as log:
                made = Encrypted(root, settings, start_node(root / "a", free_port(), log, **given))
            yield made
        finally:
            if made is not None:
                stop_server(made.node)
            Encrypted.remove(made or Encrypted(root, settings, None), "a")  # type: ignore[arg-type]
            shutil.rmtree(root, ignore_errors=True)


def mark(box: Sandbox) -> None:
    """The marker on the disk, and in the memory of a process that goes on."""
    first, second = MARK
    box.commands.run(f"echo {first}'{second}' > /home/user/marked; sync")
    box.commands.run(f"M={first}'{second}' sleep 1000", background=True)
    box.files.write("/dev/shm/mark", "".join(MARK))


def check(box: Sandbox) -> None:
    # Not out of the page cache: what the node stored is read back.
    box.commands.run("echo 3 > /proc/sys/vm/drop_caches", user="root")
    assert box.files.read("/home/user/marked").strip() == "".join(MARK)
    assert box.files.read("/dev/shm/mark") == "".join(MARK)
    assert box.commands.run("tr '\\0' '\\n' < /proc/$(pgrep -x sleep)/environ | grep ^M=").stdout.strip() == (
        f"M={''.join(MARK)}"
    )


def test_nothing_that_a_guest_wrote_can_be_read_in_the_repository(encrypted: Encrypted) -> None:
    box = Sandbox.create("base", timeout=600, **encrypted.client())
    token = box._envd_access_token
    mark(box)
    snapshot = box.create_snapshot()
    box.pause()
    encrypted.wait_durable(box.sandbox_id)
    assert holding("".join(MARK), encrypted.repository) == []
    assert token
    assert holding(token, encrypted.repository) == []
    # The search finds what is there: a record names its snapshot.
    assert holding(snapshot.snapshot_id.partition(":")[0], encrypted.repository) != []

    woken = Sandbox.connect(box.sandbox_id, timeout=600, **encrypted.client())
    check(woken)
    with Sandbox.create(snapshot.snapshot_id, timeout=600, **encrypted.client()) as copy:
        check(copy)
    with encrypted.api() as api:
        report = api.get("/aenv/storage").raise_for_status().json()
    assert report["encrypted"] is True
    woken.kill()


def test_forks_and_pauses_survive_a_restart(encrypted: Encrypted) -> None:
    with Sandbox.create("base", timeout=600, **encrypted.client()) as box:
        mark(box)
        with encrypted.api() as api:
            answer = api.post(f"/sandboxes/{box.sandbox_id}/fork", json={"count": 2}).raise_for_status().json()
        children = [
            Sandbox.connect(entry["sandbox"]["sandboxID"], timeout=600, **encrypted.client()) for entry in answer
        ]
        for child in children:
            check(child)
        sleeper, awake = children
        sleeper.pause()
        encrypted.wait_durable(sleeper.sandbox_id)
        encrypted.restart()
        # One lives on in its VMM, the other one in the repository alone.
        check(Sandbox.connect(awake.sandbox_id, timeout=600, **encrypted.client()))
        check(Sandbox.connect(sleeper.sandbox_id, timeout=600, **encrypted.client()))
        assert holding("".join(MARK), encrypted.repository) == []
        for child in (sleeper, awake):
            assert Sandbox.kill(child.sandbox_id, **encrypted.client())


@pytest.mark.parametrize("name", ["wrong", "none"])
def test_a_node_without_the_key_says_so_and_does_not_start(encrypted: Encrypted, name: str) -> None:
    key = new_key(encrypted.root / "other-key") if name == "wrong" else None
    begun = time.monotonic()
    try:
        with pytest.raises(NodeFailed):
            stop_server(encrypted.start(name, key))
        assert time.monotonic() - begun < REFUSED_S_MAX
        assert "snapshot.encryption_key_file" in (encrypted.root / f"{name}.log").read_text()
        # Nor did it start anything, or tell daemons that may be there of its key.
        run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(encrypted.root / name)}).run_dir
        assert not (run_dir / "blockd.json").exists()
        assert not (encrypted.root / name / "stores.json").exists()
    finally:
        encrypted.remove(name)


def test_a_second_node_with_the_key_goes_on_where_the_first_one_was(encrypted: Encrypted) -> None:
    with Sandbox.create("base", timeout=600, **encrypted.client()) as box:
        mark(box)
        snapshot = box.create_snapshot()
    second = encrypted.start("b", encrypted.root / "key")
    try:
        client = ApiParams(api_url=second.api_url, sandbox_url=second.sandbox_url, api_key=second.api_key)
        with Sandbox.create(snapshot.snapshot_id, timeout=600, **client) as copy:
            check(copy)
    finally:
        stop_server(second)
        encrypted.remove("b")
