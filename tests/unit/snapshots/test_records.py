"""Records and manifests: exact bytes, both versions, and whatever else may lie there."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.snapshots.repository_world import described
from tests.unit.snapshots.test_catalog import MANIFEST

from agentenv.model import Blob, SnapshotManifest
from agentenv.snapshots import encode_manifest, records
from agentenv.snapshots.codec import CorruptManifest, NewerManifest

LAYER = Blob("a" * 64, 10, "a" * 64, 10, blocks_digest="c" * 64)
STATE = Blob("b" * 64, 5, "b" * 64, 5)
SNAPSHOT = replace(described("s1", [LAYER], STATE), node_id="node-a", build_id="x")

RECORD = b"""{
 "version": 2,
 "snapshot_id": "s1",
 "kind": "snapshot",
 "node_id": "node-a",
 "created_at": 1.0,
 "names": [
  "s1:default"
 ],
 "build_id": "x",
 "manifest": "%s"
}"""


def test_the_bytes_of_a_record_and_its_manifest_are_these() -> None:
    record, manifest, digest = records.encode(SNAPSHOT)
    assert record == RECORD.replace(b"%s", digest.encode())
    assert hashlib.sha256(manifest).hexdigest() == digest
    body = msgspec.json.decode(manifest)
    assert body["version"] == 2
    assert body["snapshot"]["blobs"]["a" * 64] == {
        "digest": "a" * 64,
        "size_bytes": 10,
        "plain_digest": "a" * 64,
        "plain_size_bytes": 10,
        "blocks_digest": "c" * 64,
        "encryption": None,
        "compression": None,
        "origin": None,
    }
    # One form only: the name depends on it.
    assert digest == "502080afeabb3bd59c1e937e09cebdc4416580280288e5303d746fa423ebf023"


def test_what_was_encoded_is_decoded() -> None:
    record, manifest, _ = records.encode(SNAPSHOT)
    read = records.decode_record(record, "r")
    assert isinstance(read, records.Record)
    assert records.decode_snapshot(read, manifest, "m") == SNAPSHOT


def test_equal_descriptions_are_one_manifest() -> None:
    other = replace(SNAPSHOT, snapshot_id="s2", names=(), created_at=2.0)
    assert records.encode(other)[2] == records.encode(SNAPSHOT)[2]


def test_version_one_is_the_whole_snapshot() -> None:
    assert records.decode_record(encode_manifest(MANIFEST), "r") == MANIFEST


def test_a_newer_version_is_not_called_damaged() -> None:
    with pytest.raises(NewerManifest):
        records.decode_record(b'{"version":3}', "r")


def test_a_field_of_a_newer_server_is_refused() -> None:
    record, manifest, _ = records.encode(SNAPSHOT)
    more = manifest.replace(b'"snapshot":{', b'"snapshot":{"newer":1,')
    read = records.decode_record(record, "r")
    assert isinstance(read, records.Record)
    named = msgspec.structs.replace(read, manifest=hashlib.sha256(more).hexdigest())
    with pytest.raises(CorruptManifest, match="newer"):
        records.decode_snapshot(named, more, "m")


FIELDS = st.sampled_from(["version", "snapshot", "names", "x"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner),
)


@given(st.binary(max_size=64) | ANYTHING.map(msgspec.json.encode) | st.just(b"[" * 100_000))
def test_anything_else_is_corrupt_and_names_its_origin(raw: bytes) -> None:
    for decode in (
        lambda: records.decode_record(raw, "origin"),
        lambda: records.decode_snapshot(record_of(raw), raw, "origin"),
    ):
        try:
            decode()
        except CorruptManifest as error:
            assert str(error).startswith("origin: ")
        else:
            raise AssertionError(f"{raw!r} was read")


def record_of(manifest: bytes) -> records.Record:
    """A record that names these bytes."""
    read = records.decode_record(records.encode(SNAPSHOT)[0], "r")
    assert not isinstance(read, SnapshotManifest)
    return msgspec.structs.replace(read, manifest=hashlib.sha256(manifest).hexdigest())
