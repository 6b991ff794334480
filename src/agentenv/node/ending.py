"""The end of a sandbox: streams cut, VMM killed, everything given back, a tombstone left."""

from __future__ import annotations

import asyncio
import logging
import shutil
from typing import Final

from agentenv.errors import AenvError
from agentenv.lifecycle import Event
from agentenv.model import Tombstone
from agentenv.node.owner import Owner, Work
from agentenv.node.placing import displace
from agentenv.node.starting import drop_capture

log = logging.getLogger(__name__)

ABANDON_S_MAX: Final = 0.5
RETRY_S_FIRST: Final = 0.2
RETRY_S_MAX: Final = 10.0


async def withdraw(owner: Owner, work: Work) -> None:
    """Cut the streams, so that clients see a reset and ask again; the answer then is that the sandbox is gone."""
    if owner.record.generation:
        await owner.host.proxy.withdraw([owner.record.generation])


async def tear_down(owner: Owner, work: Work) -> Event:
    """Never fails: what cannot be given back yet is tried again until it can."""
    host = owner.host
    reason = owner.end_reason or Tombstone(owner.sandbox_id, host.clock.wall(), "deleted")
    _bury(owner, reason)
    if owner.vmm is not None:
        owner.vmm.kill()
    # Nobody can reach it any more; that its process takes a tenth of a second to go, or much longer in a page fault of
    # a stuck store, is no business of whoever asked.
    work.resolve()
    await _abandon(owner)
    pause_s = RETRY_S_FIRST
    while True:
        try:
            await drop_capture(owner)
            await displace(owner)
            break
        except AenvError as error:
            log.warning("sandbox %s: not everything is given back yet: %s", owner.sandbox_id, error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_S_MAX)
    if owner.record.pause is not None:
        await host.layers.drop_record(owner.record.pause)
    await asyncio.to_thread(shutil.rmtree, host.paths.sandbox_dir(owner.sandbox_id), ignore_errors=True)
    _delete_row(owner)
    host.collect_soon()
    return Event.TORN_DOWN


async def _abandon(owner: Owner) -> None:
    """A block that the dying process waits for is answered with an error, or the process cannot die."""
    if owner.vmm is None:
        return
    try:
        async with asyncio.timeout(ABANDON_S_MAX):
            await owner.host.block.abandon(owner.record.disk_export)
    except (AenvError, TimeoutError) as error:
        log.info("sandbox %s: its disk was not abandoned: %s", owner.sandbox_id, error)


def _bury(owner: Owner, reason: Tombstone) -> None:
    try:
        owner.host.database.bury(reason)
    except AenvError as error:
        log.error("sandbox %s: no tombstone (%s): %s", owner.sandbox_id, reason.reason, error)


def _delete_row(owner: Owner) -> None:
    try:
        owner.host.database.delete(owner.sandbox_id)
    except AenvError as error:
        # The next start of the server finds the row in phase `killing` and ends it again, which is harmless.
        log.error("sandbox %s: its row could not be deleted: %s", owner.sandbox_id, error)
