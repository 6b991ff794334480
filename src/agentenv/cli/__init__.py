"""The `aenv` command. Imports only click at start; each subcommand is loaded when it is invoked."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from agentenv.cli.app import root

    root()


__all__ = ["main"]
