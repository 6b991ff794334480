"""The HTTP API: E2B's control plane and our own endpoints.

Owns routes, keys, shapes, limits and the one table from errors to statuses. Owns no sandbox: everything that is
known or done is the node's. The proxy's resolver is here too, as an app of its own on another socket.
"""

from agentenv.api.app import create_app
from agentenv.api.builds import TemplateBuilder
from agentenv.api.images import ImageService
from agentenv.api.keys import ApiKeys, load_or_create
from agentenv.api.settings import ApiSettings
from agentenv.api.storage import StorageService

__all__ = [
    "ApiKeys",
    "ApiSettings",
    "ImageService",
    "StorageService",
    "TemplateBuilder",
    "create_app",
    "load_or_create",
]
