"""The program under test and the reference, and a folder for both; nothing is mounted by either."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.host import built
from umoci_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Converts and unpacks in a folder of the test's own."""
    if os.geteuid() != 0:
        pytest.skip("owners and devices can only be unpacked by root")
    if shutil.which("umoci") is None:
        pytest.skip("umoci is not installed: apt-get install umoci")
    return Bench(built("aenv-image") / "aenv-image", tmp_path)
