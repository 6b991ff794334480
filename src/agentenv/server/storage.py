"""The three tiers as the API shows them: staging and repository of this node, and blockd's cache."""

from __future__ import annotations

import asyncio
import dataclasses

from agentenv.config import Config
from agentenv.errors import Conflict, StoreUnavailable
from agentenv.model import GcReport, Report, StorageReport, TierUnavailable, TierUsage, VerifyReport
from agentenv.node.host import Host
from agentenv.node.node import Node
from agentenv.server.image_records import ImageRecords


class Storage:
    """See `api.storage.StorageService`. One event loop."""

    def __init__(self, config: Config, host: Host, node: Node, images: ImageRecords) -> None:
        self._config = config
        self._host = host
        self._node = node
        self._images = images
        self._checking = asyncio.Lock()

    async def usage(self) -> StorageReport:
        """See `StorageService.usage`."""
        config, layers = self._config, self._host.layers
        needed = self._node.needed_layers()
        staging = await asyncio.to_thread(layers.staging.usage, needed)
        return StorageReport(
            backend=config.snapshot.backend,
            encrypted=config.snapshot.encryption_key_file is not None,
            snapshots=len(layers.repository.all()),
            staging=staging,
            repository=await self._repository(),
            cache=await self._cache(),
        )

    async def _repository(self) -> TierUsage | TierUnavailable:
        repository = self._host.layers.repository
        try:
            return await repository.usage()
        except StoreUnavailable as error:
            return TierUnavailable(repository.location, str(error))

    async def collect(self, grace_s: float | None) -> GcReport:
        """See `StorageService.collect`."""
        layers = self._host.layers
        files, freed_bytes = await self._node.collect_staging()
        # First, so that what only these conversions named goes in the same sweep.
        forgotten = await self._images.tidy()
        report = await layers.repository.sweep(layers.grace_s if grace_s is None else grace_s)
        return dataclasses.replace(
            report,
            removed_files=report.removed_files + files,
            freed_bytes=report.freed_bytes + freed_bytes,
            forgotten_layers=forgotten,
        )

    async def verify(self, report: Report) -> VerifyReport:
        """See `StorageService.verify`."""
        async with self._one_at_a_time():
            return await self._host.layers.repository.verify(report)

    async def repair(self, report: Report) -> VerifyReport:
        """See `StorageService.repair`."""
        async with self._one_at_a_time():
            return await self._host.layers.repository.repair(report)

    def _one_at_a_time(self) -> asyncio.Lock:
        if self._checking.locked():
            raise Conflict("a verify or a repair runs already")
        return self._checking

    async def _cache(self) -> TierUsage:
        config, state = self._config, await self._host.block.cache()
        counters = {
            "hits": state.hits,
            "misses": state.misses,
            "bytes_from_store": state.bytes_from_store,
            "bytes_from_cache": state.bytes_from_cache,
            "stalls": state.stalls,
            "stall_ms": state.stall_us // 1000,
            "verify_failures": state.verify_failures,
            "evicted_bytes": state.evicted_bytes,
        }
        return TierUsage(
            location=str(config.cache_dir),
            size_bytes=state.size_bytes,
            files=state.blobs_total,
            size_bytes_max=state.size_bytes_max,
            counters=counters,
        )
