"""Opens the broker connection and the admin interface that a connection configures."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import keyshard.broker.at_exit  # noqa: F401 - before anything that ends a run at exit
from keyshard.broker.port import Broker
from keyshard.config.connection import AUTO, MEMORY, WIRE, Connection

if TYPE_CHECKING:
    from keyshard.broker.admin.rest import PulsarAdmin
    from keyshard.broker.memory import MemoryCluster
    from keyshard.broker.memory.admin import MemoryAdmin

_log = logging.getLogger(__name__)

PYTHON_COST = (
    "That takes 1.3 us of processor time per message instead of 0.07 with entries of 1,000 "
    "messages, and 3.2 instead of 0.70 with entries of 3."
)
"""The figures of ``python -m bench decode`` in ``bench/README.md``."""
COMPILED_REMEDY = (
    "Install a wheel for this platform, or reinstall keyshard where rustc --version works."
)


def connect(connection: Connection) -> Broker:
    """Connect to a cluster. Load only the client that the connection needs.

    Raises:
        BrokerError: The client refuses.
    """
    if connection.in_memory:
        from keyshard.broker.memory import MemoryBroker  # noqa: PLC0415

        return MemoryBroker(_cluster(connection))
    transport = transport_of(connection)
    _tell(transport, decoder_of(connection))
    if transport == WIRE:
        from keyshard.broker.wire.broker import WireBroker  # noqa: PLC0415

        return WireBroker(connection)
    from keyshard.broker.client.broker import ClientBroker  # noqa: PLC0415

    return ClientBroker(connection)


def transport_of(connection: Connection) -> str:
    """Name the transport that consumes and reads: ``wire``, ``client``, or ``memory``."""
    if connection.in_memory:
        return "memory"
    # ``wire`` supports every option of a connection, so ``auto`` never needs the client.
    return WIRE if connection.transport == AUTO else connection.transport


def decoder_of(connection: Connection) -> str | None:
    """Name the entry decoder of this process: ``compiled``, ``python``, or ``None`` for none."""
    if transport_of(connection) != WIRE:
        return None
    from keyshard.broker.wire import native_decoder  # noqa: PLC0415

    return "compiled" if native_decoder.is_available() else "python"


@cache
def _tell(transport: str, decoder: str | None) -> None:
    """Log the transport once per process, because workers and splits connect as well."""
    by = "" if decoder is None else f", entries decoded by {decoder} code"
    _log.info("consuming and reading by transport %s%s", transport, by)
    if decoder == "python":
        _log.info("%s %s", decoded_in_python(), COMPILED_REMEDY)


def decoded_in_python() -> str:
    """Say why this process decodes entries in Python, and what that costs."""

    from keyshard.broker.wire import native_decoder  # noqa: PLC0415

    return f"Entries are decoded in Python, because {native_decoder.why_missing()}. {PYTHON_COST}"


def connect_admin(
    connection: Connection, first_s: float | None = None
) -> PulsarAdmin | MemoryAdmin:
    """Create the admin interface of a cluster, without a request.

    Args:
        connection: How the cluster is reached.
        first_s: Longest wait for its first answer, seconds; ``None``: as for later answers.

    Raises:
        ConfigError: The connection has no ``admin_url``, or a TLS file is invalid.
    """
    if connection.in_memory:
        from keyshard.broker.memory.admin import MemoryAdmin  # noqa: PLC0415

        return MemoryAdmin(_cluster(connection), connection.service_url.removeprefix(MEMORY))
    from keyshard.broker.admin.rest import PulsarAdmin  # noqa: PLC0415

    return PulsarAdmin(connection) if first_s is None else PulsarAdmin(connection, first_s)


def _cluster(connection: Connection) -> MemoryCluster:
    from keyshard.broker.memory import MemoryCluster  # noqa: PLC0415

    return MemoryCluster.named(connection.service_url.removeprefix(MEMORY))
