"""The figures of the layer format alone: runs the Rust example that measures them and takes its JSON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Final

RUNS: Final = 3
RUN_S_MAX: Final = 900.0
# The example's names, and ours where they differ.
NAMES: Final = {
    "open_100_layers_ms": "open_100_layers",
    "seal_10g_sequential_ms": "seal_10g_format",
    "seal_random_runs_ms": "seal_10g_random",
}


def layers(scratch: Path) -> dict[str, list[float]]:
    """Run the example a few times; each run's values are medians themselves."""
    command = ["cargo", "run", "--release", "--locked", "--quiet", "-p", "aenv-layers", "--example", "bench", "--"]
    root = Path(__file__).resolve().parent.parent
    samples: dict[str, list[float]] = {}
    for _ in range(RUNS):
        answer = subprocess.run(
            [*command, str(scratch)],
            cwd=root,
            env=os.environ,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=RUN_S_MAX,
        )
        for name, value in json.loads(answer.stdout).items():
            samples.setdefault(NAMES.get(name, name), []).append(float(value))
    return samples
