"""The commands that only talk to the control plane, through click's runner against the fake server."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from tests.unit.cli.fake_server import API_KEY

from agentenv import __version__


def test_create_sends_what_was_asked_for(server, cli):
    result = cli(
        "create", "tpl", "--timeout", "60", "--no-auto-pause", "--auto-resume", "-m", "a=b=c", "-m", "n=line\nbreak é",
        "-e", "K=", "--no-internet",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["templateID"] == "tpl"
    assert server.bodies("POST", "/v2/sandboxes") == [
        {
            "templateID": "tpl",
            "secure": True,
            "timeout": 60,
            "autoPause": False,
            "autoResume": {"enabled": True},
            "metadata": {"a": "b=c", "n": "line\nbreak é"},
            "envVars": {"K": ""},
            "allow_internet_access": False,
        }
    ]


def test_create_by_default_leaves_everything_to_the_server(server, cli):
    result = cli("create", "-q")
    assert result.stdout == "i00000000000000000001\n"
    assert server.bodies("POST", "/v2/sandboxes") == [{"templateID": "base", "secure": True}]
    headers = server.state.requests[0][2]
    assert re.fullmatch(r"[a-z0-9-]{1,255}", headers["idempotency-key"])


def test_ls_reads_all_pages_and_filters(server, cli):
    ids = [server.state.add() for _ in range(5)] + [server.state.add(state="paused")]
    server.state.page_items = 2
    assert [item["sandboxID"] for item in json.loads(cli("ls").stdout)] == ids
    assert cli("ls", "-q", "--state", "paused").stdout == f"{ids[-1]}\n"


def test_ls_encodes_the_metadata_filter_twice(server, cli):
    cli("ls", "-m", "a&b=x y=é")
    assert "metadata=a%252526b%3Dx%252520y%25253D%2525C3%2525A9" in server.state.requests[0][1]


def test_ls_on_a_terminal_is_a_table_without_control_characters(server, on_terminal):
    box = server.state.add(metadata={"k": "\x1b]0;evil\x07[red]\nnext"})
    code, text = on_terminal("ls")
    assert code == 0
    header, _rule, row = text.rstrip("\n").split("\n")
    assert header.split() == ["ID", "STATE", "TEMPLATE", "CPU", "MEMORY", "AGE", "EXPIRES", "IN", "METADATA"]
    assert row.split()[:5] == [box, "running", "base", "2", "1"]
    assert r"k=\x1b]0;evil\x07[red]\nnext" in row


def test_json_on_a_terminal(server, on_terminal):
    box = server.state.add()
    code, text = on_terminal("ls", "--json")
    assert (code, json.loads(text)[0]["sandboxID"]) == (0, box)


def test_info_on_a_terminal_shows_no_token(server, on_terminal):
    box = server.state.add(metadata={"k": "v"})
    code, text = on_terminal("info", box)
    assert (code, box in text, "token-" in text, "metadata k" in text) == (0, True, False, True)


def test_info_tells_how_safe_a_pause_is(server, cli, on_terminal):
    running, paused = server.state.add(), server.state.add(state="paused")
    server.state.pause_safety[paused] = "held"
    assert [json.loads(cli("info", box).stdout)["pauseSafety"] for box in (running, paused)] == [None, "held"]
    assert "not yet safe from a power loss" in on_terminal("info", paused)[1]
    assert "\npause" not in on_terminal("info", running)[1]


def test_info_of_an_ended_sandbox_says_why_and_is_3(server, cli, on_terminal):
    stone = {"sandboxID": "igone", "endedAt": "2026-01-01T00:00:00Z", "reason": "vmm_died", "detail": "signal\x1b 9"}
    server.state.tombstones["igone"] = stone
    result = cli("info", "igone")
    assert (result.exit_code, json.loads(result.stdout), result.stderr) == (3, {"state": "ended", **stone}, "")
    code, text = on_terminal("info", "igone")
    assert code == 3
    assert [line.split(maxsplit=1)[1].rstrip() for line in text.split("\n")[2:7]] == [
        "igone", "ended", "2026-01-01T00:00:00Z", "vmm_died", r"signal\x1b 9",
    ]  # fmt: skip


def test_info_unknown_is_3(cli):
    result = cli("info", "inone")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", "aenv: sandbox inone not found: deleted\n")


def test_pause_resume_kill_many(server, cli):
    first, second = server.state.add(), server.state.add()
    assert cli("pause", first, second).exit_code == 0
    assert {box["state"] for box in server.state.sandboxes.values()} == {"paused"}
    assert cli("resume", first, "--timeout", "9").exit_code == 0
    assert server.bodies("POST", f"/v2/sandboxes/{first}/connect") == [{"timeout": 9}]
    result = cli("kill", first, "inone", second)
    assert (result.exit_code, result.stderr) == (3, "aenv: sandbox inone not found: deleted\n")
    assert server.state.sandboxes == {}


def test_pause_of_a_paused_one_is_an_error_and_resume_of_a_running_one_is_not(server, cli):
    paused, running = server.state.add(state="paused"), server.state.add()
    assert cli("pause", paused).exit_code == 1
    assert cli("resume", running).exit_code == 0


def test_fork_reports_children_that_failed(server, cli):
    box = server.state.add()
    result = cli("fork", box, "--count", "4", "--timeout", "5")
    assert result.exit_code == 1
    children = json.loads(result.stdout)
    assert ["sandbox" in child for child in children] == [True, True, True, False]
    assert children[3]["error"] == {"code": 429, "message": "no room"}
    assert result.stderr == "aenv: no room\n"
    assert server.bodies("POST", f"/sandboxes/{box}/fork") == [{"count": 4, "timeout": 5}]
    assert len(cli("fork", box, "-n", "2", "-q").stdout.splitlines()) == 2


def test_snapshot_create_ls_rm(server, cli):
    box = server.state.add()
    assert json.loads(cli("snapshot", "create", box, "--name", "n").stdout)["snapshotID"] == "team/n:default"
    assert cli("snapshot", "ls", "-q", "--sandbox", box).stdout == "team/n:default\n"
    assert f"sandboxID={box}" in server.state.requests[-1][1]
    assert cli("snapshot", "rm", "team/n:default").exit_code == 0
    assert server.state.requests[-1][1] == "/templates/team%2Fn%3Adefault"
    assert cli("snapshot", "rm", "gone").exit_code == 3


def test_timeout_may_be_zero_but_not_negative(server, cli):
    box = server.state.add()
    assert cli("timeout", box, "0").exit_code == 0
    assert server.bodies("POST", f"/sandboxes/{box}/timeout") == [{"timeout": 0}]
    assert cli("timeout", "--", box, "-1").exit_code == 2


def test_template_ls_and_node(server, cli):
    server.state.templates = [{"templateID": "t", "names": ["base"], "buildStatus": "ready"}]
    assert json.loads(cli("template", "ls").stdout)[0]["templateID"] == "t"
    assert json.loads(cli("node").stdout)["driver"] == "qemu"


def test_version(cli):
    assert cli("version").stdout == f"aenv {__version__}\n"
    assert json.loads(cli("version", "--json").stdout) == {"version": __version__}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["nope"], "No such command 'nope'"),
        (["ls", "--nope"], "No such option"),
        (["create", "-m", "novalue"], "'novalue' is not of the form KEY=VALUE"),
        (["create", "-e", "NOT_IN_ENVIRONMENT_X"], "is not in the environment"),
        (["info", "a/b"], "'a/b' is not a sandbox id"),
        (["kill"], "Missing argument"),
        (["fork", "i1", "--count", "0"], "--count"),
    ],
)
def test_wrong_usage_is_2_with_one_line(cli, args, text):
    result = cli(*args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("aenv: ")
    assert text in result.stderr


def test_wrong_key_is_4_and_names_aenv_auth(cli):
    result = cli("ls", env={"AENV_API_KEY": "e2b_00"})
    assert result.exit_code == 4
    assert result.stderr.startswith("aenv: invalid API key; `aenv auth` stores an API key")


def test_global_options_work_before_and_after_the_command(server, cli):
    assert cli("--api-key", "wrong", "ls").exit_code == 4
    assert cli("ls", "--api-key", "wrong").exit_code == 4
    assert cli("--api-url", server.url, "ls", "--json", "--api-key", API_KEY).exit_code == 0


def test_unreachable_server_is_one_line(cli):
    result = cli("ls", "--api-url", "http://127.0.0.1:1")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "cannot connect to the server at http://127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (404, b"<html>nginx</html>", 1),
        (200, b"<html>hello</html>", 1),
        (200, b'{"not": "a list"}', 1),
        (500, b'{"code": 500, "message": "line\\nbreak \\u001b[31m"}', 1),
        (403, b"", 4),
    ],
)
def test_strange_answers_are_one_clean_line(server, cli, status, body, code):
    server.state.scripted = [(status, {}, body)]
    result = cli("ls")
    assert (result.exit_code, result.stderr.count("\n")) == (code, 1)
    assert result.stderr.rstrip("\n").isprintable()


def test_debug_shows_the_traceback(cli):
    assert "Traceback" not in cli("info", "inone").stderr
    result = cli("info", "inone", "--debug")
    assert "Traceback" in result.stderr


def test_reader_that_went_away_is_quiet(server, environ, tmp_path):
    for _ in range(2000):
        server.state.add()
    process = subprocess.Popen(
        [sys.executable, "-m", "agentenv.cli", "ls"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_completion_scripts(cli):
    for shell in ("bash", "zsh", "fish"):
        result = cli("completion", shell)
        assert (result.exit_code, "_AENV_COMPLETE" in result.stdout) == (0, True)


def test_ids_are_completed_from_the_server(server, environ):
    box = server.state.add()
    done = subprocess.run(
        [sys.executable, "-m", "agentenv.cli"],
        env={**environ, "_AENV_COMPLETE": "bash_complete", "COMP_WORDS": "aenv info i", "COMP_CWORD": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"plain,{box}\n"


def test_completion_without_server_is_silent(server, environ):
    done = subprocess.run(
        [sys.executable, "-m", "agentenv.cli"],
        env={
            **environ,
            "AENV_API_URL": "http://127.0.0.1:1",
            "_AENV_COMPLETE": "bash_complete",
            "COMP_WORDS": "aenv info i",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_config_show_names_values_and_sources(cli, tmp_path):
    (tmp_path / "c.toml").write_text('[server]\nlisten = "127.0.0.1:9999"\n')
    result = cli("config", "show", "--config", str(tmp_path / "c.toml"))
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["server.listen"]["value"] == "127.0.0.1:9999"
    (tmp_path / "c.toml").write_text("[server]\nnope = 1\n")
    result = cli("config", "show", "--config", str(tmp_path / "c.toml"))
    assert (result.exit_code, "server.nope" in result.stderr) == (1, True)


def test_auth_stores_what_works_and_shows_no_key(server, cli, tmp_path):
    clean = {"AENV_API_URL": "", "AENV_API_KEY": ""}
    result = cli("auth", "--api-url", server.url, input=f"{API_KEY}\n", env=clean)
    assert result.exit_code == 0, result.output
    path = tmp_path / ".config" / "aenv" / "credentials.toml"
    assert path.stat().st_mode & 0o777 == 0o600
    assert cli("ls", env=clean).exit_code == 0
    shown = cli("auth", "--show", env=clean)
    assert json.loads(shown.stdout)["api_url"] == {"value": server.url, "source": str(path)}
    assert API_KEY not in shown.output
    assert cli("auth", "--forget", env=clean).exit_code == 0
    assert not path.exists()


def test_auth_with_a_wrong_key_stores_nothing(server, cli, tmp_path):
    result = cli("auth", "--api-key", "wrong")
    assert (result.exit_code, (tmp_path / ".config").exists()) == (4, False)
