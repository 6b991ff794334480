"""`aenv storage`: what the node stores, its garbage, and whether it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from agentenv.cli.output import note, print_json, print_table, wants_json
from agentenv.cli.session import run, run_with_steps
from agentenv.cli.settings import AenvCommand, Settings, global_options, settings_of
from agentenv.cli.text import binary_size, duration, printable

if TYPE_CHECKING:
    from agentenv.client import StorageReport, TierUsage, VerifyReport


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show, clean and verify what the node stores.

    It is stored in three tiers: staging (work in progress), repository (committed, the only truth) and cache (copies
    of remote blocks). Without a command: show.
    """
    if ctx.invoked_subcommand is None:
        _show(settings_of(ctx))


# A group is no AenvCommand; `aenv storage --json` should mean what it says all the same.
command.params += global_options(hidden=True)


@command.command("show", cls=AenvCommand)
@click.pass_context
def show(ctx: click.Context) -> None:
    """Show the three tiers.

    SHARED is needed by more than one snapshot, image or sandbox; GARBAGE by none, and goes with gc.
    """
    _show(settings_of(ctx))


def _show(settings: Settings) -> None:
    report = run(settings, lambda client: client.storage.show(), waiting_for="measuring")
    if wants_json(settings):
        print_json(report.raw)
        return
    columns = ("TIER", "SIZE", "LIMIT", "FREE", "FILES", "SHARED", "GARBAGE", "LOCATION")
    print_table(columns, [_row(tier) for tier in report.tiers])
    click.echo(_summary(report))
    for tier in report.tiers:
        if tier.unavailable is not None:
            click.echo(printable(f"the {tier.name} is unavailable: {tier.unavailable}"))


def _row(tier: TierUsage) -> tuple[str, ...]:
    return (
        tier.name,
        _size(tier.size_bytes),
        _size(tier.size_bytes_max),
        _size(tier.free_bytes),
        "-" if tier.files is None else str(tier.files),
        _size(tier.shared_bytes),
        _size(tier.garbage_bytes),
        tier.location,
    )


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else binary_size(size_bytes)


def _summary(report: StorageReport) -> str:
    words = [f"{report.snapshots} snapshots in {printable(report.backend)}"]
    words.append("encrypted at rest" if report.encrypted else "not encrypted at rest")
    counters = report.tiers[-1].counters
    reads = counters.get("hits", 0) + counters.get("misses", 0)
    if reads:
        words.append(f"{100 * counters.get('hits', 0) / reads:.0f} % of reads of remote blocks met the cache")
    return "\n" + ", ".join(words)


@command.command("gc", cls=AenvCommand)
@click.option(
    "--grace",
    "grace_s",
    metavar="SECONDS",
    type=click.FloatRange(0, 30 * 86_400),
    default=None,
    help="Leave what is younger (default: the server's own grace).",
)
@click.pass_context
def gc(ctx: click.Context, grace_s: float | None) -> None:
    """Remove what nothing needs.

    From staging and repository, on all nodes that share it. The grace protects what another node is just about to
    commit; a short one is for a repository that no other node writes to.
    """
    settings = settings_of(ctx)
    report = run(settings, lambda client: client.storage.collect(grace_s=grace_s), waiting_for="collecting garbage")
    if wants_json(settings):
        print_json(report.raw)
        return
    click.echo(f"removed {report.removed_files} files, {binary_size(report.freed_bytes)}")
    if report.forgotten_layers:
        click.echo(f"forgot {report.forgotten_layers} converted layers whose image was never finished")
    if report.young_files:
        click.echo(
            f"left {report.young_files} files, {binary_size(report.young_bytes)}, "
            f"that are younger than {duration(report.grace_s)}"
        )


@command.command("verify", cls=AenvCommand)
@click.pass_context
def verify(ctx: click.Context) -> int:
    """Read everything and name what is damaged.

    Compares every stored block with its digest, and names the templates, snapshots, images and sandboxes that need
    what is damaged. Changes nothing. The exit code is 1 when something is damaged.
    """
    settings = settings_of(ctx)
    return _report(settings, run_with_steps(settings, lambda client, show: client.storage.verify(progress=show)))


@command.command("repair", cls=AenvCommand)
@click.pass_context
def repair(ctx: click.Context) -> int:
    """Verify, and make whole what can be.

    Damaged blocks of the cache are dropped and fetched again. A damaged layer of the repository is made again where a
    whole copy of it, or the image that it came from, can be reached. The exit code is 1 when something stays damaged.
    """
    settings = settings_of(ctx)
    return _report(settings, run_with_steps(settings, lambda client, show: client.storage.repair(progress=show)))


def _report(settings: Settings, report: VerifyReport) -> int:
    if wants_json(settings):
        print_json(report.raw)
        return 0 if report.is_whole else 1
    for damage in report.damages:
        state = "repaired: " if damage.repaired else ""
        click.echo(printable(f"{damage.tier} {damage.item}: {state}{damage.detail}"))
        for name in damage.dependents:
            click.echo(printable(f"    needed by {name}"))
    note(f"read {report.checked_files} files, {binary_size(report.checked_bytes)}")
    if not report.damages:
        click.echo("nothing is damaged")
    return 0 if report.is_whole else 1
