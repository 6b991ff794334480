"""`make bench-storage OUT=file.json`: measures storage alone and prints the figures beside the promises."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from agentenv.config import SETTINGS
from bench import storage_disk, storage_layers, storage_s3
from bench.bench import Summary
from bench.machine import describe
from bench.storage_block import MIB, block_bench

Samples = dict[str, list[float]]
AT_LEAST: Final = ">="
AT_MOST: Final = "<="

# name: (unit, direction, promise for the median). Others are printed without one. SPECIFICATION.md explains each.
PROMISES: Final[dict[str, tuple[str, str, float]]] = {
    "read_4k_ratio": ("of ext4", AT_LEAST, 0.60),
    "read_seq_ratio": ("of ext4", AT_LEAST, 0.70),
    "write_ratio": ("of ext4", AT_LEAST, 0.60),
    "write_4k_ratio": ("of ext4", AT_LEAST, 0.60),
    "seal_10g": ("ms", AT_MOST, 20),
    "seal_10g_random": ("ms", AT_MOST, 150),
    "zfile_mb_per_s": ("MB/s", AT_LEAST, 150),
    "s3_cold_start": ("ms", AT_MOST, 3000),
    "s3_prefetched_start": ("ms", AT_MOST, 1500),
    "s3_warm_ratio": ("of local", AT_MOST, 1.2),
    "s3_bytes_share": ("of image", AT_MOST, 0.15),
    "blockd_rss_200_exports": ("bytes", AT_MOST, 150e6),
    "open_100_layers": ("ms", AT_MOST, 30),
    "index_lookups_m_per_s": ("M/s", AT_LEAST, 20),
    "index_lookups_depth_100_m_per_s": ("M/s", AT_LEAST, 20),
    "neighbour_read_slowdown": ("times", AT_MOST, 2),
    "upper_rewritten_bytes": ("bytes", AT_MOST, 300e6),
}
# By the end of the name, for figures without a promise.
UNITS: Final = {
    "zfile_ratio": "of plain",
    "_k_per_s": "k/s",
    "_ratio": "of ext4",
    "_us": "us",
    "_ms": "ms",
    "_mb_per_s": "MB/s",
    "_m_per_s": "M/s",
    "_per_s": "1/s",
    "_exports": "count",
    "_slowdown": "times",
    "_bytes": "bytes",
    "_format": "ms",
    "_start": "ms",
}
# These end like a count and are not.
BYTES: Final = {"blockd_private_200_exports"}


def unit_of(name: str) -> str:
    if name in PROMISES:
        return PROMISES[name][0]
    if name in BYTES:
        return "bytes"
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def summarize(name: str, samples: list[float]) -> Summary:
    ordered = sorted(samples)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return Summary(unit_of(name), len(samples), statistics.median(samples), p99, ordered[0], ordered[-1])


def run(only: set[str]) -> dict[str, Summary]:
    """Take all samples, or those of the named measure functions."""
    results: dict[str, Summary] = {}

    def take(measure: str, job: Callable[[], Samples]) -> None:
        if only and measure not in only:
            return
        print(f"measuring {measure} ...", file=sys.stderr, flush=True)
        results.update({name: summarize(name, values) for name, values in job().items()})

    with block_bench(Path(os.environ["AENV_BIN_DIR"])) as bench:
        for measure in storage_disk.ALL:
            take(measure.__name__, lambda measure=measure: measure(bench))  # type: ignore[misc]
        take("layers", lambda: storage_layers.layers(bench.folder))
    # After the others' blockd has ended; these start nodes of their own.
    if "snapshot.oss.bucket" in SETTINGS:
        take("s3", storage_s3.s3)
    return results


def verdict_of(name: str, p50: float) -> tuple[str, str]:
    """The promise as it is printed, and whether it was kept."""
    if name not in PROMISES:
        return "-", ""
    unit, direction, promise = PROMISES[name]
    kept = p50 >= promise if direction == AT_LEAST else p50 <= promise
    shown = f"{promise / MIB:.0f} MiB" if unit == "bytes" else f"{promise:g}"
    return f"{direction} {shown}", "  kept" if kept else "  MISSED"


def print_results(results: dict[str, Summary]) -> None:
    print(f"\n{describe('no microVM')}\n")
    print(f"{'measure':<34}{'n':>4}{'p50':>12}{'p99':>12}{'min':>12}  {'unit':<9}{'promise':>12}")
    for name, result in results.items():
        scale, unit = (MIB, "MiB") if result.unit == "bytes" else (1, result.unit)
        promise, verdict = verdict_of(name, result.p50)
        numbers = f"{result.p50 / scale:>12.2f}{result.p99 / scale:>12.2f}{result.min / scale:>12.2f}"
        print(f"{name:<34}{result.n:>4}{numbers}  {unit:<9}{promise:>12}{verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    parser.add_argument("--only", action="append", default=[], help="only these measure functions (repeatable)")
    options = parser.parse_args()
    try:
        results = run(set(options.only))
    except KeyboardInterrupt:
        print("interrupted; nothing is left behind", file=sys.stderr)
        return 130
    print_results(results)
    if options.out:
        options.out.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
