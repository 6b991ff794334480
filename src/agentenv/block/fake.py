"""A blockd without FUSE, for tests of everything above it: exports are links to plain files in a folder.

It keeps the contract of `BlockClient` (tests/conformance/block runs on both) by a shorter way: each of its "layers"
holds the whole image rather than what changed, so a stack reads as its top. What it cannot do: refuse writes to memory
images, answer punches, read a process (a capture yields the parent's content and `dirty_bytes` of pretended work),
cache remote blobs: a descriptor whose source is a file reads as that file, any other is asked of `remote_blob`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agentenv.block import wire
from agentenv.block._sparse import copy_sparse, data_bytes, digest
from agentenv.block.client import BlockClient
from agentenv.errors import AenvError
from agentenv.model import BLOB_DESCRIPTOR_SUFFIX

_SECTOR = 512
_PAGE = 4096


class _Refused(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FakeBlock(BlockClient):
    """`BlockClient` over plain files below `root`. `calls` counts operations by name; `fail_next` plants faults."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "nobody.sock")
        self._mounts = {"memory": root / "memory", "disk": root / "disks"}
        for mount in self._mounts.values():
            mount.mkdir(parents=True, exist_ok=True)
        self._exports: dict[str, wire.ExportInfo] = {}
        self._seals: dict[str, tuple[str | None, wire.SealResult]] = {}
        self._captures: dict[str, wire.CaptureStart] = {}
        self._faults: dict[str, list[AenvError]] = {}
        self._next_inode = 1024
        self._handlers: dict[type[wire.Operation], Callable[[Any], msgspec.Struct]] = {
            wire.HelloRequest: self._hello,
            wire.ExportMemory: self._export_memory,
            wire.ExportDisk: self._export_disk,
            wire.Unexport: self._unexport,
            wire.Abandon: self._abandon,
            wire.ListExports: self._list,
            wire.SealDisk: self._seal_disk,
            wire.SyncPaths: self._sync,
            wire.CaptureStart: self._capture_start,
            wire.CaptureFinish: self._capture_finish,
            wire.CaptureCancel: self._capture_cancel,
            wire.Merge: self._merge,
            wire.ImportRaw: self._import_raw,
            wire.DigestLayer: self._digest,
            wire.Compact: self._compact,
            wire.TraceStart: self._trace_start,
            wire.TraceFinish: self._trace_finish,
            wire.Prefetch: self._prefetch,
            wire.Fill: self._fill,
            wire.ReadCache: self._cache,
            wire.CacheEvict: self._cache_evict,
            wire.ReadStats: self._stats,
            wire.Shutdown: self._shutdown,
        }
        self.calls: Counter[str] = Counter()
        self.dirty_bytes = 1 << 20
        # Replaced where the VMMs are fakes too.
        self.process_exists: Callable[[int], bool] = lambda pid: Path(f"/proc/{pid}").exists()
        self.synced: list[str] = []
        # The plain file behind a descriptor (its JSON) that names an object of a store or registry; None: refused.
        self.remote_blob: Callable[[dict[str, Any]], Path] | None = None
        self.cache_state = wire.CacheState(0, 0, (), 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self.prefetched: list[str] = []
        self.filled: list[str] = []
        self._traces: set[str] = set()

    def fail_next(self, operation: str, error: AenvError) -> None:
        """Make the next call of an operation (its protocol name) raise; several are raised one after the other."""
        self._faults.setdefault(operation, []).append(error)

    async def _call(self, operation: wire.Operation) -> wire.Answer:
        name = wire.name_of(operation)
        self.calls[name] += 1
        if self._faults.get(name):
            raise self._faults[name].pop(0)
        try:
            answer = self._handlers[type(operation)](operation)
        except _Refused as refused:
            return wire.Answer(0, error=wire.Refusal(refused.kind, str(refused)))
        return wire.Answer(0, ok=msgspec.Raw(msgspec.json.encode(answer)))

    def _hello(self, _: wire.HelloRequest) -> wire.Hello:
        return wire.Hello(1, os.getpid(), os.getpid(), str(self._mounts["memory"]), str(self._mounts["disk"]))

    def _export_memory(self, asked: wire.ExportMemory) -> wire.Exported:
        _check_size(asked.size_bytes, _PAGE)
        return self._export(wire.ExportInfo(asked.name, "memory", 0, asked.size_bytes, asked.layers, None, False))

    def _export_disk(self, asked: wire.ExportDisk) -> wire.Exported:
        _check_size(asked.size_bytes, _SECTOR)
        return self._export(wire.ExportInfo(asked.name, "disk", 0, asked.size_bytes, asked.layers, asked.upper, False))

    def _export(self, asked: wire.ExportInfo) -> wire.Exported:
        _check_name(asked.name)
        path = self._mounts[asked.kind] / asked.name
        there = self._exports.get(asked.name)
        if there is not None:
            if msgspec.structs.replace(there, inode=0) != asked:
                raise _Refused("exists", f"export {asked.name!r} is there with other fields")
            return wire.Exported(str(path), there.inode)
        for layer in asked.layers:
            if not Path(layer).is_file():
                raise _Refused("not_found", f"{layer} is not there")
        self._check_upper_is_free(asked.name, asked.upper)
        if asked.upper is None:
            copy_sparse(self._top(asked.layers), path, asked.size_bytes)
        else:
            upper = Path(asked.upper)
            if not upper.exists():
                copy_sparse(self._top(asked.layers), upper, asked.size_bytes)
            _point(path, upper)
        inode, self._next_inode = self._next_inode, self._next_inode + 1
        self._exports[asked.name] = msgspec.structs.replace(asked, inode=inode)
        return wire.Exported(str(path), inode)

    def _unexport(self, asked: wire.Unexport) -> wire.Done:
        export = self._find(asked.name)
        (self._mounts[export.kind] / export.name).unlink(missing_ok=True)
        del self._exports[asked.name]
        self._seals.pop(asked.name, None)
        return wire.Done()

    def _abandon(self, asked: wire.Abandon) -> wire.Abandoned:
        self._exports[asked.name] = msgspec.structs.replace(self._find(asked.name), abandoned=True)
        return wire.Abandoned(0)

    def _list(self, _: wire.ListExports) -> wire.ExportList:
        return wire.ExportList(tuple(sorted(self._exports.values(), key=lambda export: export.inode)))

    def _seal_disk(self, asked: wire.SealDisk) -> wire.SealResult:
        export = self._find(asked.name)
        if export.kind != "disk":
            raise _Refused("invalid", f"export {asked.name!r} is not a disk")
        last = self._seals.get(asked.name)
        if last is not None and last[0] == asked.new_upper == export.upper:
            return last[1]
        if export.upper is None:
            raise _Refused("invalid", f"export {asked.name!r} has no upper to seal")
        if asked.new_upper is not None and Path(asked.new_upper).exists():
            raise _Refused("exists", f"{asked.new_upper} is there already")
        self._check_upper_is_free(asked.name, asked.new_upper)
        if asked.new_upper is not None:
            copy_sparse(export.upper, Path(asked.new_upper), export.size_bytes)
            _point(self._mounts["disk"] / export.name, Path(asked.new_upper))
        result = wire.SealResult(export.upper, data_bytes(Path(export.upper)), 1, 1)
        layers = (*export.layers, export.upper)
        self._exports[asked.name] = msgspec.structs.replace(export, layers=layers, upper=asked.new_upper)
        self._seals[asked.name] = (asked.new_upper, result)
        return result

    def _sync(self, asked: wire.SyncPaths) -> wire.Done:
        for path in asked.paths:
            if not Path(path).exists():
                raise _Refused("not_found", f"cannot sync {path}: it is not there")
        self.synced.extend(asked.paths)
        return wire.Done()

    def _capture_start(self, asked: wire.CaptureStart) -> wire.CaptureStarted:
        if self._find(asked.parent).kind != "memory":
            raise _Refused("invalid", f"{asked.parent!r} is not a memory image")
        if asked.job in self._captures:
            raise _Refused("exists", f"a capture is named {asked.job!r} already")
        if Path(asked.layer).exists():
            raise _Refused("exists", f"{asked.layer} is there already")
        if not self.process_exists(asked.pid):
            raise _Refused("not_found", f"process {asked.pid} is gone")
        self._captures[asked.job] = asked
        return wire.CaptureStarted(self.dirty_bytes, 1, 1, asked.base is not None)

    def _capture_finish(self, asked: wire.CaptureFinish) -> wire.CaptureFinished:
        job = self._captures.pop(asked.job, None)
        if job is None:
            raise _Refused("not_found", f"no capture is named {asked.job!r}")
        parent = self._find(job.parent)
        copy_sparse(str(self._mounts["memory"] / parent.name), Path(job.layer), parent.size_bytes)
        return wire.CaptureFinished(job.layer, self.dirty_bytes, 0, 0, 1)

    def _capture_cancel(self, asked: wire.CaptureCancel) -> wire.Done:
        if self._captures.pop(asked.job, None) is None:
            raise _Refused("not_found", f"no capture is named {asked.job!r}")
        return wire.Done()

    def _merge(self, asked: wire.Merge) -> wire.MergeResult:
        if not asked.layers:
            raise _Refused("invalid", "no layer was given")
        _copy_layer(self._content(asked.layers[-1]), asked.into)
        return wire.MergeResult(asked.into, data_bytes(Path(asked.into)))

    def _import_raw(self, asked: wire.ImportRaw) -> wire.ImportResult:
        _copy_layer(asked.source, asked.into)
        into = Path(asked.into)
        return wire.ImportResult(asked.into, data_bytes(into), into.stat().st_size)

    def _digest(self, asked: wire.DigestLayer) -> wire.DigestResult:
        path = Path(self._content(asked.path))
        if not path.is_file():
            raise _Refused("not_found", f"{path} is not there")
        text, has_holes = digest(path)
        return wire.DigestResult(text, path.stat().st_size, data_bytes(path), has_holes)

    def _compact(self, asked: wire.Compact) -> wire.CompactResult:
        """The copy has its holes still: it keeps the digest, which is what callers rely on."""
        _copy_layer(self._content(asked.layer), asked.into)
        return wire.CompactResult(asked.into, data_bytes(Path(asked.into)))

    def _trace_start(self, asked: wire.TraceStart) -> wire.Done:
        _check_name(asked.trace)
        self._traces.add(asked.trace)
        return wire.Done()

    def _trace_finish(self, asked: wire.TraceFinish) -> wire.TraceFinished:
        if asked.trace not in self._traces:
            raise _Refused("not_found", f"no trace is named {asked.trace!r}")
        self._traces.remove(asked.trace)
        Path(asked.into).write_bytes(b'{"aenv_trace":1,"blobs":[],"runs":[]}')
        return wire.TraceFinished(0)

    def _prefetch(self, asked: wire.Prefetch) -> wire.PrefetchStarted:
        if not Path(asked.path).is_file():
            raise _Refused("not_found", f"{asked.path} is not there")
        self.prefetched.append(asked.path)
        return wire.PrefetchStarted(f"prefetch-{len(self.prefetched)}")

    def _fill(self, asked: wire.Fill) -> wire.Done:
        self.filled.extend(asked.paths)
        return wire.Done()

    def _cache(self, _: wire.ReadCache) -> wire.CacheState:
        return self.cache_state

    def _cache_evict(self, asked: wire.CacheEvict) -> wire.CacheEvicted:
        if (asked.bytes is None) == (asked.digest is None):
            raise _Refused("invalid", "give either bytes or a digest")
        return wire.CacheEvicted(0)

    def _stats(self, _: wire.ReadStats) -> wire.Stats:
        return wire.Stats(dict(self.calls), 0, len(self._exports), len(self._captures), 1)

    def _shutdown(self, _: wire.Shutdown) -> wire.Done:
        return wire.Done()

    def _top(self, layers: tuple[str, ...]) -> str | None:
        return self._content(layers[-1]) if layers else None

    def _content(self, layer: str) -> str:
        """The plain file of a layer: itself, or what its descriptor stands for."""
        if not layer.endswith(BLOB_DESCRIPTOR_SUFFIX) or not Path(layer).is_file():
            return layer
        descriptor = msgspec.json.decode(Path(layer).read_bytes(), type=dict[str, Any])
        if descriptor["source"]["kind"] == "file":
            return str(descriptor["source"]["path"])
        if self.remote_blob is None:
            raise _Refused("unsupported", f"{layer}: this blockd was given no stores")
        return str(self.remote_blob(descriptor))

    def _find(self, name: str) -> wire.ExportInfo:
        export = self._exports.get(name)
        if export is None:
            raise _Refused("not_found", f"no export is named {name!r}")
        return export

    def _check_upper_is_free(self, name: str, upper: str | None) -> None:
        for other in self._exports.values():
            if upper is not None and other.name != name and other.upper == upper:
                raise _Refused("invalid", f"upper {upper} belongs to export {other.name!r}")


def _check_name(name: str) -> None:
    allowed = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if not 0 < len(name) <= 128 or not allowed or name[0] in ".-":
        raise _Refused("invalid", f"not a name: {name!r}")


def _check_size(size_bytes: int, unit: int) -> None:
    if size_bytes <= 0 or size_bytes % unit:
        raise _Refused("invalid", f"size {size_bytes} is not a multiple of {unit}")


def _point(link: Path, target: Path) -> None:
    """Make or replace a link in one step."""
    fresh = link.with_name(f".{link.name}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)


def _copy_layer(source: str, into: str) -> None:
    if not Path(source).is_file():
        raise _Refused("not_found", f"{source} is not there")
    if Path(into).exists():
        raise _Refused("exists", f"{into} is there already")
    copy_sparse(source, Path(into), Path(source).stat().st_size)
