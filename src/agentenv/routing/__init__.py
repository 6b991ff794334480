"""What the proxy is told, and how: pure translations of a node's answers, and the client of its control socket."""

from agentenv.routing.answer import encode_answer, parse_question
from agentenv.routing.control import ProxyControl, ProxyHealth

__all__ = ["ProxyControl", "ProxyHealth", "encode_answer", "parse_question"]
