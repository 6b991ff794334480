"""The chain of credentials: configuration, environment, shared files of a profile, and then the client's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.snapshots.stores.credentials import Credentials, find_credentials

GIVEN = Credentials("config-id", "config-secret")
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "env-id", "AWS_SECRET_ACCESS_KEY": "env-secret"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = file-id\naws_secret_access_key = file%secret\n"
        "[other]\naws_access_key_id=other-id\naws_secret_access_key=other-secret\naws_session_token=other-token\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        "[profile third]\nregion = x\naws_access_key_id = third-id\naws_secret_access_key = third-secret\n"
        "[profile sso]\nsso_start_url = https://x\n"
    )
    return tmp_path


def test_the_first_of_the_chain_wins(home: Path) -> None:
    assert find_credentials(GIVEN, ENVIRONMENT, home) is GIVEN
    found = find_credentials(None, ENVIRONMENT, home)
    assert found == Credentials("env-id", "env-secret", None, "environment")
    found = find_credentials(None, {"AWS_ACCESS_KEY_ID": "alone"}, home)
    assert found == Credentials("file-id", "file%secret", None, "profile default")
    found = find_credentials(None, {"AWS_PROFILE": "other"}, home)
    assert found == Credentials("other-id", "other-secret", "other-token", "profile other")
    found = find_credentials(None, {"AWS_PROFILE": "third"}, home)
    assert found == Credentials("third-id", "third-secret", None, "profile third")


def test_what_expires_is_left_to_the_client(home: Path, tmp_path: Path) -> None:
    assert find_credentials(None, {"AWS_PROFILE": "sso"}, home) is None
    assert find_credentials(None, {}, tmp_path / "nobody") is None


def test_a_profile_that_is_nowhere_is_named(home: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        find_credentials(None, {"AWS_PROFILE": "absent"}, home)


def test_a_malformed_file_is_named_and_not_shown(home: Path) -> None:
    (home / "elsewhere").write_text("aws_secret_access_key = without a section\n")
    with pytest.raises(ConfigError, match="elsewhere") as caught:
        find_credentials(None, {"AWS_SHARED_CREDENTIALS_FILE": str(home / "elsewhere")}, home)
    assert "without a section" not in str(caught.value)


def test_secrets_are_not_shown() -> None:
    assert "secret" not in repr(Credentials("id", "a-secret", "a-secret-token"))
