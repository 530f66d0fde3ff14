"""Which broker a URL means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keyshard.broker import at_exit  # noqa: F401 - before what ends a run at exit
from keyshard.broker.port import Broker

if TYPE_CHECKING:
    from keyshard.broker.admin import PulsarAdmin
    from keyshard.broker.memory import MemoryCluster
    from keyshard.broker.memory_admin import MemoryAdmin

MEMORY = "memory://"
"""Beginning of the URL of an in-memory cluster of this process; its name follows."""


def connect(service_url: str, operation_timeout_s: int) -> Broker:
    """Connect to a cluster; only the client that the URL asks for is loaded.

    Args:
        service_url: ``pulsar://...``, ``pulsar+ssl://...`` or ``memory://name``.
        operation_timeout_s: Longest time one request may take, seconds.

    Raises:
        BrokerError: The client refuses.
    """
    if service_url.startswith(MEMORY):
        from keyshard.broker.memory import MemoryBroker  # noqa: PLC0415

        return MemoryBroker(_cluster(service_url))
    from keyshard.broker.pulsar import PulsarBroker  # noqa: PLC0415

    return PulsarBroker(service_url, operation_timeout_s)


def connect_admin(admin_url: str) -> PulsarAdmin | MemoryAdmin:
    """The admin interface at ``http://host:port``, ``https://...`` or ``memory://name``."""
    if admin_url.startswith(MEMORY):
        from keyshard.broker.memory_admin import MemoryAdmin  # noqa: PLC0415

        return MemoryAdmin(_cluster(admin_url), admin_url.removeprefix(MEMORY))
    from keyshard.broker.admin import PulsarAdmin  # noqa: PLC0415

    return PulsarAdmin(admin_url)


def _cluster(url: str) -> MemoryCluster:
    from keyshard.broker.memory import MemoryCluster  # noqa: PLC0415

    return MemoryCluster.named(url.removeprefix(MEMORY))
