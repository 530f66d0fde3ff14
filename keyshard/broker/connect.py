"""Which broker a URL means."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from keyshard.broker.port import Broker
from keyshard.broker.pulsar import at_exit  # before what ends a run at exit
from keyshard.config.connection import AUTO, MEMORY, WIRE, Connection
from keyshard.config.workers import Workers

if TYPE_CHECKING:
    from keyshard.broker.memory import MemoryCluster
    from keyshard.broker.memory.admin import MemoryAdmin
    from keyshard.broker.pulsar.admin import PulsarAdmin

_log = logging.getLogger(__name__)


def connect(connection: Connection, workers: Workers | None = None) -> Broker:
    """Connect to a cluster; only the client that the URL asks for is loaded.

    Args:
        connection: How the cluster is reached.
        workers: What has the consumers; ``None``: this process.

    Raises:
        BrokerError: The client refuses.
        ConfigError: The place of the workers is not installed, or refuses an option.
        WorkerUnreachableError: A worker does not start.
    """
    if workers is not None:
        from keyshard.broker.hosted.broker import HostedBroker  # noqa: PLC0415
        from keyshard.broker.hosted.places import start_of  # noqa: PLC0415

        start = start_of(connection, workers)
        hosted = HostedBroker(
            connect(connection), start, workers.count, connection.operation_timeout_ms / 1000
        )
        at_exit.close_at_exit(hosted)
        return hosted
    if connection.in_memory:
        from keyshard.broker.memory import MemoryBroker  # noqa: PLC0415

        return MemoryBroker(_cluster(connection))
    transport, decoder = transport_of(connection), decoder_of(connection)
    _tell(transport, decoder)
    if transport == WIRE:
        from keyshard.broker.wire.broker import WireBroker  # noqa: PLC0415

        return WireBroker(connection)
    from keyshard.broker.pulsar.broker import PulsarBroker  # noqa: PLC0415

    return PulsarBroker(connection)


def transport_of(connection: Connection) -> str:
    """What consumes and reads: ``wire``, ``client``, or ``memory``."""
    if connection.in_memory:
        return "memory"
    # Nothing that a connection can say needs the other one.
    return WIRE if connection.transport == AUTO else connection.transport


def decoder_of(connection: Connection) -> str | None:
    """What decodes entries in this process, ``compiled`` code or ``python``; ``None``: none do."""
    if transport_of(connection) != WIRE:
        return None
    from keyshard.broker.wire import bulk  # noqa: PLC0415

    return "compiled" if bulk.is_there() else "python"


@cache
def _tell(transport: str, decoder: str | None) -> None:
    """Log it, once in a process: workers and splits connect as well."""
    by = "" if decoder is None else f", entries decoded by {decoder} code"
    _log.info("consuming and reading by transport %s%s", transport, by)


def connect_admin(
    connection: Connection, first_s: float | None = None
) -> PulsarAdmin | MemoryAdmin:
    """The admin interface of a cluster; nothing is asked yet.

    Args:
        connection: How the cluster is reached.
        first_s: Longest wait for its first answer, seconds; ``None``: as for later ones.

    Raises:
        ConfigError: The connection has no ``admin_url``, or a file of TLS does not fit.
    """
    if connection.in_memory:
        from keyshard.broker.memory.admin import MemoryAdmin  # noqa: PLC0415

        return MemoryAdmin(_cluster(connection), connection.service_url.removeprefix(MEMORY))
    from keyshard.broker.pulsar.admin import PulsarAdmin  # noqa: PLC0415

    return PulsarAdmin(connection) if first_s is None else PulsarAdmin(connection, first_s)


def _cluster(connection: Connection) -> MemoryCluster:
    from keyshard.broker.memory import MemoryCluster  # noqa: PLC0415

    return MemoryCluster.named(connection.service_url.removeprefix(MEMORY))
