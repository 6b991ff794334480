"""One node for all tests that need microVMs, and the proof that it leaves nothing behind.

Tests share the node, since its template takes a while to build; each gets fresh sandboxes and must leave no VMM, no
upper and no runtime directory. At the end of the session the node is cleaned and the host searched for leftovers.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from bench.node import RunningNode, temporary_node
from e2b import Sandbox

from agentenv.config import load
from agentenv.network import node_tag

SETTLE_S_MAX: Final = 20.0


@dataclass(frozen=True)
class NodeUnderTest:
    """A running node with what tests ask of it besides the SDK."""

    running: RunningNode
    run_dir: Path
    api: httpx.Client

    @property
    def state_dir(self) -> Path:
        return self.running.state_dir

    def detail(self, sandbox_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/aenv/sandboxes/{sandbox_id}").raise_for_status().json()
        return found

    def tombstone(self, sandbox_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/aenv/tombstones/{sandbox_id}").raise_for_status().json()
        return found

    def vmm_pid(self, sandbox_id: str) -> int:
        return int(json.loads((self.run_dir / "vm" / sandbox_id / "vmm.json").read_bytes())["pid"])

    def daemon_pid(self, name: str) -> int:
        return int(json.loads((self.run_dir / f"{name}.json").read_bytes())["pid"])

    def wait(self, what: str, condition: Callable[[], object], s_max: float = SETTLE_S_MAX) -> None:
        """Wait until a condition of the outside world holds; fails the test when it never does."""
        until = time.monotonic() + s_max
        while not condition():
            if time.monotonic() > until:
                pytest.fail(f"{what} did not happen within {s_max:g} s")
            time.sleep(0.02)

    def wait_durable(self, sandbox_id: str) -> None:
        vmm = self.run_dir / "vm" / sandbox_id
        self.wait(
            f"{sandbox_id} durable",
            lambda: self.detail(sandbox_id)["pauseSafety"] == "durable" and not vmm.exists(),
            60,
        )

    def leftovers(self) -> list[str]:
        """What sandboxes left on the node although none exists any more."""
        found = [str(path) for path in (self.run_dir / "vm").iterdir()]
        found += [str(path) for path in (self.state_dir / "sandboxes").iterdir()]
        return found


@pytest.fixture(scope="session")
def node() -> Iterator[NodeUnderTest]:
    # Warm clones are a sandbox's remains to `leftovers`; `test_warm_clones` has a node that makes them.
    with temporary_node("test", AENV_POOL_WARM_PER_TEMPLATE="0", AENV_SANDBOX_PAUSE_LINGER_S="0") as running:
        os.environ.update(running.environment())
        run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(running.state_dir)}).run_dir
        with httpx.Client(base_url=running.api_url, headers={"X-API-KEY": running.api_key}, timeout=60) as api:
            yield NodeUnderTest(running, run_dir, api)
    left = host_leftovers(running.state_dir, run_dir)
    assert left == [], "the node left something on the host"


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: its sandboxes are gone, and all that they held."""
    yield
    under_test = request.getfixturevalue("node") if "node" in request.fixturenames else None
    if not isinstance(under_test, NodeUnderTest):
        return
    for listed in under_test.api.get("/v2/sandboxes").json():
        under_test.api.delete(f"/sandboxes/{listed['sandboxID']}")
    under_test.wait(f"the end of {under_test.leftovers()}", lambda: not under_test.leftovers())


@pytest.fixture
def sandbox(node: NodeUnderTest) -> Iterator[Sandbox]:
    box = Sandbox.create("base", timeout=300)
    yield box
    box.kill()


def host_leftovers(state_dir: Path, run_dir: Path) -> list[str]:
    """Processes, mounts, namespaces, interfaces, tables and directories of one node that still exist."""
    tag = node_tag(run_dir)
    found = [
        f"process {pid}: {line}" for pid, line in _command_lines() if str(run_dir) in line or str(state_dir) in line
    ]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(state_dir) in line]
    netns = Path("/run/netns")
    found += [path.name for path in (netns.iterdir() if netns.exists() else ()) if path.name.startswith(f"aenv-{tag}-")]
    found += [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(f"av{tag}-")]
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    found += [line for line in tables.splitlines() if tag in line]
    found += [str(path) for path in (state_dir, run_dir) if path.exists()]
    return found


def _command_lines() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
