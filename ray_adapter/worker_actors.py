"""Workers of a source as actors of a Ray cluster: ``workers="ray:4"`` (docs/adr/0019).

Actors import this module. Each hosts consumers as a worker process does, listens on an address of
its node, and ends when its lease expires. Ray only places and kills the actors. The entries that
they receive do not pass through Ray.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import wait as wait_for
from typing import Any
from urllib.parse import urlencode

import ray
from ray import exceptions

from keyshard.base_error import IGNORE
from keyshard.config.connection import Connection
from keyshard.config.workers import WorkersOption
from keyshard.core.lanes.failure import text_of
from keyshard.errors import (
    ClusterError,
    ConfigError,
    WorkerEnvironmentError,
    WorkerUnreachableError,
)
from keyshard.redaction import shown
from keyshard.threads import begin
from keyshard.version import VERSION
from keyshard.workers.backends import StartWorker
from keyshard.workers.server import LOOPBACK, start_server
from keyshard.workers.worker import START_TIMEOUT_S, Worker, setup_of
from ray_adapter.cluster import (
    NOWHERE_S,
    Actor,
    Session,
    capacity,
    connect,
    fits_nowhere,
    forget,
    resources_text,
)

LOOK_S = 0.1
"""Time between two checks whether the start of an actor was given up, seconds."""
RESOURCE = "resources."
"""Prefix of the options that ask for a custom resource."""

GONE = (
    "Ray was shut down while a source had workers there.",
    "Close the source before ray.shutdown().",
)
NONE: Mapping[str, float] = {}
_log = logging.getLogger(__name__)


def workers(
    count: int, *, num_cpus: float | None = None, resources: Mapping[str, float] = NONE
) -> str:
    """Return the ``workers`` option of a source whose consumers run in Ray actors.

    Usage::

        KeyShardSource("orders", workers=ray_adapter.workers(4, num_cpus=1))

    The cluster is the one that the program is connected to, else the one that ``ray.init()`` finds
    or starts. The Spark option ``workers`` takes the same text.

    Args:
        count: Number of actors.
        num_cpus: CPUs of each actor; ``None`` for Ray's default.
        resources: Custom resources of each actor.

    Raises:
        ConfigError: An amount is not a number, or out of bounds.
    """
    if not isinstance(resources, Mapping):
        raise ConfigError(
            f"resources is {shown(resources)}; it must be a dict of resources, as in Ray."
        )
    asked: dict[str, Any] = {} if num_cpus is None else {"num_cpus": num_cpus}
    asked |= {f"{RESOURCE}{name}": amount for name, amount in resources.items()}
    text = f"ray:{count}" + (f"?{urlencode(asked)}" if asked else "")
    parsed = WorkersOption.parse(text)
    assert parsed is not None
    _placement(parsed)
    return text


def backend(connection: Connection, workers: WorkersOption) -> StartWorker:
    """Return the function that starts workers, for the entry point ``ray`` of ``keyshard.workers``.

    Raises:
        ConfigError: An option is unknown, or not an amount.
        ClusterError: The cluster cannot be reached.
    """
    placement = _placement(workers)
    connect()
    return lambda stop: RayWorker(connection, placement, stop)


def _placement(workers: WorkersOption) -> dict[str, Any]:
    """Return Ray's options for each actor."""
    placement: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
    for name, value in workers.options.items():
        try:
            amount = float(value)
        except ValueError:
            amount = math.nan
        if not 0 <= amount < math.inf:
            raise ConfigError(
                f"{name} of workers is {shown(value)}; it must be a number, 0 or more."
            )
        if name == "num_cpus":
            placement[name] = amount
        elif name.startswith(RESOURCE) and name != RESOURCE:
            placement.setdefault("resources", {})[name.removeprefix(RESOURCE)] = amount
        else:
            raise ConfigError(
                f"workers is {shown(workers.text)}; the options of Ray workers are 'num_cpus' "
                f"and '{RESOURCE}NAME'."
            )
    return placement


class WorkerActor:
    """Hosts consumers in an actor."""

    def begin(self, version: str, packed: str, source_node: str) -> str:
        """Start the worker, and return the same text as a worker process.

        Args:
            version: Version of keyshard in the source's process.
            packed: Setup of the worker.
            source_node: Ray's id of the node of the source; empty outside of the cluster.
        """
        here = ray.get_runtime_context().get_node_id() == source_node
        server, hello = start_server(
            version, packed, LOOPBACK if here else ray.util.get_node_ip_address()
        )
        if server is not None:
            begin("keyshard-actor-worker", _serve, server.serve_to_the_end)
        return hello


def _serve(serve_to_the_end: Any) -> None:
    try:
        gave_back = serve_to_the_end()
    except BaseException:  # noqa: BLE001 - it is logged, and ends the process
        # Without this thread, its consumers would keep their ranges after the lease.
        _log.exception("a worker ended unexpectedly")
        gave_back = False
    if not gave_back:
        os._exit(1)  # end at once, so that nothing more leaves this process


class RayWorker(Worker):
    """A worker in an actor. The source replaces a dead worker, so Ray does not restart the actor.

    Args:
        connection: Connection of the worker to the broker's cluster.
        placement: Ray's options for the actor.
        stop: Ends the wait for the start.

    Raises:
        ClusterError: The cluster cannot place the actor, or Ray is gone.
        WorkerEnvironmentError: The node lacks keyshard, or has another version.
        WorkerUnreachableError: The actor cannot be reached, or the start was given up.
        KeyShardError: The broker refuses the worker.
    """

    def __init__(
        self, connection: Connection, placement: Mapping[str, Any], stop: threading.Event
    ) -> None:
        self._session = Session(GONE)
        setup = setup_of(connection)
        try:
            self._actor = Actor(
                self._session,
                lambda: ray.remote(WorkerActor).options(max_restarts=0, **placement).remote(),
            )
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"Ray rejects the resources of workers: {text_of(exc)}.", "Correct them."
            ) from exc
        try:
            hello = self._start(setup.packed(), placement, stop)
            super().__init__(hello, setup.token, "Ray worker")
        except BaseException:
            self._end_actor()
            raise

    def _start(
        self, packed: tuple[str, str], placement: Mapping[str, Any], stop: threading.Event
    ) -> str:
        began_s = time.monotonic()
        answer = self._actor.ask("begin", *packed, self._node())
        try:
            while not wait_for([answer], LOOK_S).done:
                waited_s = time.monotonic() - began_s
                with self._session.inside():
                    nowhere = waited_s > NOWHERE_S and fits_nowhere(_amounts(placement))
                    if nowhere or waited_s > START_TIMEOUT_S:
                        raise _no_place(placement)
                if stop.is_set():
                    raise WorkerUnreachableError(
                        "The source ends, so its Ray worker is not started.", IGNORE
                    )
            hello: str = answer.result()
        except exceptions.ActorUnschedulableError as exc:
            raise ClusterError(
                f"A Ray worker cannot be placed: {text_of(exc)}.",
                "Add nodes, or request fewer resources.",
            ) from exc
        except exceptions.RayError as exc:
            self._session.check()
            raise WorkerEnvironmentError(
                f"A Ray worker cannot start: {text_of(exc)}.",
                f"Install keyshard[ray] {VERSION} on every node, in its environment or by "
                "runtime_env. Otherwise look for a crash, or for its memory limit.",
            ) from exc
        finally:
            forget(answer)
        return hello

    def _node(self) -> str:
        """Return Ray's id of this process's node; empty outside of the cluster."""
        with self._session.inside():
            if ray.util.client.ray.is_connected():
                return ""
            node: str = ray.get_runtime_context().get_node_id()
            return node

    def kill(self) -> None:
        super().kill()
        self._end_actor()

    def _end_actor(self) -> None:
        try:
            self._actor.end()
        except Exception as exc:  # noqa: BLE001 - Ray may be gone; the lease then ends the actor
            _log.debug("a Ray worker was not killed: %s", text_of(exc))


def _amounts(placement: Mapping[str, Any]) -> dict[str, float]:
    cpus = {"CPU": placement["num_cpus"]} if "num_cpus" in placement else {}
    return {**cpus, **placement.get("resources", {})}


def _no_place(placement: Mapping[str, Any]) -> ClusterError:
    asked = resources_text(_amounts(placement))
    if fits_nowhere(_amounts(placement)):
        return ClusterError(
            f"No node of the Ray cluster has {asked}, which each worker needs. {capacity()}",
            "Request fewer resources, or add such a node.",
        )
    return ClusterError(
        f"A Ray worker was not placed within {START_TIMEOUT_S:g} s. It needs {asked}. {capacity()}",
        "Request fewer workers or fewer resources, or add nodes.",
    )
