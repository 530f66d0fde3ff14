"""Where workers live: in processes of this machine, or where an installed package says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

from keyshard.broker.hosted.worker import Worker, WorkerProcess
from keyshard.config.connection import Connection
from keyshard.config.workers import PROCESSES, Workers, places
from keyshard.errors import ConfigError
from keyshard.redaction import first_line

Start = Callable[[threading.Event], Worker]
"""Starts one worker, or raises a ``KeyShardError``; the event ends the wait for it. It is called
from several threads, and again after a worker has died."""

Place = Callable[[Connection, Workers], Start]
"""What an entry point of ``keyshard.workers`` names. Nothing has to be started yet; it raises
``ConfigError`` for options that it does not know."""


def start_of(connection: Connection, workers: Workers) -> Start:
    """What starts the workers of a source.

    Raises:
        ConfigError: The package of their place is missing, or refuses an option.
        KeyShardError: The place is not there.
    """
    if workers.place == PROCESSES:
        return lambda stop: WorkerProcess(connection, stop)
    try:
        place = cast(Place, places()[workers.place].load())
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"workers is {workers.text!r}, and what starts them cannot be loaded: "
            f"{first_line(exc).rstrip('.')}."
        ) from exc
    return place(connection, workers)
