"""What `BlockDaemon` is told before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.block import BlockDaemon


def test_stores_and_cache_go_together(tmp_path: Path) -> None:
    """Half a cache is a mistake of the caller and not of blockd."""
    with pytest.raises(ValueError, match="together"):
        BlockDaemon(bin_dir=tmp_path, run_dir=tmp_path, state_dir=tmp_path, stores=tmp_path / "stores.json")
    BlockDaemon(
        bin_dir=tmp_path,
        run_dir=tmp_path,
        state_dir=tmp_path,
        stores=tmp_path / "stores.json",
        cache_dir=tmp_path / "cache",
        cache_size_bytes_max=1 << 30,
        memory_outage_s=600,
    )
