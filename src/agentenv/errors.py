"""The one exception tree of the package.

Foreign errors are translated once, at the place where the foreign library is called, keeping the cause.
Domain code raises these; `api/errors.py` alone decides which HTTP status each becomes. Nothing ever decides on the
text of an error.
"""

from __future__ import annotations


class AenvError(Exception):
    """Base of every error that AgentENV raises on purpose; `str()` is one sentence for the user."""


# What the caller asked for


class InvalidRequest(AenvError):
    """The request is malformed or asks for something outside the documented range."""


class Unsupported(InvalidRequest):
    """The request asks for a feature that this version does not have; it is refused rather than ignored."""


class Unauthorized(AenvError):
    """The API key is missing or unknown."""


class NotFound(AenvError):
    """The named thing does not exist."""


class SandboxNotFound(NotFound):
    """No live sandbox has this id; the message carries the tombstone's reason where there is one."""


class TemplateNotFound(NotFound):
    """No template, snapshot, name or tag resolves to this reference."""


class Conflict(AenvError):
    """The thing exists but its state forbids the request; the message says which state and why."""


class AtCapacity(AenvError):
    """The node cannot start another sandbox now and the bounded queue is full or its deadline passed."""


class NodeStopping(AenvError):
    """The server is shutting down and accepts no new work."""


class ImageNotFound(NotFound):
    """No registry, directory or archive holds an image of this name."""


# What went wrong while doing it


class OperationFailed(AenvError):
    """An operation was accepted and failed; the sandbox is in the state that the message names."""


class StorageFull(OperationFailed):
    """The disk has no room for what had to be written; nothing that was acknowledged is lost."""


class StoreUnavailable(OperationFailed):
    """The repository's store cannot be reached, or says that it is overloaded; the same request works later."""


class StoreRefused(OperationFailed):
    """The repository's store turns the node away: its credentials, its permissions or the bucket's name are wrong."""


class RepositoryDamaged(OperationFailed):
    """Something that the repository acknowledged is missing or has other content; the message names the object."""


class BlockError(OperationFailed):
    """blockd refused or failed a request, or could not be reached within the deadline.

    `kind` is blockd's own word (spec/wire/block.md), or "unreachable" where nothing was asked, or "outcome_unknown"
    where the answer was lost.
    """

    def __init__(self, message: str, kind: str = "io") -> None:
        super().__init__(message)
        self.kind = kind


class ProxyError(OperationFailed):
    """The proxy refused a control request, or could not be reached within the deadline."""


class VmmError(OperationFailed):
    """The VMM refused a command or answered something unexpected."""


class VmmTimeout(VmmError):
    """The VMM did not answer a command within its deadline."""


class VmmGone(VmmError):
    """The VMM process no longer exists."""


class RestoreRefused(VmmError):
    """This node cannot restore the snapshot; the message says what it has and what the snapshot needs."""


class NetworkError(OperationFailed):
    """A network slot could not be set up, changed or torn down."""


class GuestError(OperationFailed):
    """The guest daemon answered an error."""


class GuestUnresponsive(GuestError):
    """The guest daemon did not answer within the deadline."""


class ImageError(OperationFailed):
    """A root file system or a layer could not be made from its source."""


class RegistryError(ImageError):
    """A registry could not be reached within the deadline, or answered what cannot be used."""


class RegistryDenied(RegistryError):
    """A registry refused access; the message says to which repository and whether credentials were given."""


# Start-up


class ConfigError(AenvError):
    """A configuration key is unknown, missing or out of range; the message names the key."""


class HostUnsuitable(AenvError):
    """The host lacks something that the node needs; the message says what and how to get it."""
