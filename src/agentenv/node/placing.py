"""Putting a sandbox's VM on this host and taking it off again: slot, exports, VMM process, guest identity.

`place` and `displace` are inverses; `displace` copes with any part being absent, so that it also cleans up after a
`place` that failed, was cancelled, or was cut short by the death of the server.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentenv.guest.client import GuestIdentity
from agentenv.model import MachineFingerprint, image_environment, image_user, image_workdir
from agentenv.network import Slot
from agentenv.node.owner import Owner
from agentenv.vmm import MachineFiles, MachineSpec, NetworkAttachment

# A first boot takes two seconds under TCG on an idle machine; a restore a tenth of one. Loaded machines take more.
GUEST_ANSWER_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True)
class SavedMachine:
    """A device state to load, and what it needs."""

    device_state: Path
    needs: MachineFingerprint


async def place(owner: Owner, saved: SavedMachine | None) -> None:
    """Start the VM that the record describes: from a saved machine, or (None) from its kernel.

    The record names disk, upper, memory and generation already. On return the guest has answered /init as this sandbox.
    Raises `AenvError`; the caller then calls `displace`.
    """
    host, record = owner.host, owner.record
    slot = await host.slots.acquire(record.spec.network)
    owner.slot = slot
    owner.update(slot=slot.index)
    runtime_dir = host.paths.runtime_dir(record.sandbox_id)
    shutil.rmtree(runtime_dir, ignore_errors=True)
    runtime_dir.mkdir(parents=True, mode=0o700)
    files = await _export(owner, runtime_dir)
    spec = MachineSpec(record.sandbox_id, record.resources, host.kernel, files, _attachment(slot))
    if saved is None:
        vmm = await host.driver.boot(spec)
    else:
        vmm = await host.driver.restore(spec, saved.device_state, saved.needs)
    owner.watch(vmm)
    owner.update(vmm=vmm.record, restoring="")
    await vmm.cont()
    await greet(owner)


def _attachment(slot: Slot) -> NetworkAttachment:
    return NetworkAttachment(
        netns=slot.netns,
        tap=slot.tap,
        guest_mac=slot.guest_mac,
        guest_cidr=slot.guest_cidr,
        gateway=slot.gateway,
        dns=slot.dns,
        gateway_mac=slot.gateway_mac,
    )


async def greet(owner: Owner) -> None:
    """Tell the guest who and when it is. Raises `GuestUnresponsive` or `GuestError`."""
    record, tokens = owner.record, owner.host.tokens
    assert owner.slot is not None
    identity = GuestIdentity(
        sandbox_id=record.sandbox_id,
        template_id=record.template_id,
        access_token=tokens.envd(record.sandbox_id) if record.spec.secure else None,
        previous_token=held_token(owner) or None,
        env_vars={**image_environment(record.image_config), **record.spec.env_vars},
        default_user=image_user(record.image_config),
        default_workdir=image_workdir(record.image_config),
        is_same=record.greeted,
    )
    await owner.host.guest.init(owner.slot.address, identity, record.generation, GUEST_ANSWER_S_MAX)
    owner.update(token_owner=record.sandbox_id if record.spec.secure else "", guest_token="", greeted=True)


def held_token(owner: Owner) -> str:
    """The token that the guest's daemon holds at this moment; "" for none."""
    record = owner.record
    if record.guest_token:
        return record.guest_token
    return owner.host.tokens.envd(record.token_owner) if record.token_owner else ""


async def displace(owner: Owner) -> None:
    """Take the VM off: kill, wait until the process is gone, then give back slot, image and exports.

    Waits as long as the process exists: until then its slot and its mapping are in use whatever we believe. Raises
    `AenvError` when something cannot be given back yet; calling it again goes on from there.
    """
    host = owner.host
    vmm = owner.vmm
    if vmm is not None:
        vmm.kill()
        await vmm.wait_exit()
        owner.unwatch()
        await vmm.close()
    await _release_exports(owner)
    if owner.slot is not None:
        await host.slots.release(owner.slot)
        owner.slot = None
    shutil.rmtree(host.paths.runtime_dir(owner.sandbox_id), ignore_errors=True)
    owner.capture_job = None
    owner.update(vmm=None, slot=None)


async def _export(owner: Owner, runtime_dir: Path) -> MachineFiles:
    """Export memory image and disk side by side; what one of them acquired stays acquired if the other fails."""
    host, record = owner.host, owner.record
    upper = host.paths.upper(record.sandbox_id, record.upper)
    upper.parent.mkdir(parents=True, exist_ok=True)
    lowers = host.layers.paths(record.disk.layers)

    async def memory() -> Path:
        path = await host.images.acquire(record.memory)
        owner.mapped = record.memory
        return path

    disk = host.block.export_disk(record.disk_export, record.disk.size_bytes, lowers, upper)
    memory_path, disk_path = await asyncio.gather(memory(), disk)
    return MachineFiles(Path(memory_path), Path(disk_path), runtime_dir)


async def _release_exports(owner: Owner) -> None:
    host = owner.host
    await host.block.unexport(owner.record.disk_export)
    if owner.mapped is not None:
        mapped, owner.mapped = owner.mapped, None
        await host.images.release(mapped)
