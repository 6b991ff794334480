"""A blockd of one's own for `make bench-storage`, without a node around it.

Owns the daemon pair and a scratch folder on the disk that is measured; both are gone afterwards, whatever happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from agentenv.block import BlockClient, BlockDaemon
from bench.storage_fio import finish_fio, start_fio

T = TypeVar("T")
MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass
class BlockBench:
    """A running blockd and where its files go."""

    folder: Path
    client: BlockClient
    run_dir: Path
    _runner: asyncio.Runner
    _names: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    def file(self, kind: str) -> Path:
        """A path that nothing has yet."""
        return self.folder / f"{kind}-{next(self._names)}"

    def pid(self) -> int:
        """The process that serves."""
        return int(json.loads((self.run_dir / "blockd.json").read_bytes())["pid"])

    def status(self) -> dict[str, int]:
        """Numbers of /proc/PID/status; kibibytes where it says kB."""
        lines = Path(f"/proc/{self.pid()}/status").read_text().splitlines()
        pairs = (line.split(":", 1) for line in lines)
        return {name: int(value.split()[0]) for name, value in pairs if value.split() and value.split()[0].isdigit()}

    @contextlib.contextmanager
    def disk(self, size_bytes: int, layers: list[Path]) -> Iterator[tuple[Path, Path]]:
        """An export of a fresh upper over layers: (the exported file, the upper)."""
        upper = self.file("upper")
        name = upper.name
        path = self.wait(self.client.export_disk(name, size_bytes, layers, upper))
        try:
            yield path, upper
        finally:
            self.wait(self.client.unexport(name))
            for leftover in (upper, upper.with_name(f"{upper.name}.map")):
                leftover.unlink(missing_ok=True)

    def stack(self, depth: int, size_bytes: int, chunk_bytes: int) -> list[Path]:
        """So many sealed layers that share an image in turns: chunk c is in layer c % depth, all of it is written."""
        layers: list[Path] = []
        name = "stack"
        upper = self.file("layer")
        path = self.wait(self.client.export_disk(name, size_bytes, [], upper))
        block = os.urandom(chunk_bytes)
        for number in range(depth):
            descriptor = os.open(path, os.O_RDWR)
            try:
                for at in range(number * chunk_bytes, size_bytes, depth * chunk_bytes):
                    os.pwrite(descriptor, at.to_bytes(8, "little") + block[8:], at)
            finally:
                os.close(descriptor)
            layers.append(upper)
            upper = self.file("layer")
            self.wait(self.client.seal_disk(name, upper))
        self.wait(self.client.unexport(name))
        self.wait(self.client.sync(layers))
        return layers


@contextlib.contextmanager
def block_bench(bin_dir: Path) -> Iterator[BlockBench]:
    """Start keeper and blockd over a scratch folder (AENV_SCRATCH, else /var/tmp)."""
    root = Path(tempfile.mkdtemp(prefix="aenv-storage-", dir=os.environ.get("AENV_SCRATCH", "/var/tmp")))
    folder = root / "files"
    folder.mkdir()
    with asyncio.Runner() as runner:
        daemon = BlockDaemon(bin_dir=bin_dir, run_dir=root / "run", state_dir=root / "state")
        try:
            runner.run(daemon.ensure())
            client = BlockClient(daemon.socket)
            try:
                yield BlockBench(folder, client, root / "run", runner)
            finally:
                runner.run(client.close())
        finally:
            runner.run(daemon.stop())
            shutil.rmtree(root, ignore_errors=True)


def fill_sequentially(path: Path, size_bytes: int) -> None:
    """Write all of a file once, in order, past the page cache."""
    finish_fio(start_fio(path, "write", block_bytes=MIB, depth=8, size_bytes=size_bytes))
