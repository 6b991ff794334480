"""`aenv doctor`: whether this host can run sandboxes, what is missing, and which accelerator is used and why."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

import click

from agentenv.cli.output import print_json, print_table, wants_json
from agentenv.cli.progress import waiting
from agentenv.cli.settings import AenvCommand, settings_of
from agentenv.config import Config, load
from agentenv.server.doctor import Finding, host_findings, virtualization_finding


@click.command(cls=AenvCommand)
@click.option(
    "--config",
    "path",
    metavar="PATH",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The server's configuration (default: /etc/aenv/config.toml if it is there).",
)
@click.option("--no-guest", is_flag=True, help="Do not start a test guest.")
@click.pass_context
def command(ctx: click.Context, path: Path | None, no_guest: bool) -> int:
    """Check whether this host can run sandboxes.

    Starts a tiny guest with each accelerator once, because the existence of /dev/kvm proves nothing. The exit code is
    1 when something is missing.
    """
    config = load(path)
    findings = host_findings(config)
    if not no_guest and all(finding.verdict != "missing" for finding in findings):
        findings.append(asyncio.run(_try_guest(config)))
    _show(ctx, findings)
    return int(any(finding.verdict == "missing" for finding in findings))


async def _try_guest(config: Config) -> Finding:
    async with waiting("starting a test guest"):
        return await virtualization_finding(config)


def _show(ctx: click.Context, findings: list[Finding]) -> None:
    if wants_json(settings_of(ctx)):
        print_json([asdict(finding) for finding in findings])
        return
    print_table(("CHECK", "VERDICT", "DETAIL"), [(f.name, f.verdict, f.detail) for f in findings], fixed=2)
