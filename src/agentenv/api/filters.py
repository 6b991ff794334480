"""The filters of GET /sandboxes and GET /v2/sandboxes: parsing and matching. Pure."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, unquote_plus

from starlette.datastructures import QueryParams

from agentenv.api.paging import micros
from agentenv.errors import InvalidRequest
from agentenv.model import SandboxState, SandboxView

PUBLIC_STATES: Final = ("running", "paused")
# Not shown: the client has no id of the first yet, and the second is gone for everybody but its owner task.
_HIDDEN: Final = frozenset({SandboxState.CREATING, SandboxState.KILLING})
_QUERY_PAIRS_MAX: Final = 64


def public_state(view: SandboxView) -> str | None:
    """`running` or `paused`, as E2B knows only these; None for a sandbox that is not shown at all.

    A capture of a paused sandbox leaves it paused; one of a running sandbox leaves it running.
    """
    if view.state in _HIDDEN:
        return None
    if view.state in (SandboxState.PAUSING, SandboxState.PAUSED):
        return "paused"
    captured_asleep = view.pause_safety is not None and view.state is not SandboxState.RESUMING
    return "paused" if captured_asleep else "running"


@dataclass(frozen=True, slots=True)
class SandboxFilter:
    """All conditions must hold. `templates` are the ids and names that the asked template goes by, None for any."""

    states: frozenset[str] = frozenset(PUBLIC_STATES)
    metadata: dict[str, str] = field(default_factory=dict)
    started_after_us: int | None = None
    templates: frozenset[str] | None = None

    def matches_ignoring_state(self, view: SandboxView) -> bool:
        """Whether everything but the state fits; X-Total-Running counts by this."""
        if self.started_after_us is not None and micros(view.started_at) < self.started_after_us:
            return False
        if self.templates is not None and self.templates.isdisjoint({view.template_id, view.alias}):
            return False
        return all(view.spec.metadata.get(key) == value for key, value in self.metadata.items())

    def matches(self, view: SandboxView) -> bool:
        """Whether the sandbox belongs in the list."""
        return public_state(view) in self.states and self.matches_ignoring_state(view)


def parse_metadata(raw: str | None) -> dict[str, str]:
    """The `metadata` query parameter, once decoded already by the HTTP layer.

    SDKs quote keys and values, urlencode the pairs and then encode the whole as one parameter: after the HTTP
    layer's decoding two more are due, the first of urlencode's kind (plus is a space), the second of quote's.
    """
    if not raw:
        return {}
    pairs = raw.split("&")
    if len(pairs) > _QUERY_PAIRS_MAX:
        raise InvalidRequest(f"metadata: more than {_QUERY_PAIRS_MAX} pairs")
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidRequest("metadata: must be key=value pairs joined by &")
        found[unquote(unquote_plus(key))] = unquote(unquote_plus(value))
    return found


def parse_states(values: list[str]) -> frozenset[str]:
    """`state`, as one comma-separated string or repeated. Empty means all."""
    words = {word.strip() for value in values for word in value.split(",")} - {""}
    if unknown := words - set(PUBLIC_STATES):
        raise InvalidRequest(f"state: {min(unknown)[:32]!a} is not one of {', '.join(PUBLIC_STATES)}")
    return frozenset(words or PUBLIC_STATES)


def parse_started_after(raw: str | None) -> int | None:
    """`startedAfter`, inclusive, in microseconds; a time without zone is UTC."""
    if not raw:
        return None
    try:
        # A client that forgot to escape the plus of "+02:00" sent a space.
        moment = datetime.datetime.fromisoformat(raw.replace(" ", "+") if "T" in raw else raw)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return (moment - _EPOCH) // datetime.timedelta(microseconds=1)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest("startedAfter: not an RFC 3339 date and time") from error


def parse_filter(query: QueryParams) -> SandboxFilter:
    """Everything but `template`, which only the node can resolve."""
    return SandboxFilter(
        states=parse_states(query.getlist("state")),
        metadata=parse_metadata(query.get("metadata")),
        started_after_us=parse_started_after(query.get("startedAfter")),
    )


_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
