"""Workers of a source as actors of a Ray cluster: ``workers="ray:4"`` (docs/adr/0019).

Actors import this module. Each hosts consumers as a worker process does, listens on an address of
its node, and ends with its lease when nobody asks it any more. Ray only places them and kills them;
what they receive does not pass Ray.
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

from keyshard.broker.hosted.places import Start
from keyshard.broker.hosted.process import LOOPBACK, begun
from keyshard.broker.hosted.worker import START_TIMEOUT_S, Worker, setup_of
from keyshard.config.connection import Connection
from keyshard.config.workers import Workers
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
from ray_adapter.cluster import NOWHERE_S, capacity, connect, fits_nowhere, resources_text
from ray_adapter.session import Actor, Session, forget

LOOK_S = 0.1
"""Time between two looks whether anybody still waits for an actor, seconds."""
RESOURCE = "resources."
"""Begins the name of an option that asks for a custom resource."""

GONE = "Ray was shut down while a source has its workers there. Close the source first."
NONE: Mapping[str, float] = {}
_log = logging.getLogger(__name__)


def workers(
    count: int, *, num_cpus: float | None = None, resources: Mapping[str, float] = NONE
) -> str:
    """What a source is given to have its consumers in actors of a Ray cluster.

    Usage::

        KeyShardSource("orders", workers=ray_adapter.workers(4, num_cpus=1))

    The cluster is the one that the program is connected to, else as ``ray.init()`` finds or starts
    it. In Spark the option ``workers`` takes the same text.

    Args:
        count: How many actors.
        num_cpus: CPUs of each; ``None``: what Ray does.
        resources: Custom resources of each.

    Raises:
        ConfigError: An amount is no number, or out of bounds.
    """
    if not isinstance(resources, Mapping):
        raise ConfigError(f"resources is {shown(resources)}; give a dict, as to Ray.")
    asked: dict[str, Any] = {} if num_cpus is None else {"num_cpus": num_cpus}
    asked |= {f"{RESOURCE}{name}": amount for name, amount in resources.items()}
    text = f"ray:{count}" + (f"?{urlencode(asked)}" if asked else "")
    parsed = Workers.parse(text)
    assert parsed is not None
    _placement(parsed)
    return text


def place(connection: Connection, workers: Workers) -> Start:
    """The entry point ``ray`` of ``keyshard.workers``.

    Raises:
        ConfigError: An option is unknown, or no amount.
        ClusterError: There is no cluster where one should be.
    """
    placement = _placement(workers)
    connect()
    return lambda stop: RayWorker(connection, placement, stop)


def _placement(workers: Workers) -> dict[str, Any]:
    """What Ray is asked for each actor."""
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
                f"workers is {shown(workers.text)}; the options of Ray's workers are 'num_cpus' "
                f"and '{RESOURCE}NAME'."
            )
    return placement


class WorkerActor:
    """Hosts consumers in an actor."""

    def begin(self, version: str, packed: str, asker: str) -> str:
        """Begin; says what a worker process says.

        Args:
            version: Of keyshard, where the source runs.
            packed: What the worker has to know.
            asker: Ray's id of the node where the source runs; empty for one outside.
        """
        here = ray.get_runtime_context().get_node_id() == asker
        server, hello = begun(version, packed, LOOPBACK if here else ray.util.get_node_ip_address())
        if server is not None:
            begin("keyshard-host", _serve, server.serve_to_the_end)
        return hello


def _serve(serve_to_the_end: Any) -> None:
    if not serve_to_the_end():
        os._exit(1)  # nothing more may leave this process


class RayWorker(Worker):
    """An actor; where it dies, another takes its place, so Ray restarts none.

    Args:
        connection: How it reaches the cluster of the broker.
        placement: What Ray is asked for it.
        stop: Ends the wait for its start.

    Raises:
        ClusterError: There is no place for it, or no Ray.
        WorkerEnvironmentError: keyshard is missing there, or is another version.
        WorkerUnreachableError: It cannot be reached, or nobody waits for it.
        KeyShardError: The broker refuses it.
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
            raise ConfigError(f"Ray refuses what workers asks for: {text_of(exc)}.") from exc
        try:
            said = self._said(setup.packed(), placement, stop)
            super().__init__(said, setup.token, "Ray worker")
        except BaseException:
            self._end_actor()
            raise

    def _said(
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
                    raise WorkerUnreachableError("Nobody waits for a Ray worker any more.")
            said: str = answer.result()
        except exceptions.ActorUnschedulableError as exc:
            raise ClusterError(f"A Ray worker finds no place: {text_of(exc)}.") from exc
        except exceptions.RayError as exc:
            self._session.check()
            raise WorkerEnvironmentError(
                f"A Ray worker cannot begin: {text_of(exc)}. Every node needs keyshard[ray] "
                f"{VERSION}, in its environment or by runtime_env. Where it has that, look for a "
                "crash or the memory limit."
            ) from exc
        finally:
            forget(answer)
        return said

    def _node(self) -> str:
        """Ray's id of the node of this process; empty outside of the cluster."""
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
        except Exception as exc:  # noqa: BLE001 - Ray may be gone; then its lease ends it
            _log.debug("a Ray worker was not killed: %s", text_of(exc))


def _amounts(placement: Mapping[str, Any]) -> dict[str, float]:
    cpus = {"CPU": placement["num_cpus"]} if "num_cpus" in placement else {}
    return {**cpus, **placement.get("resources", {})}


def _no_place(placement: Mapping[str, Any]) -> ClusterError:
    asked = resources_text(_amounts(placement))
    if fits_nowhere(_amounts(placement)):
        return ClusterError(
            f"No node of the Ray cluster has {asked}, which each worker asks for. {capacity()} Ask "
            "for less for each, or add such a node."
        )
    return ClusterError(
        f"A Ray worker found no place within {START_TIMEOUT_S:g} s. It asks for {asked}. "
        f"{capacity()} Ask for fewer workers or less for each, or add nodes."
    )
