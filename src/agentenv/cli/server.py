"""`aenv server`: run a node in the foreground, or remove what one left."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import click

from agentenv.config import Config, load
from agentenv.errors import HostUnsuitable
from agentenv.server.clean import clean as clean_state
from agentenv.server.serve import serve

_config_option = click.option(
    "--config",
    "config_path",
    metavar="PATH",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration file (default: /etc/aenv/config.toml if it is there).",
)
_state_option = click.option("--state", metavar="DIR", help="State directory; instead of server.state_dir.")


@click.group(invoke_without_command=True)
@_config_option
@_state_option
@click.option("--listen", metavar="ADDRESS:PORT", help="Where to listen; instead of server.listen.")
@click.option("--ensure-base", is_flag=True, help="Build the template `base` first if there is none.")
@click.option("--verbose", is_flag=True, help="Log more.")
@click.pass_context
def command(
    ctx: click.Context,
    config_path: Path | None,
    state: str | None,
    listen: str | None,
    ensure_base: bool,
    verbose: bool,
) -> None:
    """Run one node in the foreground.

    When it answers requests it prints one line of JSON on standard output: api_url, sandbox_url, api_key and
    accelerator. Logs go to standard error. SIGINT or SIGTERM stops the server; sandboxes go on.
    """
    if ctx.invoked_subcommand is not None:
        return
    _require_root()
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = _load(config_path, state, listen)
    _run(serve(config, ensure_template=ensure_base, ready=sys.stdout))


@command.command("clean")
@_config_option
@_state_option
def clean_command(config_path: Path | None, state: str | None) -> None:
    """Remove everything of a state directory: VMs, daemons, mounts, namespaces and files."""
    _require_root()
    asyncio.run(clean_state(_load(config_path, state, None)))


def _load(config_path: Path | None, state: str | None, listen: str | None) -> Config:
    """Options are the strongest source: they override file and environment."""
    environ = dict(os.environ)
    if state is not None:
        environ["AENV_SERVER_STATE_DIR"] = os.path.abspath(state)
    if listen is not None:
        environ["AENV_SERVER_LISTEN"] = listen
    return load(config_path, environ)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise HostUnsuitable("the server must run as root: it makes namespaces, mounts and tap devices (use sudo)")


def _run(job: object) -> None:
    """uvloop where it is installed; the server's own loop otherwise."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(job)  # type: ignore[arg-type]
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(job)  # type: ignore[arg-type]
