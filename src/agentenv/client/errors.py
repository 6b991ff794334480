"""The errors of the client library: one tree, told apart by class and never by text.

An answer of the server becomes a class by its HTTP status (`from_answer`), an error of the guest daemon by its Connect
code (`from_connect`), and a failure of the connection by the type of httpx's exception (in `transport`).
"""

from __future__ import annotations

from typing import Final

from agentenv.errors import AenvError


class ClientError(AenvError):
    """Base of every error that the client library raises on purpose; `str()` is one sentence for the user."""


class ConfigurationError(ClientError):
    """A URL, a key or the credentials file cannot be used; the message says which and why."""


# The server or the guest daemon answered an error


class ApiError(ClientError):
    """The server or the guest daemon answered an error that no subclass describes.

    `code` is the number of the error body (or the HTTP status), None for errors of a Connect stream.
    `error_code` is the machine-readable word that some errors carry besides.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int | None = None,
        error_code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.error_code = error_code
        self.retry_after_s = retry_after_s


class BadRequest(ApiError):
    """The request is malformed or asks for something outside the documented range (400, 422)."""


class Unauthorized(ApiError):
    """The access token of a sandbox is missing or unknown, or it has no such user (401 of the guest daemon)."""


class KeyRejected(Unauthorized):
    """The API key is missing or unknown (401 of the control plane)."""


class PermissionDenied(ApiError):
    """The key is known but may not do this, or the guest's user may not (403)."""


class NotFound(ApiError):
    """The named sandbox, snapshot, template, file or process does not exist (404)."""


class Conflict(ApiError):
    """The thing exists but its state forbids the request (409)."""


class AlreadyExists(Conflict):
    """The file or directory to be made is there already."""


class RateLimited(ApiError):
    """Too many requests, or the sandbox's resources are exhausted (429)."""


class Unavailable(ApiError):
    """The server cannot do it now and a later try may work (503)."""


class StorageFull(ApiError):
    """The disk, of the node or of the sandbox, has no room (507)."""


class SandboxUnreachable(ApiError):
    """The proxy cannot reach the sandbox: it is gone, paused, or nothing listens on the port (502)."""


class ServerError(ApiError):
    """The server failed in a way that it did not foresee (500)."""


class DeadlineExceeded(ApiError):
    """The guest daemon ended the command because its timeout ran out."""


class Canceled(ApiError):
    """The guest daemon gave the call up before it was done."""


class CommandTimedOut(DeadlineExceeded):
    """`Sandbox.run` met its timeout; the output up to then is in `stdout` and `stderr`."""

    def __init__(self, message: str, *, stdout: bytes, stderr: bytes) -> None:
        super().__init__(message)
        self.stdout = stdout
        self.stderr = stderr


# No answer, or none that can be understood


class TransportError(ClientError):
    """The exchange with the server failed below HTTP."""


class ConnectionFailed(TransportError):
    """No connection could be made; nothing was sent."""


class ConnectionLost(TransportError):
    """The connection broke; whether the request took effect is not known."""


class RequestTimeout(TransportError):
    """The server did not take or answer the request within a named limit."""


class ProtocolError(ClientError):
    """The answer is not what the API documents; probably something else answers at this URL."""


class TransferIncomplete(ClientError):
    """A file arrived with another size than it was sent with."""


BY_STATUS: Final[dict[int, type[ApiError]]] = {
    400: BadRequest,
    401: Unauthorized,
    403: PermissionDenied,
    404: NotFound,
    409: Conflict,
    422: BadRequest,
    429: RateLimited,
    500: ServerError,
    502: SandboxUnreachable,
    503: Unavailable,
    504: Unavailable,
    507: StorageFull,
}

# The sixteen codes of the Connect protocol.
BY_CONNECT_CODE: Final[dict[str, type[ApiError]]] = {
    "canceled": Canceled,
    "unknown": ServerError,
    "invalid_argument": BadRequest,
    "deadline_exceeded": DeadlineExceeded,
    "not_found": NotFound,
    "already_exists": AlreadyExists,
    "permission_denied": PermissionDenied,
    "resource_exhausted": RateLimited,
    "failed_precondition": Conflict,
    "aborted": Conflict,
    "out_of_range": BadRequest,
    "unimplemented": BadRequest,
    "internal": ServerError,
    "unavailable": Unavailable,
    "data_loss": ServerError,
    "unauthenticated": Unauthorized,
}


def from_answer(status: int, message: str, error_code: str | None, retry_after_s: float | None = None) -> ApiError:
    """The error for an HTTP answer. An unlisted status becomes the plain `ApiError`."""
    kind = BY_STATUS.get(status, ApiError)
    return kind(message, code=status, error_code=error_code, retry_after_s=retry_after_s)


def from_connect(code: str, message: str, status: int | None = None) -> ApiError:
    """The error for a Connect code; an unlisted code becomes the plain `ApiError` with the code in `error_code`."""
    kind = BY_CONNECT_CODE.get(code, ApiError)
    return kind(message, code=status, error_code=code)
