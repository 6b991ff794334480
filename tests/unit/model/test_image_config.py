"""What a sandbox takes from its image's configuration."""

from __future__ import annotations

from agentenv.model import DEFAULT_USER, image_environment, image_user, image_workdir


def test_an_empty_document_stands_for_a_disk_of_no_image() -> None:
    for document in ({}, {"config": None}, {"config": {"User": "", "Env": None, "WorkingDir": None}}):
        assert (image_user(document), image_workdir(document), image_environment(document)) == (DEFAULT_USER, "", {})


def test_user_directory_and_environment_are_the_images() -> None:
    config = {"User": "app:staff", "WorkingDir": "/srv", "Env": ["PATH=/bin", "A=b=c", "EMPTY=", "NOVALUE", "=x"]}
    document = {"config": config}
    assert (image_user(document), image_workdir(document)) == ("app", "/srv")
    assert image_environment(document) == {"PATH": "/bin", "A": "b=c", "EMPTY": ""}


def test_a_number_stands_for_a_user() -> None:
    assert image_user({"config": {"User": "65532:65532"}}) == "65532"
