"""Handlers of /snapshots and /templates: what sandboxes can be created from."""

from __future__ import annotations

from starlette.responses import Response

from agentenv.api import render, wire
from agentenv.api.call import Call, NoBody, json_response, no_content
from agentenv.api.names import sandbox_id, snapshot_name, template_reference, without_tag
from agentenv.api.paging import SortKey, micros, parse_page, take
from agentenv.errors import SandboxNotFound
from agentenv.model import SnapshotManifest


async def list_snapshots(call: Call[NoBody]) -> Response:
    """GET /snapshots: by source sandbox and by name, newest first, in pages."""
    page = parse_page(call.query.get("limit"), None, call.query.get("nextToken"))
    manifests = call.node.list_snapshots()
    if source := call.query.get("sandboxID"):
        manifests = _of_sandbox(manifests, source)
    if name := call.query.get("name"):
        manifests = [manifest for manifest in manifests if _is_called(manifest, name)]
    chosen, token = take(manifests, _sort_key, page)
    headers = {} if token is None else {"X-Next-Token": token}
    return json_response(200, [render.snapshot(manifest) for manifest in chosen], headers)


async def list_templates(call: Call[NoBody]) -> Response:
    """GET /templates, newest first. A node has one team, so `teamID` changes nothing."""
    infos = sorted(call.node.list_templates(), key=lambda info: _sort_key(info.manifest), reverse=True)
    return json_response(200, [render.template(info, call.settings) for info in infos])


async def resolve_alias(call: Call[NoBody]) -> Response:
    """GET /templates/aliases/{alias}: whether a name or id exists; 404 when not."""
    manifest = call.node.resolve_template(template_reference(call.params["alias"], "alias"))
    return json_response(200, wire.TemplateAlias(template_id=manifest.snapshot_id, public=False))


async def delete(call: Call[NoBody]) -> Response:
    """DELETE /templates/{id}, also for snapshots; the id may be a name, `namespace/name:tag`, percent-encoded."""
    await call.node.delete_snapshot(template_reference(call.params["template_id"], "templateID"))
    return no_content()


def _of_sandbox(manifests: list[SnapshotManifest], source: str) -> list[SnapshotManifest]:
    try:
        identifier = sandbox_id(source)
    except SandboxNotFound:
        # No sandbox, so no snapshots: a filter finds nothing rather than failing.
        return []
    return [manifest for manifest in manifests if manifest.source_sandbox_id == identifier]


def _is_called(manifest: SnapshotManifest, name: str) -> bool:
    """A name without a tag matches every tag of it."""
    wanted = snapshot_name(name)
    if ":" in name:
        return wanted in manifest.names
    return without_tag(wanted) in {without_tag(known) for known in manifest.names}


def _sort_key(manifest: SnapshotManifest) -> SortKey:
    return micros(manifest.created_at), manifest.snapshot_id
