"""AgentENV: microVM environments for agents, behind the E2B API."""

__version__ = "0.1.0"
