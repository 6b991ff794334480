"""What machine the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe(accelerator: str) -> str:
    """One line: CPU, cores, memory, kernel, accelerator."""
    cpu = _field("/proc/cpuinfo", "model name") or platform.machine()
    memory_gib = int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / (1 << 20)
    return f"{cpu}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {platform.release()}, {accelerator}"


def _field(path: str, name: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
