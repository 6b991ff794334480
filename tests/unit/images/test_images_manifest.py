"""Manifests, indexes and configurations: what is taken, what is refused and by which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import ImageError, Unsupported
from agentenv.images import media
from agentenv.images.config import parse_config
from agentenv.images.manifest import (
    LAYERS_MAX,
    Descriptor,
    Index,
    Manifest,
    Platform,
    check_runnable,
    choose,
    parse_manifest,
    parse_platform,
)

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def layer(media_type: str = media.OCI_LAYER, **more: Any) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": A, "size": 1, **more}


def manifest(*layers: dict[str, Any], config_type: str = media.OCI_CONFIG, **more: Any) -> bytes:
    config = {"mediaType": config_type, "digest": B, "size": 2}
    return json.dumps({"schemaVersion": 2, "config": config, "layers": list(layers), **more}).encode()


def parsed(raw: bytes, content_type: str = media.OCI_MANIFEST) -> Manifest:
    found = parse_manifest(raw, content_type, "it")
    assert isinstance(found, Manifest)
    return found


def index(*platforms: Platform | None) -> Index:
    entries = (Descriptor(media.OCI_MANIFEST, f"sha256:{n:064x}", 1, platform=p) for n, p in enumerate(platforms))
    return Index(A, media.OCI_INDEX, tuple(entries))


@pytest.mark.parametrize("media_type", media.LAYERS)
def test_all_ordinary_layers_are_taken(media_type: str) -> None:
    found = parsed(manifest(layer(media_type)))
    check_runnable(found, "it")
    assert found.layers[0].digest == A


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (manifest(layer("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip")), f"{A} is foreign"),
        (manifest(layer("application/vnd.oci.image.layer.nondistributable.v1.tar+zstd")), f"{A} is foreign"),
        (manifest(layer(urls=["https://x"])), f"{A} is foreign"),
        (manifest(layer(media.OCI_LAYER + "+encrypted")), "unknown type 'application/vnd.oci.image.layer.v1.tar"),
        (manifest(layer("x/y")), "unknown type 'x/y'"),
        (manifest(layer(), config_type="application/vnd.cncf.helm.config.v1+json"), "artifact of type .*helm"),
        (manifest(layer(), config_type="application/vnd.oci.empty.v1+json", artifactType="a/sbom"), "a/sbom"),
        (manifest(*[layer()] * (LAYERS_MAX + 1)), f"at most {LAYERS_MAX}"),
        (manifest(layer(size=1 << 50)), "256 GiB"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(raw: bytes, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        check_runnable(parsed(raw), "it")


@pytest.mark.parametrize(
    ("raw", "content_type"),
    [
        (b'{"schemaVersion": 1, "fsLayers": []}', ""),
        (b"{}", "application/vnd.docker.distribution.manifest.v1+prettyjws"),
        (b'{"mediaType": "application/vnd.docker.distribution.manifest.v1+json"}', media.OCI_MANIFEST),
    ],
)
def test_schema_1_is_refused_by_name(raw: bytes, content_type: str) -> None:
    with pytest.raises(Unsupported, match="schema 1"):
        parse_manifest(raw, content_type, "it")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"manifests": [], "layers": []}', "both an index and a manifest"),
        (b'{"manifests": 5}', "not a list"),
        (manifest({"digest": "sha256:1", "size": 1}), "no sha256 digest"),
        (manifest({"digest": "sha512:" + "a" * 128, "size": 1}), "no sha256 digest"),
        (manifest({"digest": A}), "no size"),
        (manifest({"digest": A, "size": -1}), "no size"),
        (manifest({"digest": A, "size": True}), "no size"),
        (b'{"config": 5}', "not an object"),
        (manifest(annotations=[1]), "annotations"),
        (b" " * (5 << 20), "limit"),
    ],
)
def test_malformed_manifests_are_refused(raw: bytes, says: str) -> None:
    with pytest.raises(ImageError, match=f"it: .*{says}"):
        parse_manifest(raw, media.OCI_MANIFEST if b"manifests" not in raw else media.OCI_INDEX, "it")


def test_what_is_neither_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="neither"):
        parse_manifest(b"{}", "text/html", "it")


@pytest.mark.parametrize(
    ("platforms", "wanted", "chosen"),
    [
        ([Platform("linux", "arm64"), Platform("linux", "amd64")], "linux/amd64", 1),
        ([Platform("linux", "amd64", "v3"), Platform("linux", "amd64")], "linux/amd64", 1),
        ([Platform("linux", "amd64", "v1")], "linux/amd64", 0),
        ([Platform("linux", "amd64"), Platform("linux", "amd64", "v3")], "linux/amd64/v3", 1),
        ([Platform("linux", "arm64", "v8")], "linux/arm64", 0),
        ([Platform("linux", "arm", "v6"), Platform("linux", "arm", "v7")], "linux/arm", 1),
        ([Platform("unknown", "unknown"), Platform("linux", "amd64")], "linux/x86_64", 1),
        ([None], "linux/amd64", 0),
    ],
)
def test_the_platform_s_image_is_chosen(platforms: list[Platform | None], wanted: str, chosen: int) -> None:
    assert choose(index(*platforms), parse_platform(wanted), "it").digest == f"sha256:{chosen:064x}"


def test_a_missing_platform_is_told_with_what_there_is() -> None:
    there = [Platform("windows", "amd64"), Platform("linux", "arm", "v7"), Platform("unknown", "unknown")]
    with pytest.raises(Unsupported, match=r"no image for linux/amd64; there is linux/arm/v7, windows/amd64$"):
        choose(index(*there), Platform(), "it")
    with pytest.raises(Unsupported, match="there is nothing"):
        choose(index(), Platform(), "it")


@pytest.mark.parametrize("text", ["", "linux", "linux/", "a/b/c/d"])
def test_platforms_have_two_or_three_parts(text: str) -> None:
    with pytest.raises(ImageError, match="os/architecture"):
        parse_platform(text)


def test_null_counts_as_absent_in_a_configuration() -> None:
    body = {"os": "linux", "config": {"Env": None, "Cmd": "sh -c x", "Labels": {"a": 1}}, "rootfs": None}
    found = parse_config(json.dumps(body).encode(), "it")
    assert (found.env, found.cmd, found.labels, found.diff_ids) == ((), ("sh -c x",), {"a": "1"}, ())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"config": []}, "config is not an object"),
        ({"config": {"Env": [1]}}, "config: Env"),
        ({"config": {"User": 5}}, "config: User"),
        ({"rootfs": {"diff_ids": ["md5:1"]}}, "rootfs.diff_ids"),
        ([], "not a JSON object"),
    ],
)
def test_malformed_configurations_name_the_field(body: Any, says: str) -> None:
    with pytest.raises(ImageError, match=says):
        parse_config(json.dumps(body).encode(), "it")


FIELD = st.sampled_from(
    ["config", "layers", "manifests", "digest", "size", "mediaType", "annotations", "platform", "rootfs", "Env", "urls"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELD, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(FIELD, JSON, max_size=5))
def test_any_json_is_parsed_or_refused(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    for parse in (lambda: parse_manifest(raw, media.OCI_MANIFEST, "it"), lambda: parse_config(raw, "it")):
        try:
            parse()
        except (ImageError, Unsupported):
            continue
