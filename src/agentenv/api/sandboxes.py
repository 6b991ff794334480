"""Handlers of /sandboxes: E2B's control plane of one sandbox and of the list.

Each checks and converts its input, asks the node, and converts the answer; nothing else happens here. Errors are
raised, never answered (see `errors`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Final

from starlette.responses import Response

from agentenv.api import render, wire
from agentenv.api.call import Call, NoBody, json_response, no_content
from agentenv.api.create import expiry_action, lifetime_s, refuse_without_memory, spec_v1, spec_v2
from agentenv.api.errors import error_body
from agentenv.api.filters import SandboxFilter, parse_filter, parse_metadata, public_state
from agentenv.api.names import sandbox_id, snapshot_name, without_tag
from agentenv.api.paging import SortKey, micros, parse_page, take
from agentenv.api.settings import TIMEOUT_S_V1
from agentenv.errors import AenvError, InvalidRequest, TemplateNotFound, Unsupported
from agentenv.model import ExpiryAction, SandboxSpec, SandboxView
from agentenv.node.interface import NodeInterface

FROZEN_HEADER: Final = "X-Aenv-Frozen-Ms"


async def create_v2(call: Call[wire.NewSandbox]) -> Response:
    """POST /v2/sandboxes."""
    return await _create(call, spec_v2(call.body, call.settings), "v2")


async def create_v1(call: Call[wire.NewSandboxV1]) -> Response:
    """POST /sandboxes."""
    return await _create(call, spec_v1(call.body, call.settings), "v1")


async def connect(call: Call[wire.ConnectRequest]) -> Response:
    """POST connect, both versions: 201 when it resumed the sandbox, 200 when it ran."""
    refuse_without_memory(call.body.memory)
    timeout_s = lifetime_s(call.body.timeout, call.settings.timeout_s_default, call.settings)
    view, resumed = await call.node.connect(_id(call), timeout_s)
    return json_response(201 if resumed else 200, render.sandbox(view, call.settings))


async def list_v2(call: Call[NoBody]) -> Response:
    """GET /v2/sandboxes: filtered, ordered, in pages."""
    page = parse_page(call.query.get("limit"), call.query.get("order"), call.query.get("nextToken"))
    wanted = _with_template(parse_filter(call.query), call.query.get("template"), call.node)
    views = call.node.list_sandboxes()
    chosen, token = take([view for view in views if wanted.matches(view)], _sort_key, page)
    running = sum(public_state(view) == "running" and wanted.matches_ignoring_state(view) for view in views)
    headers = {"X-Total-Running": str(running)}
    if token is not None:
        headers["X-Next-Token"] = token
    return json_response(200, [render.listed(view, call.settings) for view in chosen], headers)


async def list_v1(call: Call[NoBody]) -> Response:
    """GET /sandboxes: running ones only, newest first, not paged."""
    wanted = SandboxFilter(states=frozenset({"running"}), metadata=parse_metadata(call.query.get("metadata")))
    views = sorted(filter(wanted.matches, call.node.list_sandboxes()), key=_sort_key, reverse=True)
    return json_response(200, [render.listed(view, call.settings) for view in views])


async def get(call: Call[NoBody]) -> Response:
    """GET /sandboxes/{id}."""
    return json_response(200, render.detail(call.node.get(_id(call)), call.settings))


async def kill(call: Call[NoBody]) -> Response:
    """DELETE /sandboxes/{id}, in any state."""
    await call.node.kill(_id(call))
    return no_content()


async def set_timeout(call: Call[wire.TimeoutRequest]) -> Response:
    """POST timeout: counted from now; may shorten, 0 expires at once."""
    timeout_s = lifetime_s(call.body.timeout, 0, call.settings, zero_means="expire now")
    await call.node.set_timeout(_id(call), timeout_s)
    return no_content()


async def refresh(call: Call[wire.RefreshRequest]) -> Response:
    """POST refreshes: like timeout, but never shortens."""
    identifier, now = _id(call), call.now_s
    duration_s = lifetime_s(
        call.body.duration, TIMEOUT_S_V1, call.settings, field="duration", zero_means="leave the end as it is"
    )
    # Nothing is awaited in between, so the end cannot move meanwhile.
    if now + duration_s > call.node.get(identifier).end_at:
        await call.node.set_timeout(identifier, duration_s)
    return no_content()


async def pause(call: Call[wire.PauseRequest]) -> Response:
    """POST pause: 409 when it is paused already, which the SDKs take as "nothing to do"."""
    refuse_without_memory(call.body.memory)
    if call.body.require_healthy_guest:
        raise Unsupported("requireHealthyGuest: true is not in this version")
    await call.node.pause(_id(call))
    return no_content()


async def resume(call: Call[wire.ResumeRequest]) -> Response:
    """POST resume: 409 when it runs."""
    refuse_without_memory(call.body.memory)
    timeout_s = lifetime_s(call.body.timeout, TIMEOUT_S_V1, call.settings)
    kills = None
    if call.body.auto_pause is not None:
        kills = expiry_action(call.body.auto_pause, call.settings) is ExpiryAction.KILL
    view = await call.node.resume(_id(call), timeout_s, kills)
    return json_response(201, render.sandbox(view, call.settings))


async def fork(call: Call[wire.ForkRequest]) -> Response:
    """POST fork: one entry per requested child, each a sandbox or its own error."""
    identifier = _id(call)
    count = 1 if call.body.count is None else call.body.count
    if not 1 <= count <= call.settings.fork_count_max:
        raise InvalidRequest(f"count: must be a whole number from 1 to {call.settings.fork_count_max}")
    timeout_s = lifetime_s(call.body.timeout, TIMEOUT_S_V1, call.settings)
    result = await call.node.fork(identifier, count, timeout_s)
    entries = [
        wire.ForkEntry(error=error_body(child))
        if isinstance(child, AenvError)
        else wire.ForkEntry(sandbox=render.sandbox(child, call.settings))
        for child in result.children
    ]
    return json_response(201, entries, _frozen(result.frozen_s))


async def snapshot(call: Call[wire.SnapshotRequest]) -> Response:
    """POST snapshots: answers when the snapshot is committed; a second one with the same name takes the name."""
    refuse_without_memory(call.body.memory)
    identifier = _id(call)
    name = snapshot_name(call.body.name) if call.body.name else None
    result = await call.node.snapshot(identifier, name)
    return json_response(201, render.snapshot(result.manifest), _frozen(result.frozen_s))


async def _create(call: Call[wire.NewSandbox] | Call[wire.NewSandboxV1], spec: SandboxSpec, version: str) -> Response:
    async def work() -> Response:
        view = await call.node.create(spec)
        return json_response(201, render.sandbox(view, call.settings))

    keys = call.headers.getlist("idempotency-key")
    if not keys:
        return await work()
    if len(keys) > 1:
        raise InvalidRequest("Idempotency-Key: was sent more than once")
    return await call.context.idempotency.once(keys[0], version, call.raw_body, work)


def _id(call: Call[Any]) -> str:
    return sandbox_id(call.params["sandbox_id"])


def _sort_key(view: SandboxView) -> SortKey:
    return micros(view.started_at), view.sandbox_id


def _frozen(seconds: float) -> dict[str, str]:
    return {FROZEN_HEADER: f"{seconds * 1_000:.3f}"}


def _with_template(wanted: SandboxFilter, reference: str | None, node: NodeInterface) -> SandboxFilter:
    """Add the template filter. An unknown template matches nothing; a deleted one still matches by its id."""
    if not reference:
        return wanted
    names = {reference, without_tag(reference)}
    with contextlib.suppress(TemplateNotFound):
        names.add(node.resolve_template(reference).snapshot_id)
    return dataclasses.replace(wanted, templates=frozenset(names))
