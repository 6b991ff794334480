"""Runs fio on one file and reads its answer. Owns the command line; what is compared with what is the caller's."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Pattern = Literal["read", "randread", "write", "randwrite"]
RUN_S_MAX: Final = 300.0


class FioMissing(Exception):
    """The Debian package `fio` is not installed."""


@dataclass(frozen=True)
class FioResult:
    """Operations and bytes per second, and the latency of one operation in microseconds."""

    operations_per_s: float
    bytes_per_s: float
    latency_us_p50: float
    latency_us_p99: float


def start_fio(
    path: Path,
    pattern: Pattern,
    *,
    block_bytes: int,
    depth: int,
    size_bytes: int,
    seconds: float = 0.0,
    direct: bool = True,
    seed: int = 1,
    end_fsync: bool = False,
    repeat: bool = False,
) -> subprocess.Popen[str]:
    """Begin a run of at most `seconds` (0: until all was touched). `repeat` starts again at the end of the file."""
    command = [
        *(
            "fio",
            "--name=bench",
            f"--filename={path}",
            f"--rw={pattern}",
            f"--bs={block_bytes}",
            f"--size={size_bytes}",
        ),
        *(f"--iodepth={depth}", "--ioengine=io_uring", f"--direct={int(direct)}", f"--randseed={seed}"),
        # Content that neither a disk nor a zero check can shorten; nothing read or written outside of this file.
        *(f"--randseed={seed}", "--refill_buffers", "--output-format=json"),
        *((f"--runtime={seconds}",) if seconds else ()),
        *(("--time_based",) if repeat else ()),
        *(("--end_fsync=1",) if end_fsync else ()),
    ]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=path.parent)
    except FileNotFoundError as error:
        if error.filename == "fio":
            raise FioMissing("fio is missing: apt-get install fio") from error
        raise


def finish_fio(process: subprocess.Popen[str]) -> FioResult:
    """Wait for a run. Raises `RuntimeError` with fio's own words if it failed."""
    try:
        output, errors = process.communicate(timeout=RUN_S_MAX)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"fio ended with {process.returncode}: {errors.strip() or output[-500:]}")
    job = json.loads(output[output.index("{") :])["jobs"][0]
    side = job["read"] if job["read"]["total_ios"] else job["write"]
    percentiles = side["clat_ns"].get("percentile", {})
    # With `end_fsync` the time of the flush belongs to the job, not to fio's own rate.
    elapsed_s = max(job["job_runtime"], side["runtime"], 1) / 1000
    return FioResult(
        side["total_ios"] / elapsed_s,
        side["io_bytes"] / elapsed_s,
        percentiles.get("50.000000", 0) / 1000,
        percentiles.get("99.000000", 0) / 1000,
    )


def drop_page_cache(path: Path) -> None:
    """Write back and forget the cached pages of one file; other files keep theirs."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
