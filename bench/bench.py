"""`make bench OUT=file.json`: measures a node of its own and prints the figures beside the promises."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx

from agentenv.config import load
from bench.machine import describe
from bench.measures import ALL, MIB, Bench, Samples
from bench.node import temporary_node

# name: (unit, promise for the median in that unit; None where it is only measured). SPECIFICATION.md explains each.
PROMISES: Final[dict[str, tuple[str, float | None]]] = {
    "cold_boot": ("ms", None),
    "create_envd": ("ms", None),
    "create_first_true": ("ms", 250),
    "exec_true": ("ms", 25),
    "pause_idle": ("ms", 60),
    "pause_dirty_disk_1g": ("ms", 150),
    "pause_dirty_memory_256m": ("ms", 150),
    "resume_envd": ("ms", 100),
    "resume_envd_durable": ("ms", None),
    "snapshot_frozen": ("ms", 100),
    "snapshot_frozen_worst": ("ms", None),
    "snapshot_answer": ("ms", None),
    "snapshot_bytes_after_16mb": ("bytes", 40 * MIB),
    "fork16_all": ("ms", 2000),
    "fork16_frozen": ("ms", 150),
    "clone_private_bytes": ("bytes", 40 * MIB),
    "paused_host_bytes": ("bytes", 0),
}


@dataclass(frozen=True)
class Summary:
    """One measure as it is written to the file."""

    unit: str
    n: int
    p50: float
    p99: float
    min: float
    max: float


def summarize(name: str, samples: list[float]) -> Summary:
    ordered = sorted(samples)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return Summary(PROMISES[name][0], len(samples), statistics.median(samples), p99, ordered[0], ordered[-1])


def run(only: set[str]) -> tuple[dict[str, Summary], str]:
    """Take all samples (or those of the named measure functions) on a fresh node."""
    results: dict[str, Summary] = {}
    with temporary_node("bench", AENV_SANDBOX_MEMORY_RESERVE_MIB="512") as node:
        os.environ.update(node.environment())
        run_dir = load(None, {"AENV_SERVER_STATE_DIR": str(node.state_dir)}).run_dir
        headers = {"X-API-KEY": node.api_key}
        with httpx.Client(base_url=node.api_url, headers=headers, timeout=120) as api:
            for measure in ALL:
                if only and measure.__name__ not in only:
                    continue
                print(f"measuring {measure.__name__} ...", file=sys.stderr, flush=True)
                samples: Samples = measure(Bench(node, api, run_dir))
                results.update({name: summarize(name, values) for name, values in samples.items()})
        return results, describe(node.accelerator)


def print_results(results: dict[str, Summary], machine: str) -> None:
    print(f"\n{machine}\n")
    print(f"{'measure':<28}{'n':>4}{'p50':>12}{'p99':>12}{'max':>12}  {'unit':<6}{'promise':>10}")
    for name, result in results.items():
        scale, unit = (MIB, "MiB") if result.unit == "bytes" else (1, result.unit)
        promise = PROMISES[name][1]
        verdict = "" if promise is None else ("  kept" if result.p50 <= promise else "  MISSED")
        shown = "-" if promise is None else f"{promise / scale:g}"
        numbers = f"{result.p50 / scale:>12.1f}{result.p99 / scale:>12.1f}{result.max / scale:>12.1f}"
        print(f"{name:<28}{result.n:>4}{numbers}  {unit:<6}{shown:>10}{verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    parser.add_argument("--only", action="append", default=[], help="only these measure functions (repeatable)")
    options = parser.parse_args()
    try:
        results, machine = run(set(options.only))
    except KeyboardInterrupt:
        print("interrupted; nothing is left behind", file=sys.stderr)
        return 130
    print_results(results, machine)
    if options.out:
        options.out.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
