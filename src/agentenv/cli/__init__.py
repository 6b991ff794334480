"""The `aenv` command. Imports only click at start; each subcommand is loaded when it is invoked."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the console script."""
    from agentenv.cli.app import root

    # Python sets closed standard streams (`aenv ls >&-`) to None.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    root()


__all__ = ["main"]
