"""References as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import InvalidRequest, Unsupported
from agentenv.images.reference import LocalReference, RegistryReference, Transport, parse_reference

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:12", "docker.io/library/debian:12"),
        ("docker.io/debian:12", "docker.io/library/debian:12"),
        ("index.docker.io/library/debian:12", "docker.io/library/debian:12"),
        ("registry-1.docker.io/a/b", "docker.io/a/b:latest"),
        ("user/app:v1.2_x-3", "docker.io/user/app:v1.2_x-3"),
        (f"debian@{DIGEST}", f"docker.io/library/debian@{DIGEST}"),
        (f"debian:12@{DIGEST}", f"docker.io/library/debian:12@{DIGEST}"),
        ("localhost/x", "localhost/x:latest"),
        ("localhost:5000/a/b/c:t", "localhost:5000/a/b/c:t"),
        ("127.0.0.1:5000/x", "127.0.0.1:5000/x:latest"),
        ("[::1]:5000/x:y", "[::1]:5000/x:y"),
        ("GHCR.io/owner/name", "ghcr.io/owner/name:latest"),
        ("my-host.example:443/a__b/c--d.e_f", "my-host.example:443/a__b/c--d.e_f:latest"),
        ("docker://debian:12", "docker.io/library/debian:12"),
    ],
)
def test_names_have_one_canonical_form(text: str, canonical: str) -> None:
    reference = parse_reference(text)
    assert isinstance(reference, RegistryReference)
    assert str(reference) == canonical
    assert parse_reference(canonical) == reference


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oci:/a/b", LocalReference(Transport.OCI, "/a/b")),
        ("oci:/a/b:12", LocalReference(Transport.OCI, "/a/b", "12")),
        (f"oci:/a/b@{DIGEST}", LocalReference(Transport.OCI, "/a/b", None, DIGEST)),
        ("oci-archive:/a/b.tar:x", LocalReference(Transport.OCI_ARCHIVE, "/a/b.tar", "x")),
        ("docker-archive:/x.tar", LocalReference(Transport.DOCKER_ARCHIVE, "/x.tar")),
        (
            "docker-archive:/x.tar:debian:12",
            LocalReference(Transport.DOCKER_ARCHIVE, "/x.tar", "docker.io/library/debian:12"),
        ),
    ],
)
def test_images_on_disk_are_named_by_transport_and_path(text: str, expected: LocalReference) -> None:
    assert parse_reference(text) == expected
    assert parse_reference(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("a b", "spaces"),
        ("x" * 2000, "too long"),
        ("https://ghcr.io/x", "leave https:// out"),
        ("Debian", "lower case"),
        ("Host/x", "lower case"),
        ("ghcr.io/Owner/x", "lower case"),
        ("debian:", "is not a tag"),
        ("debian:-x", "is not a tag"),
        ("debian:" + "t" * 129, "is not a tag"),
        ("debian@sha256:12", "64 hexadecimal"),
        ("debian@", "64 hexadecimal"),
        ("ghcr.io/", "missing"),
        ("ghcr.io/a//b", "not part of a repository"),
        ("ghcr.io/../x", "not part of a repository"),
        ("a_/b", "not part of a repository"),
        ("0123456789abcdef" * 4, "image id"),
        ("-host.io/x", "host name"),
        ("host.io:port/x", "host name"),
        ("a/" * 130 + "a", "255"),
        ("oci:./rel", "absolute"),
        ("oci:/x:a/b", "not a tag"),
        ("oci:/x@sha256:1", "64 hexadecimal"),
        (f"docker-archive:/x@{DIGEST}", "no digests"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_reference(text)


def test_a_digest_of_another_algorithm_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="sha512"):
        parse_reference("debian@sha512:" + "0" * 128)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_parsed_to_a_fixed_point_or_refused(text: str) -> None:
    try:
        reference = parse_reference(text)
    except InvalidRequest:
        return
    assert parse_reference(str(reference)) == reference
