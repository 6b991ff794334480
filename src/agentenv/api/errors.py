"""The one place that decides which HTTP status and body an error becomes.

Domain code raises `AenvError`s and names no status; this table maps classes by their method resolution order, so a
class that is not listed is answered like its nearest listed parent. Every body is `{"code", "message"}` (and
`error_code` where a client acts on it), because the SDKs parse exactly that, for unmatched routes and our own bugs
too. 500 means that something failed here, 503 that the same request works later.

The SDKs repeat 429, 502, 503 and 504 by themselves unless `Should-Retry` forbids it; a repeat that could start a
second sandbox, or that cannot help, is therefore forbidden explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from starlette.responses import Response

from agentenv import errors
from agentenv.api.wire import ErrorBody, encode


class RouteNotFound(errors.NotFound):
    """No route has this path."""


class MethodNotAllowed(errors.InvalidRequest):
    """The path exists, but not with this method."""


class PayloadTooLarge(errors.InvalidRequest):
    """The body is larger than `limits.body_bytes_max`."""


class BodyTooSlow(errors.InvalidRequest):
    """The body did not arrive within `limits.body_read_s_max`."""


class BudgetExceeded(errors.OperationFailed):
    """The request took longer than `limits.request_s_max`; the node finishes or undoes what it began."""


class ClientGone(errors.AenvError):
    """The client closed the connection; nobody reads the answer, it only appears in the log."""


class IdempotencyInProgress(errors.Conflict):
    """The first request with this Idempotency-Key has not been answered yet."""


class IdempotencyMismatch(errors.InvalidRequest):
    """The Idempotency-Key was used before with another body."""


class NotServed(errors.Unsupported):
    """This server was put together without the part that the route needs."""


class InternalError(errors.AenvError):
    """A bug; the message carries only the id under which the log tells more."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How one class of errors is answered. `should_retry` None leaves it to the client's own rule for the status."""

    status: int
    error_code: str | None = None
    should_retry: bool | None = None
    retry_after_s: int | None = None


ANSWERS: Final[Mapping[type[errors.AenvError], Answer]] = MappingProxyType(
    {
        errors.AenvError: Answer(500, "internal_server_error"),
        # The request
        errors.InvalidRequest: Answer(400),
        errors.Unauthorized: Answer(401),
        errors.NotFound: Answer(404),
        MethodNotAllowed: Answer(405),
        BodyTooSlow: Answer(408),
        errors.Conflict: Answer(409),
        PayloadTooLarge: Answer(413),
        IdempotencyMismatch: Answer(422, "idempotency_request_mismatch"),
        # A repeat after a second gets the first request's answer.
        IdempotencyInProgress: Answer(409, "idempotency_in_progress", should_retry=True, retry_after_s=1),
        ClientGone: Answer(499),
        NotServed: Answer(501),
        # The node. Nothing was started, so a repeat is safe; a slot may be free in a second.
        errors.AtCapacity: Answer(429, "sandbox_capacity_unavailable", should_retry=True, retry_after_s=1),
        # A restart of the server takes seconds and no sandbox with it.
        errors.NodeStopping: Answer(503, "node_stopping", should_retry=True, retry_after_s=2),
        # The operation. The message says in which state the sandbox is; a blind repeat would start a second one.
        errors.OperationFailed: Answer(500, "operation_failed", should_retry=False),
        errors.StorageFull: Answer(507, "storage_full", should_retry=False),
        # Nothing was committed. A store that throttles asks for some seconds.
        errors.StoreUnavailable: Answer(503, "store_unavailable", should_retry=True, retry_after_s=2),
        # Another server's fault: the registry that an image was asked of.
        errors.RegistryError: Answer(502, "registry_error", should_retry=True, retry_after_s=5),
        errors.RegistryDenied: Answer(403, "registry_denied", should_retry=False),
        # The store turns the node away, or has lost something: a repeat is answered the same until somebody mends it.
        errors.StoreRefused: Answer(500, "store_refused", should_retry=False),
        errors.RepositoryDamaged: Answer(500, "repository_damaged", should_retry=False),
        errors.RestoreRefused: Answer(409, "sandbox_no_compatible_node", should_retry=False),
        # Not E2B's `sandbox_snapshot_guest_agent_unresponsive`: it tells the SDK to offer a reboot from disk.
        errors.GuestUnresponsive: Answer(504, "guest_unresponsive", should_retry=False),
        BudgetExceeded: Answer(504, "request_budget_exceeded", should_retry=False),
    }
)


def answer_for(error: errors.AenvError) -> Answer:
    """The table's line for the nearest listed class of `error`."""
    for cls in type(error).__mro__:
        if cls in ANSWERS:
            return ANSWERS[cls]
    raise AssertionError("AenvError itself is in the table")


def error_body(error: errors.AenvError) -> ErrorBody:
    """The body of `error`, also used inside the answer of a fork."""
    answer = answer_for(error)
    message = str(error) or type(error).__doc__ or type(error).__name__
    if answer.error_code is None:
        return ErrorBody(code=answer.status, message=message)
    return ErrorBody(code=answer.status, message=message, error_code=answer.error_code)


def error_response(error: errors.AenvError, headers: Mapping[str, str] | None = None) -> Response:
    """The whole HTTP answer for `error`."""
    answer = answer_for(error)
    sent = dict(headers or {})
    if answer.retry_after_s is not None:
        sent["Retry-After"] = str(answer.retry_after_s)
    if answer.should_retry is not None:
        sent["Should-Retry"] = "true" if answer.should_retry else "false"
    return Response(encode(error_body(error)), answer.status, sent, media_type="application/json")
