"""A conversion over a repository whose blobs are elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.oci import build_image, write_layout

from agentenv.images.convert import ConvertedLayer, Converter
from agentenv.images.fake import FakeConvertedLayers, FakeLayerMaker
from agentenv.images.layout import LayoutSource
from agentenv.images.reference import LocalReference, Transport
from agentenv.images.repository_layers import RepositoryLayers


@dataclass(frozen=True)
class Blob:
    digest: str


@dataclass(frozen=True)
class Converted:
    blob: Blob
    parent: str | None


class Records:
    """As the repository has them, over the fake's folder."""

    def __init__(self, inner: FakeConvertedLayers) -> None:
        self.inner = inner

    async def get(self, chain_key: str) -> Converted | None:
        found = await self.inner.get(chain_key)
        return None if found is None else Converted(Blob(found.layer_id), found.parent_id)

    async def put(self, chain_key: str, layer: Path, parent: str | None) -> Converted:
        made = await self.inner.put(chain_key, layer, parent)
        return Converted(Blob(made.layer_id), made.parent_id)


async def test_a_parent_in_a_store_is_fetched_once_and_removed_afterwards(tmp_path: Path) -> None:
    stored = FakeConvertedLayers(tmp_path / "store")
    fetched: list[str] = []

    async def compact(descriptor: Path, into: Path) -> None:
        fetched.append(descriptor.stem)
        into.write_bytes((stored.folder / descriptor.stem).read_bytes())

    layers = RepositoryLayers(Records(stored), lambda layer_id: tmp_path / f"{layer_id}.blob", compact)
    maker = FakeLayerMaker()
    converter = Converter(layers, maker, tmp_path / "staging")

    async def convert(count: int) -> tuple[str, ...]:
        folder = tmp_path / f"layout{count}"
        write_layout(build_image([{f"f{number}": b"x"} for number in range(count)]), folder)
        source = LayoutSource(LocalReference(Transport.OCI, str(folder)))
        return (await converter.convert(source, 64, lambda _: None)).disk.layers

    below = await convert(1)
    # What a conversion made itself is a parent as it lies there.
    assert fetched == []
    above = await convert(3)
    assert above[0] == below[0]
    assert fetched == [below[0]]
    assert [len(task.parents) for task in maker.tasks] == [0, 1, 2]
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_plain_file_is_used_in_place(tmp_path: Path) -> None:
    async def never(descriptor: Path, into: Path) -> None:
        raise AssertionError("nothing is to be copied")

    stored = FakeConvertedLayers(tmp_path / "store")
    layers = RepositoryLayers(Records(stored), lambda layer_id: tmp_path / f"{layer_id}.lsmt", never)
    assert await layers.local_file("a" * 64, tmp_path) == tmp_path / f"{'a' * 64}.lsmt"
    assert await layers.get("k") is None
    (tmp_path / "l").write_bytes(b"x")
    made = await layers.put("k", tmp_path / "l", "p")
    assert made == await layers.get("k") == ConvertedLayer(made.layer_id, "p")
