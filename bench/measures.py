"""The measures of `make bench`: each is a function that takes samples from a running node, by the SDK and the API.

Owns what is measured and how. Does not own the node (`node`), nor printing and files (`bench`). Every function leaves
the node as it found it: its sandboxes are killed, also when it fails.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from e2b import Sandbox

from bench.node import RunningNode

MIB: Final = 1 << 20
MS: Final = 1000.0
# Enough for a median and an honest maximum; fewer only where one run takes seconds.
RUNS: Final = 30
RUNS_SLOW: Final = 8
RUNS_BOOT: Final = 5
DURABLE_S_MAX: Final = 120.0
GONE_S_MAX: Final = 60.0
# How long the model "thinks" between a pause and the resume.
THINKING_S: Final = 1.0
# Between two creates; a trainer does something with a sandbox before it asks for the next.
BETWEEN_CREATES_S: Final = 0.25

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Bench:
    """A running node and a client of its API, for what the SDK does not show."""

    node: RunningNode
    api: httpx.Client
    run_dir: Path

    def vmm_pids(self) -> dict[str, int]:
        """Process ids of live VMMs by sandbox id, from their launch records."""
        found = {}
        for record in (self.run_dir / "vm").glob("*/vmm.json"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(json.loads(record.read_bytes())["pid"])
                if Path(f"/proc/{pid}").exists():
                    found[record.parent.name] = pid
        return found

    def repository_bytes(self) -> int:
        """Allocated bytes of all layers, device states and records."""
        root = self.node.state_dir / "repository"
        return sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())

    def wait_durable(self, sandbox_id: str) -> None:
        until = time.monotonic() + DURABLE_S_MAX
        while self.pause_safety(sandbox_id) != "durable" or sandbox_id in self.vmm_pids():
            if time.monotonic() > until:
                raise TimeoutError(f"{sandbox_id} did not become durable within {DURABLE_S_MAX:g} s")
            time.sleep(0.02)

    def wait_gone(self, sandbox_ids: set[str]) -> None:
        until = time.monotonic() + GONE_S_MAX
        while sandbox_ids & {path.name for path in (self.run_dir / "vm").iterdir()}:
            if time.monotonic() > until:
                raise TimeoutError(f"killed sandboxes were not gone within {GONE_S_MAX:g} s")
            time.sleep(0.02)

    def pause_safety(self, sandbox_id: str) -> str | None:
        answer = self.api.get(f"/aenv/sandboxes/{sandbox_id}").raise_for_status().json()
        safety: str | None = answer["pauseSafety"]
        return safety

    def post(self, path: str, body: object) -> httpx.Response:
        return self.api.post(path, json=body, timeout=300).raise_for_status()


@contextlib.contextmanager
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox.create("base", timeout=3600)
    try:
        yield box
    finally:
        box.kill()


def timed(job: Callable[[], object]) -> float:
    """Milliseconds that a job took."""
    started = time.perf_counter()
    job()
    return (time.perf_counter() - started) * MS


def dirty_memory(box: Sandbox, mib: int, name: str = "dirt") -> None:
    """Fill so much of the guest's RAM with bytes that are not zero."""
    write = f"f = open('/dev/shm/{name}', 'wb'); [f.write(block) for _ in range({mib})]"
    fill = f"import os; block = os.urandom(1 << 20); {write}"
    box.commands.run(f'mount -o remount,size=80% /dev/shm && python3 -c "{fill}"', user="root", timeout=300)


def cold_boot(bench: Bench) -> Samples:
    samples = []
    for _ in range(RUNS_BOOT):
        bench.post("/aenv/templates", {"name": "bench-boot"})
        samples.append(float(bench.api.get("/aenv/node").json()["cold_boot_ms"]))
        bench.api.delete("/templates/bench-boot").raise_for_status()
    return {"cold_boot": samples}


def create(bench: Bench) -> Samples:
    envd, first = [], []
    for _ in range(RUNS):
        started = time.perf_counter()
        box = Sandbox.create("base", timeout=600)
        envd.append((time.perf_counter() - started) * MS)
        try:
            box.commands.run("true")
            first.append((time.perf_counter() - started) * MS)
        finally:
            box.kill()
        time.sleep(BETWEEN_CREATES_S)
    return {"create_envd": envd, "create_first_true": first}


def exec_true(bench: Bench) -> Samples:
    with sandbox() as box:
        for _ in range(5):
            box.commands.run("true")
        return {"exec_true": [timed(lambda: box.commands.run("true")) for _ in range(RUNS * 2)]}


def pause_and_resume(bench: Bench) -> Samples:
    """A sandbox that comes back soon, as an agent's does when the model has thought: its VM still lingers."""
    pauses, resumes = [], []
    with sandbox() as box:
        for _ in range(RUNS):
            box.commands.run("true")
            pauses.append(timed(box.pause))
            time.sleep(THINKING_S)
            resumes.append(timed(lambda: (box.connect(), _assert_running(box))))
    return {"pause_idle": pauses, "resume_envd": resumes}


def resume_durable(bench: Bench) -> Samples:
    """A sandbox that comes back after its VM was released: a restore from the repository."""
    resumes, host_bytes = [], []
    with sandbox() as box:
        for _ in range(RUNS_SLOW):
            box.pause()
            bench.wait_durable(box.sandbox_id)
            pid = bench.vmm_pids().get(box.sandbox_id)
            host_bytes.append(float(private_bytes(pid)) if pid else 0.0)
            resumes.append(timed(lambda: (box.connect(), _assert_running(box))))
    return {"resume_envd_durable": resumes, "paused_host_bytes": host_bytes}


def pause_dirty(bench: Bench) -> Samples:
    disk, memory = [], []
    with sandbox() as box:
        for _ in range(RUNS_SLOW):
            box.commands.run("dd if=/dev/zero of=/home/user/big bs=1M count=1024 conv=notrunc 2>/dev/null", timeout=300)
            disk.append(timed(box.pause))
            bench.wait_durable(box.sandbox_id)
            box.connect()
    for _ in range(RUNS_SLOW):
        with sandbox() as box:
            dirty_memory(box, 256)
            memory.append(timed(box.pause))
    return {"pause_dirty_disk_1g": disk, "pause_dirty_memory_256m": memory}


def snapshots(bench: Bench) -> Samples:
    frozen, answers, stored = [], [], []
    with sandbox() as box:
        dirty_memory(box, 64)
        for _ in range(RUNS):
            started = time.perf_counter()
            answer = bench.post(f"/sandboxes/{box.sandbox_id}/snapshots", {})
            answers.append((time.perf_counter() - started) * MS)
            frozen.append(float(answer.headers["X-Aenv-Frozen-Ms"]))
            _delete(bench, answer.json()["snapshotID"])
    with sandbox() as box:
        dirty_memory(box, 64)
        _snapshot(bench, box)
        for _ in range(RUNS_SLOW):
            dirty_memory(box, 16, "sixteen")
            before = bench.repository_bytes()
            _snapshot(bench, box)
            stored.append(float(bench.repository_bytes() - before))
    return {"snapshot_frozen": frozen, "snapshot_answer": answers, "snapshot_bytes_after_16mb": stored}


def snapshot_worst(bench: Bench) -> Samples:
    """All of the guest's memory dirty, by a writer that keeps its page cache full."""
    frozen = []
    with sandbox() as box:
        writer = "while true; do dd if=/dev/zero of=/home/user/big bs=1M count=768 conv=notrunc 2>/dev/null; done"
        box.commands.run(writer, background=True, timeout=0)
        time.sleep(15)
        for _ in range(RUNS_SLOW):
            answer = bench.post(f"/sandboxes/{box.sandbox_id}/snapshots", {})
            frozen.append(float(answer.headers["X-Aenv-Frozen-Ms"]))
            _delete(bench, answer.json()["snapshotID"])
            time.sleep(1)
    return {"snapshot_frozen_worst": frozen}


def fork16(bench: Bench) -> Samples:
    everything, frozen, private = [], [], []
    with sandbox() as box:
        dirty_memory(box, 64)
        for run in range(RUNS):
            started = time.perf_counter()
            answer = bench.post(f"/sandboxes/{box.sandbox_id}/fork", {"count": 16, "timeout": 600})
            everything.append((time.perf_counter() - started) * MS)
            frozen.append(float(answer.headers["X-Aenv-Frozen-Ms"]))
            children = [child["sandbox"]["sandboxID"] for child in answer.json()]
            if run == 0:
                time.sleep(3)
                pids = bench.vmm_pids()
                private = [float(private_bytes(pids[child])) for child in children]
            for child in children:
                bench.api.delete(f"/sandboxes/{child}").raise_for_status()
            # A kill is answered before the process is gone; sixteen that are going are no part of the next fork.
            bench.wait_gone(set(children))
    return {"fork16_all": everything, "fork16_frozen": frozen, "clone_private_bytes": private}


def private_bytes(pid: int) -> int:
    """Memory that only this process has, in bytes."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1]) * 1024
    return total


def _assert_running(box: Sandbox) -> None:
    if not box.is_running():
        raise AssertionError(f"{box.sandbox_id} does not answer after its resume")


def _snapshot(bench: Bench, box: Sandbox) -> None:
    bench.post(f"/sandboxes/{box.sandbox_id}/snapshots", {})


def _delete(bench: Bench, snapshot_id: str) -> None:
    bench.api.delete(f"/templates/{snapshot_id.replace('/', '%2F')}").raise_for_status()


ALL: Final[tuple[Callable[[Bench], Samples], ...]] = (
    cold_boot,
    create,
    exec_true,
    pause_and_resume,
    resume_durable,
    pause_dirty,
    snapshots,
    snapshot_worst,
    fork16,
)
