"""The pure state machine of a sandbox: a table of transitions, and where one sandbox is in it.

Imports `model` and `errors` only. The shell around it (owner tasks, I/O) is `node`.
"""

from agentenv.lifecycle.machine import InvalidTransition, Machine
from agentenv.lifecycle.phases import REQUESTS, Action, Denial, Event, Phase, Verdict
from agentenv.lifecycle.table import POOLED, PUBLIC_STATE, SERVING, TABLE, WITH_VMM, Transition

__all__ = [
    "POOLED",
    "PUBLIC_STATE",
    "REQUESTS",
    "SERVING",
    "TABLE",
    "WITH_VMM",
    "Action",
    "Denial",
    "Event",
    "InvalidTransition",
    "Machine",
    "Phase",
    "Transition",
    "Verdict",
]
