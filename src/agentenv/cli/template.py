"""`aenv template ls` and `rm`; `build` is the server's and is loaded from its own module."""

from __future__ import annotations

from agentenv.cli.lazy import LazyGroup, Slot

command = LazyGroup(
    {
        "ls": Slot("agentenv.cli.template_ls", "List templates."),
        "build": Slot("agentenv.cli.template_build", "Build a template on this host.", server=True),
        "rm": Slot("agentenv.cli.template_rm", "Delete templates."),
    },
    name="template",
    help="List, build and delete templates.",
)
