"""`aenv template ls`, `build` and `rm`."""

from __future__ import annotations

from agentenv.cli.lazy import LazyGroup, Slot

command = LazyGroup(
    {
        "ls": Slot("agentenv.cli.template_ls", "List templates."),
        "build": Slot("agentenv.cli.template_build", "Build a template on the node."),
        "rm": Slot("agentenv.cli.template_rm", "Delete templates."),
    },
    name="template",
    help="List, build and delete templates.",
)
