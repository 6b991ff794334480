"""The measures of disks on the local node: blockd's exports beside the same work on plain ext4 files, in turns.

Each pair of runs gives one ratio, so that what else the machine does falls on both. Every function takes a running
blockd and leaves no file behind.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Final

from bench.storage_block import GIB, MIB, BlockBench, fill_sequentially
from bench.storage_fio import FioResult, Pattern, drop_page_cache, finish_fio, start_fio

Samples = dict[str, list[float]]
MS: Final = 1000.0
# Layers of the stack that is read, and operations in flight: what a busy guest's queue has.
DEPTH: Final = 20
IN_FLIGHT: Final = 20
IMAGE_BYTES: Final = 2 * GIB
# Layers take turns at this distance: what one file of a guest may lie scattered over.
CHUNK_BYTES: Final = 256 << 10
# Name, pattern, bytes of one operation, operations in flight.
READS: Final[tuple[tuple[str, Pattern, int, int], ...]] = (
    ("read_4k", "randread", 4096, IN_FLIGHT),
    ("read_4k_one_by_one", "randread", 4096, 1),
    ("read_seq", "read", MIB, 4),
)
PAIRS: Final = 9
RUN_S: Final = 2.0
WRITE_BYTES: Final = GIB
WRITE_4K_BYTES: Final = 256 * MIB
SEAL_BYTES: Final = 10 * GIB
SEALS: Final = 3
EXPORTS: Final = 200
REWRITE_S: Final = 60.0
REWRITE_BYTES: Final = 100 * MIB


def reads(bench: BlockBench) -> Samples:
    """Direct reads of a cold 20-layer disk against a plain file with the same bytes."""
    layers = bench.stack(DEPTH, IMAGE_BYTES, CHUNK_BYTES)
    plain = bench.file("plain")
    samples: Samples = {}
    try:
        with bench.disk(IMAGE_BYTES, layers) as (disk, _):
            with disk.open("rb") as source, plain.open("wb") as target:
                shutil.copyfileobj(source, target, MIB)
            drop_page_cache(plain)
            for name, pattern, block, depth in READS:
                samples |= _compare_reads(name, pattern, block, depth, disk, plain, layers)
            with bench.disk(IMAGE_BYTES, layers) as (other, _):
                samples |= _cached_reads(disk, other)
    finally:
        _remove([*layers, plain])
    return samples


def _compare_reads(
    name: str, pattern: Pattern, block: int, depth: int, disk: Path, plain: Path, layers: list[Path]
) -> Samples:
    ratios, latencies = [], []
    for number in range(PAIRS):
        pair: dict[Path, FioResult] = {}
        # In turns, and the first of a pair is not always the same.
        for path in (plain, disk) if number % 2 else (disk, plain):
            for layer in layers:
                drop_page_cache(layer)
            run = start_fio(
                path, pattern, block_bytes=block, depth=depth, size_bytes=IMAGE_BYTES, seconds=RUN_S, seed=number + 1
            )
            pair[path] = finish_fio(run)
        ratios.append(pair[disk].bytes_per_s / pair[plain].bytes_per_s)
        latencies.append(pair[disk].latency_us_p99)
    return {f"{name}_ratio": ratios, f"{name}_p99_us": latencies}


def _cached_reads(disk: Path, other: Path) -> Samples:
    """The same disk when its layers are in the page cache, as a base is that another guest has read too."""
    for path in (disk, other):
        with path.open("rb") as source:
            while source.read(MIB):
                pass
    runs = (start_fio(disk, "randread", block_bytes=4096, depth=IN_FLIGHT, size_bytes=IMAGE_BYTES, seconds=RUN_S)
            for _ in range(PAIRS))  # fmt: skip
    return {"read_4k_cached_per_s": [finish_fio(run).operations_per_s for run in runs]}


def writes(bench: BlockBench) -> Samples:
    """A fresh upper against a fresh file, the final flush included."""
    kinds: tuple[tuple[str, Pattern, int, int], ...] = (
        ("write_ratio", "write", MIB, WRITE_BYTES),
        ("write_4k_ratio", "randwrite", 4096, WRITE_4K_BYTES),
    )
    samples: Samples = {name: [] for name, *_ in kinds}
    for _ in range(PAIRS):
        for name, pattern, block, size in kinds:
            plain = bench.file("plain")
            plain.touch()
            try:
                with plain.open("r+b") as target:
                    target.truncate(IMAGE_BYTES)
                file_rate = _write(plain, pattern, block, size)
                with bench.disk(IMAGE_BYTES, []) as (disk, _):
                    samples[name].append(_write(disk, pattern, block, size) / file_rate)
            finally:
                plain.unlink(missing_ok=True)
    return samples


def _write(path: Path, pattern: Pattern, block: int, size: int) -> float:
    """Bytes per second until all of it is on the disk, by the clock on the wall."""
    started = time.perf_counter()
    finish_fio(start_fio(path, pattern, block_bytes=block, depth=IN_FLIGHT, size_bytes=size, end_fsync=True))
    return size / (time.perf_counter() - started)


def seals(bench: BlockBench) -> Samples:
    """How long a guest that wrote 10 GiB in sequence waits for its disk to be sealed."""
    samples = []
    for _ in range(SEALS):
        with bench.disk(SEAL_BYTES, []) as (disk, upper):
            fill_sequentially(disk, SEAL_BYTES)
            following = bench.file("upper")
            # A client that has slept for as long as the writing took wakes up slowly; that is not the seal's time.
            bench.wait(bench.client.stats())
            started = time.perf_counter()
            bench.wait(bench.client.seal_disk(upper.name, following))
            samples.append((time.perf_counter() - started) * MS)
        _remove([following])
    return {"seal_10g": samples}


def neighbour(bench: BlockBench) -> Samples:
    """4 KiB reads of one guest, alone and while another writes as fast as it can: how many times slower."""
    layers = bench.stack(DEPTH, IMAGE_BYTES // 2, CHUNK_BYTES)
    samples: Samples = {}
    try:
        with bench.disk(IMAGE_BYTES // 2, layers) as (quiet, _), bench.disk(IMAGE_BYTES, []) as (busy, _):
            for number in range(PAIRS):
                alone = _read_cold(quiet, layers, number)
                writer = start_fio(
                    busy, "write", block_bytes=MIB, depth=8, size_bytes=IMAGE_BYTES, seconds=RUN_S + 1, repeat=True
                )
                try:
                    disturbed = _read_cold(quiet, layers, number)
                finally:
                    finish_fio(writer)
                slowdowns = {
                    "neighbour_read_slowdown": disturbed.latency_us_p50 / alone.latency_us_p50,
                    "neighbour_read_mean_slowdown": alone.operations_per_s / disturbed.operations_per_s,
                    "neighbour_read_p99_slowdown": disturbed.latency_us_p99 / alone.latency_us_p99,
                }
                for name, slowdown in slowdowns.items():
                    samples.setdefault(name, []).append(slowdown)
    finally:
        _remove(layers)
    return samples


def _read_cold(disk: Path, layers: list[Path], seed: int) -> FioResult:
    for layer in layers:
        drop_page_cache(layer)
    run = start_fio(
        disk, "randread", block_bytes=4096, depth=1, size_bytes=IMAGE_BYTES // 2, seconds=RUN_S, seed=seed + 1
    )
    return finish_fio(run)


def rewriting(bench: BlockBench) -> Samples:
    """What an upper holds on disk after its guest rewrote one file for a minute."""
    with bench.disk(IMAGE_BYTES, []) as (disk, upper):
        run = start_fio(
            disk,
            "randwrite",
            block_bytes=16 << 10,
            depth=8,
            size_bytes=REWRITE_BYTES,
            seconds=REWRITE_S,
            repeat=True,
        )
        finish_fio(run)
        files = (upper, upper.with_name(f"{upper.name}.map"))
        return {"upper_rewritten_bytes": [float(sum(path.stat().st_blocks * 512 for path in files))]}


def many_exports(bench: BlockBench) -> Samples:
    """Memory and threads of blockd with 200 disks over one stack, each read and written a little."""
    layers = bench.stack(DEPTH, IMAGE_BYTES // 4, CHUNK_BYTES)
    try:
        with contextlib.ExitStack() as exports:
            for number in range(EXPORTS):
                disk, _ = exports.enter_context(bench.disk(IMAGE_BYTES // 4, layers))
                with disk.open("r+b", buffering=0) as file:
                    file.seek(number * CHUNK_BYTES)
                    file.read(CHUNK_BYTES)
                    file.write(b"\1" * CHUNK_BYTES)
            status = bench.status()
            return {
                "blockd_rss_200_exports": [status["VmRSS"] * 1024.0],
                "blockd_private_200_exports": [status["RssAnon"] * 1024.0],
                "blockd_threads_200_exports": [float(status["Threads"])],
            }
    finally:
        _remove(layers)


def _remove(files: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.map").unlink(missing_ok=True)


ALL: Final = (reads, writes, seals, neighbour, rewriting, many_exports)
