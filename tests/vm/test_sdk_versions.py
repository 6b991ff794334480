"""Other versions and languages of the E2B SDK on the same node: each walks tests/sdk/walk.* in its own process.

The installed SDK (2.63.0, the v2 routes) is what the other tests use. Here are 2.45.1, which calls the v1 routes, and
the npm package. They come from the package indexes; without one the test is skipped, and says so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vm.conftest import NodeUnderTest

pytestmark = pytest.mark.vm

OLD_PYTHON_SDK = "e2b==2.45.1"
NPM_SDK = "e2b@2.51.0"
SDK_DIR = Path(__file__).parent.parent / "sdk"
INSTALL_S_MAX = 120
WALK_S_MAX = 180


def test_the_installed_python_sdk_walks(node: NodeUnderTest) -> None:
    assert _walk([sys.executable, str(SDK_DIR / "walk.py")])["version"] == "2.63.0"


def test_the_v1_python_sdk_walks(node: NodeUnderTest) -> None:
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    python = ["uv", "run", "--isolated", "--no-project", "--with", OLD_PYTHON_SDK, "python"]
    _install([*python, "-c", "import e2b"], SDK_DIR)
    said = _walk([*python, str(SDK_DIR / "walk.py")])
    assert said["version"] == OLD_PYTHON_SDK.partition("==")[2]
    assert {"ten_cycles", "snapshot", "fork"} <= set(said["steps"])


def test_the_npm_sdk_walks(node: NodeUnderTest, tmp_path: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node or npm is not installed")
    # Without --prefix npm looks for a project in the folders above.
    options = ["--prefix", ".", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=1"]
    _install(["npm", "install", *options, NPM_SDK], tmp_path)
    shutil.copy(SDK_DIR / "walk.mjs", tmp_path)
    assert {"tenCycles", "snapshot", "fork"} <= set(_walk(["node", str(tmp_path / "walk.mjs")])["steps"])


def _install(command: list[str], cwd: Path) -> None:
    """Fetch the package; skip the test when this machine cannot."""
    try:
        installed = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} did not get the package from its index within {INSTALL_S_MAX} s")
    if installed.returncode != 0:
        pytest.skip(f"{command[0]} could not get the package from its index: {installed.stderr.strip()[-300:]}")


def _walk(command: list[str]) -> dict[str, list[str] | str]:
    """Run a walk to its end; the test fails with what it printed. The node's address is in our environment."""
    walk = subprocess.run(command, capture_output=True, text=True, timeout=WALK_S_MAX)
    assert walk.returncode == 0, walk.stdout + walk.stderr
    said: dict[str, list[str] | str] = json.loads(walk.stdout.splitlines()[-1])
    return said
