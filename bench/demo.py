"""`make demo`: the main job, end to end, with the unmodified E2B SDK against a node of our own.

A small project with a failing test suite goes into a sandbox; it is set up once; the sandbox sleeps and wakes; a
snapshot; sixteen forks each try one candidate patch; the winner's diff is printed; a table of what was measured.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import httpx
from e2b import CommandExitException, Sandbox
from e2b.exceptions import SandboxException, ServiceBusyException

from bench.machine import describe
from bench.node import NodeFailed, RunningNode, aenv, temporary_node

PROJECT: Final = Path(__file__).parent / "sample_project"
TARGET: Final = "limiter/window.py"
HOME: Final = "/home/user/project"
EVICT: Final = "now - self._calls[0] > self._window_s"
REFUSE: Final = "len(self._calls) > self._limit"
TESTS: Final = f"cd {HOME} && python3 -m unittest -q"
# Shell built-ins alone: sixteen forks of it run beside the rollouts, and an exec is dear where the CPU is emulated.
TICKER: Final = "exec 9<> <(:); while true; do printf '%(%s)T ' -1 > /tmp/tick; read -rt 0.5 -u 9; done"
SECOND: Final = 1000.0
T = TypeVar("T")


@dataclass
class Table:
    """Measured durations by name, in milliseconds, in the order they were taken."""

    rows: dict[str, float] = field(default_factory=dict)

    def measure(self, name: str, job: Callable[[], T]) -> T:
        """Run a job and note how long it took."""
        started = time.perf_counter()
        result = job()
        self.rows[name] = (time.perf_counter() - started) * SECOND
        return result


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def candidates() -> list[tuple[str, str]]:
    """Sixteen candidate patches as unified diffs: four ways to compare at each of two places."""
    original = (PROJECT / TARGET).read_text()
    found = []
    for evict, refuse in itertools.product((">", ">=", "<", "<="), (">", ">=", "<", "!=")):
        patched = original.replace(EVICT, EVICT.replace(" > ", f" {evict} "))
        patched = patched.replace(REFUSE, REFUSE.replace(" > ", f" {refuse} "))
        lines = difflib.unified_diff(
            original.splitlines(keepends=True),
            patched.splitlines(keepends=True),
            f"a/{TARGET}",
            f"b/{TARGET}",
        )
        found.append((f"evict {evict:2} refuse {refuse:2}", "".join(lines)))
    return found


def put_project(sandbox: Sandbox) -> None:
    """Upload the project and do the set-up that no rollout should have to repeat."""
    for path in sorted(PROJECT.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            sandbox.files.write(f"{HOME}/{path.relative_to(PROJECT)}", path.read_bytes())
    sandbox.commands.run(
        f"cd {HOME} && git init -q && git config user.email demo@example.org && git config user.name demo"
        " && git add -A && git commit -qm 'as found'"
        " && python3 -c 'from tests.test_window import record_traffic; record_traffic()'"
    )


def tests_pass(sandbox: Sandbox) -> bool:
    try:
        sandbox.commands.run(TESTS, timeout=120)
    except CommandExitException:
        return False
    return True


def try_patch(sandbox: Sandbox, patch: str) -> bool:
    """One rollout: apply the candidate (an empty one changes nothing), run the suite."""
    if patch:
        sandbox.files.write("/tmp/candidate.patch", patch)
        sandbox.commands.run(f"cd {HOME} && git apply /tmp/candidate.patch")
    return tests_pass(sandbox)


def sleep_and_wake(sandbox: Sandbox, table: Table) -> None:
    """Pause, resume, and show that nothing was lost: a live process, the files, the clock."""
    ticker = sandbox.commands.run(TICKER, background=True)
    time.sleep(0.5)
    table.measure("pause", sandbox.pause)
    time.sleep(2)
    table.measure("resume to the first command", lambda: (sandbox.connect(), sandbox.commands.run("true")))
    assert any(process.pid == ticker.pid for process in sandbox.commands.list()), "the background process is gone"
    time.sleep(0.6)
    tick, now = sandbox.commands.run("cat /tmp/tick; date +%s.%N").stdout.split()
    skew_s = abs(float(now) - time.time())
    assert skew_s < 0.5, f"the guest's clock is off by {skew_s:.3f} s"
    assert time.time() - float(tick) < 2, "the background process stands still"
    assert "as found" in sandbox.commands.run(f"cd {HOME} && git log --format=%s").stdout
    print(f"   process {ticker.pid} still runs, the files are there, the clock is off by {skew_s * SECOND:.0f} ms")


def roll_out(forks: list[Sandbox], patches: list[tuple[str, str]]) -> list[bool]:
    with ThreadPoolExecutor(len(forks)) as pool:
        return list(pool.map(lambda pair: try_patch(pair[0], pair[1][1]), zip(forks, patches, strict=True)))


def run_demo(node: RunningNode) -> Table:
    table = Table()
    say("create a sandbox from the template `base`")
    sandbox = table.measure("create", lambda: Sandbox.create("base", timeout=600))
    table.measure("first `true` in it", lambda: sandbox.commands.run("true"))
    table.measure("exec `true`", lambda: sandbox.commands.run("true"))
    print("   " + sandbox.commands.run("uname -sr; id -un; python3 --version").stdout.replace("\n", "; "))
    say("put a project with a failing test suite into it and set it up once")
    table.measure("set-up", lambda: put_project(sandbox))
    assert not tests_pass(sandbox), "the suite should fail before it is mended"
    print("   the suite fails, as it should")
    say("let it sleep, wake it up")
    sleep_and_wake(sandbox, table)
    say("take a snapshot while it runs")
    snapshot = table.measure("snapshot", sandbox.create_snapshot)
    print(f"   {snapshot.snapshot_id}")
    say("sixteen forks, each tries another patch")
    forks = table.measure("fork 16", lambda: sandbox.fork(count=16, timeout=600))
    failed = [fork for fork in forks if isinstance(fork, Exception)]
    assert not failed, f"{len(failed)} forks failed: {failed[0]}"
    patches = candidates()
    passed = table.measure("16 rollouts (patch and test suite)", lambda: roll_out(forks, patches))
    for (name, _), good in zip(patches, passed, strict=True):
        print(f"   {name}  {'PASSES' if good else 'fails'}")
    assert passed.count(True) == 1, "exactly one candidate mends the project"
    winner = forks[passed.index(True)]
    say("the winner's diff")
    print(winner.commands.run(f"cd {HOME} && git diff").stdout)
    for box in (*forks, sandbox):
        box.kill()
    return table


def boot_ms(node: RunningNode) -> float:
    """How long the template's first boot took, as the node noted it."""
    environment = {**os.environ, "AENV_API_URL": node.api_url, "AENV_API_KEY": node.api_key}
    command = [*aenv(), "--json", "node"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return float(json.loads(output)["cold_boot_ms"])


def print_table(table: Table, node: RunningNode) -> None:
    say(f"measured on {describe(node.accelerator)}")
    width = max(map(len, table.rows))
    for name, value in table.rows.items():
        print(f"   {name:<{width}}  {value:9.1f} ms")


def main() -> int:
    try:
        with temporary_node("demo") as node:
            os.environ.update(node.environment())
            table = run_demo(node)
            table.rows = {"cold boot (the template's own)": boot_ms(node), **table.rows}
            print_table(table, node)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left behind", file=sys.stderr)
        return 130
    except (NodeFailed, SandboxException, ServiceBusyException, httpx.HTTPError) as error:
        print(f"\nthe demo ended early: {error}; nothing is left behind", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
