"""`make demo` interrupted: whatever it was doing, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("at", ["importing", "first boot", "sixteen forks"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, at: str) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "bench.demo"],
        cwd=ROOT,
        env={**os.environ, "AENV_SCRATCH": str(scratch)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        assert any(at in line for line in demo.stdout), f"the demo never got to {at!r}"
        os.killpg(demo.pid, signal.SIGINT)
        output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 130, output[-2000:]
    assert "nothing is left behind" in output
    assert list(scratch.iterdir()) == []
    alive = subprocess.run(["pgrep", "-f", str(scratch)], capture_output=True, text=True).stdout
    assert alive == ""
    assert str(scratch) not in Path("/proc/self/mounts").read_text()
