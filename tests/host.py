"""What tests on the real host need: the built programs and the guest's kernel, as `make test` provides them.

Run by hand without them such a test is skipped and says what to do. Under `make test`, which sets AENV_BIN_DIR, a
missing program is a failure: a run that skips what it should check is not green.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.errors import HostUnsuitable
from agentenv.guest.kernel import Kernel, fetch_kernel


def built(*programs: str) -> Path:
    """The folder with these programs: AENV_BIN_DIR, else the cargo target folder, else one in PATH."""
    given = os.environ.get("AENV_BIN_DIR")
    target = os.environ.get("CARGO_TARGET_DIR", "target")
    folders = [given] if given else [f"{target}/release", f"{target}/debug", *os.get_exec_path()]
    for folder in folders:
        if all(os.access(Path(folder) / program, os.X_OK) for program in programs):
            return Path(folder).resolve()
    missing = f"{' or '.join(programs)} is not built: scripts/setup.sh"
    if given:
        pytest.fail(f"AENV_BIN_DIR={given}: {missing}")
    pytest.skip(missing)


def guest_kernel() -> Kernel:
    """The distribution's cloud kernel that set-up unpacked; fetched (34 MB) where it has not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "aenv" / "kernels"
    try:
        return fetch_kernel(cache)
    except HostUnsuitable as error:
        pytest.skip(str(error))
