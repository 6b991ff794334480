"""`python -m agentenv.cli` is `aenv`."""

from agentenv.cli import main

main()
