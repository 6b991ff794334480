"""A server for tests of the client and the CLI: the control plane in memory, and a guest daemon that runs real local
processes and keeps files in a scratch directory.

It speaks the wire as spec'd (Connect envelopes, chunked streams, error bodies) and breaks it on demand: a command whose
first word is `fault:...` resets the stream, cuts a frame, omits the end frame, and so on. Programs named in
`missing_programs` do not exist for it.
"""

from tests.unit.cli.fake_server.server import FakeServer
from tests.unit.cli.fake_server.state import API_KEY

__all__ = ["API_KEY", "FakeServer"]
