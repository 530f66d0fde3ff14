"""The place ``spark`` of workers: the stream process of a query gets them from executors."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing

from keyshard.broker.hosted.places import Start
from keyshard.broker.hosted.worker import START_TIMEOUT_S, Asker, Worker, setup_of
from keyshard.config.connection import Connection
from keyshard.config.workers import Workers
from keyshard.errors import ConfigError, WorkerUnreachableError
from spark_adapter import registry

_tasks_fetch = threading.Event()
"""Set in a stream process."""

LOOK_S = 0.2
"""Time between two looks for a door, seconds."""


def keep_content() -> None:
    """From now on workers of this process keep content: all that it is for are tasks."""
    _tasks_fetch.set()


def place(connection: Connection, workers: Workers) -> Start:
    """What starts workers behind the doors of this process's application.

    Raises:
        ConfigError: It has no such doors, or fewer; or an option is given.
    """
    if workers.options:
        raise ConfigError(f"workers is {workers.text!r}; 'spark' takes no options.")
    return Doors(connection, workers).start


class Doors:
    """Those of one application, as one source uses them."""

    def __init__(self, connection: Connection, workers: Workers) -> None:
        self._connection = connection
        self._workers = workers
        self._jvm = os.getppid()
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}
        """How often each was asked; the next worker comes from where that was least."""
        self._hosted()

    def _hosted(self) -> registry.Hosted:
        hosted = registry.read(self._jvm)
        if hosted is None:
            raise ConfigError(
                f"workers is {self._workers.text!r}, and this Spark application hosts none. Call "
                f"spark_adapter.start_workers(spark, {self._workers.count}) before the query "
                "starts, and keep its session."
            )
        if self._workers.count > len(hosted.doors):
            raise ConfigError(
                f"workers is {self._workers.text!r}, and this Spark application hosts "
                f"{len(hosted.doors)}. Ask for as many, or start more."
            )
        return hosted

    def start(self, stop: threading.Event) -> Worker:
        """A worker behind the door that was asked least; waits until one answers."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while True:
            hosted = self._hosted()
            with self._lock:
                door = min(hosted.doors, key=lambda one: self._used.get(one, 0))
                self._used[door] = self._used.get(door, 0) + 1
            try:
                return self._behind(door, hosted.token)
            except WorkerUnreachableError:
                if stop.is_set() or time.monotonic() > end_s:
                    raise
                stop.wait(LOOK_S)

    def _behind(self, door: str, token: str) -> Worker:
        setup = setup_of(self._connection, keeps=_tasks_fetch.is_set())
        version, packed = setup.packed()
        with closing(Asker(door, token, "task of Spark workers")) as asker:
            hello = asker.ask("start", START_TIMEOUT_S, version=version, packed=packed)
        return Worker(hello, setup.token, "worker on an executor")
