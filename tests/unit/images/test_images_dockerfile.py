"""The base of a Dockerfile's target."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import AenvError, InvalidRequest
from agentenv.images.dockerfile import dockerfile_base

LIBRARY = "docker.io/library/"


def base(text: str, target: str | None = None, **build_args: str) -> str:
    return str(dockerfile_base(text, build_args, target).reference)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM debian", "debian:latest"),
        ("from debian:12", "debian:12"),
        ("FROM\tdebian:12\t as  x", "debian:12"),
        ("\ufeffFROM debian:12", "debian:12"),
        ("FROM debian:12\r\nRUN x\r\n", "debian:12"),
        ("# syntax=docker/dockerfile:1\n\n# hello\nFROM debian:12", "debian:12"),
        ("ARG V=12\nFROM debian:$V", "debian:12"),
        ("ARG V=12\nFROM debian:${V}-slim", "debian:12-slim"),
        ('ARG V="12"\nFROM debian:${V}', "debian:12"),
        ("ARG A=1 B=2\nFROM debian:${A}${B}", "debian:12"),
        ("ARG A=1\nARG B=${A}2\nFROM debian:$B", "debian:12"),
        ("FROM debian:${V:-12}", "debian:12"),
        ("FROM debian:${V-12}", "debian:12"),
        ("ARG V=\nFROM debian:${V:-12}", "debian:12"),
        ("ARG V=1\nFROM debian:12${V:+-slim}", "debian:12-slim"),
        ("FROM debian:12${V:+-slim}", "debian:12"),
        ("ARG D=12\nFROM debian:${V:-${D}}", "debian:12"),
        ("FROM ${IMAGE:-debian}:12", "debian:12"),
        ("FROM --platform=$TARGETPLATFORM debian:12", "debian:12"),
        ("FROM debian:\\\n12", "debian:12"),
        ("FROM \\\n# a comment\n\n  debian:12", "debian:12"),
        ("# escape=`\nFROM `\n debian:12", "debian:12"),
        ("FROM a AS b\nFROM debian:12", "debian:12"),
        ("FROM debian:12 AS b\nFROM B", "debian:12"),
        ("FROM debian:12 AS b\nFROM b AS c\nRUN x\nFROM c", "debian:12"),
        ("FROM x AS debian\nFROM y\nFROM debian", "x:latest"),
        ("FROM debian:12\nRUN <<EOF\nFROM x\nEOF\n", "debian:12"),
        ("FROM debian:12\nRUN <<-'EOF' cat\n\tFROM x\n\tEOF\nRUN y", "debian:12"),
        ("FROM debian:12\nCOPY <<a <<b /\nFROM x\na\nFROM y\nb\n", "debian:12"),
        ('FROM debian:12\nRUN echo "<<EOF"\nRUN x', "debian:12"),
        ("FROM debian:12\nRUN cat <<<word\nRUN x", "debian:12"),
        ("FROM debian:12\nARG V=13\nRUN x", "debian:12"),
    ],
)
def test_the_last_stage_begins_from(text: str, expected: str) -> None:
    assert base(text) == LIBRARY + expected


def test_build_args_replace_declared_values_only() -> None:
    text = "ARG V=11\nFROM debian:${V}${W}"
    assert base(text, V="12", W="x") == LIBRARY + "debian:12"


def test_args_of_a_stage_are_not_seen_by_a_later_from() -> None:
    with pytest.raises(InvalidRequest, match=r"line 3.*not a tag"):
        base("FROM a\nARG V=12\nFROM debian:$V")


def test_a_target_is_a_name_or_a_number() -> None:
    text = "FROM debian:12 AS build\nFROM alpine AS Run\nFROM build AS test"
    assert base(text, "build") == base(text, "0") == base(text, "TEST") == LIBRARY + "debian:12"
    assert base(text, "run") == LIBRARY + "alpine:latest"
    with pytest.raises(InvalidRequest, match="build, run, test"):
        base(text, "nobody")


def test_scratch_is_no_reference() -> None:
    found = dockerfile_base("ARG X=1\nFROM scratch")
    assert (found.reference, found.line) == (None, 2)


def test_the_platform_is_kept() -> None:
    found = dockerfile_base("FROM --platform=linux/arm64 debian AS a\nFROM a")
    assert str(found.platform) == "linux/arm64"
    assert found.line == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no FROM"),
        ("# only\n", "no FROM"),
        ("RUN x\nFROM y", "line 1: RUN before"),
        ("\nFROM", "line 2: FROM takes"),
        ("FROM a b", "line 1: FROM takes"),
        ("FROM a AS", "line 1: FROM takes"),
        ("FROM a AS 1x", "stage's name"),
        ("FROM --chmod=1 a", "--chmod"),
        ("FROM $V", "line 1: the image '\\$V' is empty"),
        ("ARG 1=2\nFROM a", "line 1: ARG"),
        ("FROM ${V", "without }"),
        ("FROM ${:-x}", "no name"),
        ("FROM ${V#x}", "not a form"),
        ("FROM ${V:?give it}", "line 1: V: give it"),
        ("FROM a$", "without a name"),
        ("\n\nFROM Debian", "line 3: .*lower case"),
        ("FROM oci:/etc", "image of a registry"),
        ("FROM --platform=amd64 a", "line 1: 'amd64' is not a platform"),
        ('FROM "a', "not closed"),
        ("FROM a\nRUN <<EOF\nx", "line 2: the here-document 'EOF'"),
        ("# escape=x\nFROM a", "escape"),
        ("FROM " + "${a:-" * 20 + "}" * 20, "inside each other"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        dockerfile_base(text)


@settings(deadline=None)
@given(st.text(alphabet="FROMARG as$\\{}:-+?'\"<\n#=`abE1", max_size=80))
def test_any_text_gives_a_base_or_a_refusal(text: str) -> None:
    try:
        dockerfile_base(text)
    except AenvError:
        return
