"""Worker backends: a source's consumers run in this process, or in the workers of a backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from keyshard.base_error import first_line
from keyshard.broker.at_exit import close_at_exit
from keyshard.broker.connect import connect
from keyshard.broker.port import Broker
from keyshard.config.connection import Connection
from keyshard.config.workers import PROCESSES, WorkersOption, backends
from keyshard.errors import ConfigError

if TYPE_CHECKING:
    from keyshard.workers.worker import Worker

StartWorker = Callable[[threading.Event], "Worker"]
"""Starts one worker, or raises a ``KeyShardError``. It stops waiting when the event is set. Several
threads call it, and call it again after a worker has died."""

Backend = Callable[[Connection, WorkersOption], StartWorker]
"""The type of an entry point of ``keyshard.workers``. It need not start anything. It raises
``ConfigError`` for unknown options."""


def connect_source(connection: Connection, workers: WorkersOption | None) -> Broker:
    """Open the broker connection of a source, with consumers in this process or in workers.

    Args:
        connection: How the cluster is reached.
        workers: The processes that host the consumers; ``None``: this process.

    Raises:
        BrokerError: The Pulsar client refuses the settings of the connection.
        ConfigError: The package of the workers is not installed, or refuses an option.
        WorkerUnreachableError: A worker does not start.
    """
    if workers is None:
        return connect(connection)
    from keyshard.workers.broker import RemoteBroker  # noqa: PLC0415 - loads Arrow Flight

    start = start_of(connection, workers)
    broker = RemoteBroker(
        connect(connection), start, workers.count, connection.operation_timeout_ms / 1000
    )
    close_at_exit(broker)
    return broker


def start_of(connection: Connection, workers: WorkersOption) -> StartWorker:
    """Return the function that starts the workers of a source.

    Raises:
        ConfigError: The package of the backend is not installed, or refuses an option.
        KeyShardError: The backend is not available.
    """
    from keyshard.workers.worker import WorkerProcess  # noqa: PLC0415 - loads Arrow Flight

    if workers.backend == PROCESSES:
        return lambda stop: WorkerProcess(connection, stop)
    try:
        backend = cast(Backend, backends()[workers.backend].load())
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"workers is {workers.text!r}, but the package that starts them cannot be loaded: "
            f"{first_line(exc).rstrip('.')}.",
            "Install it, or use another backend.",
        ) from exc
    return backend(connection, workers)
