"""The diagram of the lifecycle, generated from the table so that it cannot drift from it."""

from __future__ import annotations

from agentenv.lifecycle.phases import Phase, Verdict
from agentenv.lifecycle.table import TABLE


def mermaid() -> str:
    """A Mermaid state diagram of all accepted transitions that change the phase. Kill is left out: it is everywhere."""
    edges: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, event), row in TABLE.items():
        if row.verdict is Verdict.ACCEPT and row.phase is not phase and row.phase is not Phase.KILLING:
            edges.setdefault((phase, row.phase), []).append(event.value)
    order = list(Phase)
    lines = ["stateDiagram-v2", *(f"    [*] --> {phase.value}" for phase in (Phase.WARMING, Phase.CREATING))]
    for (source, target), events in sorted(edges.items(), key=lambda e: (order.index(e[0][0]), order.index(e[0][1]))):
        lines.append(f"    {source.value} --> {target.value}: {', '.join(sorted(events))}")
    lines.append(f"    {Phase.GONE.value} --> [*]")
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid())
