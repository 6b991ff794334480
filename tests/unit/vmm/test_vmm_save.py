"""Saving a device state when QEMU only says that it failed: whether the disk was full decides what is raised."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.errors import StorageFull, VmmError, VmmGone
from agentenv.vmm import _qemu_vmm
from agentenv.vmm._qemu_vmm import STATE_BYTES_MAX, QemuVmm

BLOCK_BYTES = 4096


def vmm_that_fails(with_error: VmmError, path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> QemuVmm:
    """A stopped machine whose save leaves half a file on a disk with so much room."""
    vmm = QemuVmm.__new__(QemuVmm)

    async def command(name: str, _arguments: object = None) -> Any:
        if name == "query-status":
            return {"running": False}
        path.write_bytes(b"half")
        raise with_error

    monkeypatch.setattr(vmm, "_command", command)
    space = SimpleNamespace(f_bfree=free_bytes // BLOCK_BYTES, f_frsize=BLOCK_BYTES)
    monkeypatch.setattr(_qemu_vmm.os, "statvfs", lambda _folder: space)
    return vmm


@pytest.mark.parametrize(
    ("error", "free_bytes", "raised"),
    [
        (VmmError("QEMU refused: An IO error has occurred"), STATE_BYTES_MAX - BLOCK_BYTES, StorageFull),
        (VmmError("QEMU refused: An IO error has occurred"), STATE_BYTES_MAX, VmmError),
        (VmmGone("QEMU is gone"), 0, VmmGone),
    ],
)
async def test_a_failed_save_on_a_full_disk_is_storage_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: VmmError, free_bytes: int, raised: type[Exception]
) -> None:
    path = tmp_path / "state"
    vmm = vmm_that_fails(error, path, monkeypatch, free_bytes)
    with pytest.raises(raised) as seen:
        await vmm.save_device_state(path)
    assert type(seen.value) is raised
    assert not os.path.exists(path)
