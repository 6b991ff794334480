"""One walk through a sandbox's life with whichever E2B SDK is installed; run by tests/vm/test_sdk_versions.py.

Stands alone: it runs in an environment that has the `e2b` package and nothing of this project. The server comes from
E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY. What one version has and another has not is found by looking for it.
Ends with one line of JSON on standard output: the version, and the steps that were walked.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable

from e2b import CommandExitException, NotFoundException, PtySize, Sandbox, TimeoutException

CYCLES = 10
STEPS: list[str] = []


def step(function: Callable[[Sandbox], None]) -> Callable[[Sandbox], None]:
    """Record that a step was walked, in the order of the walk."""

    def walked(box: Sandbox) -> None:
        function(box)
        STEPS.append(function.__name__)

    return walked


@step
def commands(box: Sandbox) -> None:
    done = box.commands.run("echo $GREETING; echo err >&2; pwd; id -un", envs={"PER_COMMAND": "yes"})
    assert (done.stdout, done.stderr, done.exit_code) == ("hello\n/home/user\nuser\n", "err\n", 0), done
    try:
        box.commands.run("echo partial; exit 7")
    except CommandExitException as failed:
        assert (failed.exit_code, failed.stdout) == (7, "partial\n"), failed
    else:
        raise AssertionError("exit 7 was taken for success")
    started = time.monotonic()
    try:
        box.commands.run("sleep 60", timeout=1)
    except TimeoutException:
        assert time.monotonic() - started < 20
    else:
        raise AssertionError("the command did not time out")


@step
def stdin_and_background(box: Sandbox) -> None:
    said: list[str] = []
    cat = box.commands.run("cat; echo closed", background=True, stdin=True)
    box.commands.send_stdin(cat.pid, "through stdin\n")
    assert cat.pid in [process.pid for process in box.commands.list()]
    if hasattr(box.commands, "close_stdin"):
        box.commands.close_stdin(cat.pid)
        assert cat.wait(on_stdout=said.append).exit_code == 0
        assert "".join(said) == "through stdin\nclosed\n", said
    else:
        assert box.commands.kill(cat.pid)
    sleeper = box.commands.run("sleep 1000", background=True)
    assert box.commands.kill(sleeper.pid)
    assert not box.commands.kill(sleeper.pid)


@step
def terminal(box: Sandbox) -> None:
    seen: list[bytes] = []
    shell = box.pty.create(size=PtySize(cols=80, rows=24), timeout=60)
    box.pty.resize(shell.pid, PtySize(cols=132, rows=50))
    box.pty.send_stdin(shell.pid, b"stty size; exit 3\n")
    try:
        shell.wait(on_pty=seen.append)
    except CommandExitException as ended:
        assert ended.exit_code == 3, ended
    else:
        raise AssertionError("the shell's exit code was lost")
    assert b"50 132" in b"".join(seen), seen


@step
def files(box: Sandbox) -> None:
    binary = bytes(range(256)) * 1024
    box.files.write("deep/er/data.bin", binary)
    assert bytes(box.files.read("/home/user/deep/er/data.bin", format="bytes")) == binary
    written = box.files.write_files([{"path": "a.txt", "data": "first"}, {"path": "leer ü", "data": ""}])
    assert [entry.path for entry in written] == ["/home/user/a.txt", "/home/user/leer ü"], written
    assert box.files.read("leer ü") == ""
    assert {entry.name for entry in box.files.list("/home/user")} >= {"a.txt", "leer ü", "deep"}
    assert box.files.get_info("a.txt").size == 5
    box.files.rename("/home/user/a.txt", "/home/user/b.txt")
    assert box.files.exists("b.txt")
    assert not box.files.exists("a.txt")
    assert box.files.make_dir("dir")
    assert not box.files.make_dir("dir")
    box.files.remove("dir")
    try:
        box.files.read("a.txt")
    except NotFoundException:
        pass
    else:
        raise AssertionError("a missing file was read")


@step
def ten_cycles(box: Sandbox) -> None:
    ticker = box.commands.run("i=0; while :; do i=$((i+1)); echo $i > /dev/shm/tick; sleep 0.1; done", background=True)
    pause = box.pause if hasattr(box, "pause") else box.beta_pause
    for cycle in range(CYCLES):
        box.files.write(f"/home/user/cycle{cycle}", f"data of {cycle}")
        pause()
        assert not box.is_running()
        if cycle % 2:
            box = Sandbox.connect(box.sandbox_id, timeout=120)
        else:
            box.connect(timeout=120)
        wanted = "".join(f"data of {earlier}\n" for earlier in range(cycle + 1))
        assert box.commands.run("for f in $(ls -v cycle*); do cat $f; echo; done").stdout == wanted
    before = int(box.files.read("/dev/shm/tick"))
    time.sleep(1)
    assert int(box.files.read("/dev/shm/tick")) > before
    assert box.commands.kill(ticker.pid)


@step
def snapshot(box: Sandbox) -> None:
    if not hasattr(box, "create_snapshot"):
        return
    box.files.write("state", "before")
    made = box.create_snapshot()
    box.files.write("state", "after")
    other = Sandbox.create(made.snapshot_id, timeout=60)
    assert (other.files.read("state"), box.files.read("state")) == ("before", "after")
    assert other.kill()
    assert made.snapshot_id in [one.snapshot_id for one in Sandbox.list_snapshots().next_items()]
    assert Sandbox.delete_snapshot(made.snapshot_id)


@step
def fork(box: Sandbox) -> None:
    if not hasattr(box, "fork"):
        return
    box.files.write("state", "shared")
    children = box.fork(count=2, timeout=60)
    assert len({child.sandbox_id for child in children} | {box.sandbox_id}) == 3
    children[0].files.write("state", "mine")
    assert [one.files.read("state") for one in (*children, box)] == ["mine", "shared", "shared"]
    for child in children:
        assert child.kill()


@step
def listing_and_end(box: Sandbox) -> None:
    box.set_timeout(90)
    info = box.get_info()
    assert (info.metadata, info.state.value) == ({"walk": "py"}, "running"), info
    listed = Sandbox.list()
    found = []
    while listed.has_next:
        found += [one.sandbox_id for one in listed.next_items()]
    assert box.sandbox_id in found
    assert box.kill()
    assert not box.kill()
    assert not box.is_running()


def main() -> None:
    box = Sandbox.create("base", timeout=120, envs={"GREETING": "hello"}, metadata={"walk": "py"})
    try:
        for walked in (commands, stdin_and_background, terminal, files, ten_cycles, snapshot, fork, listing_and_end):
            walked(box)
    except BaseException:
        print(f"walked until {STEPS}", file=sys.stderr)
        box.kill()
        raise
    print(json.dumps({"version": importlib.metadata.version("e2b"), "steps": STEPS}))


if __name__ == "__main__":
    main()
