"""Network slots: a namespace with a veth pair to the host and a tap to the guest, NAT and rules for each sandbox.

`SlotPool` gives slots out (`pool`), `NamespaceHost` makes them on this machine (`host`), `rules` says what a guest may
reach. Knows nothing of sandboxes, VMMs or the API; routing traffic to a guest is the proxy's, by the slot's address.
"""

from agentenv.network.host import NamespaceHost, SlotHost, destroy_all
from agentenv.network.pool import SlotPool
from agentenv.network.resolvers import host_resolvers
from agentenv.network.settings import DEFAULT_SUBNET, NetworkSettings, PoolSettings
from agentenv.network.slot import Slot, node_tag


def open_pool(settings: NetworkSettings) -> SlotPool:
    """The pool of this machine's real slots; `start` it next."""
    return SlotPool(NamespaceHost(settings), settings.pool)


__all__ = [
    "DEFAULT_SUBNET",
    "NamespaceHost",
    "NetworkSettings",
    "PoolSettings",
    "Slot",
    "SlotHost",
    "SlotPool",
    "destroy_all",
    "host_resolvers",
    "node_tag",
    "open_pool",
]
