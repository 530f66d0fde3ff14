"""The Ray cluster: whether it is there, and what it has for actors."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_ray_address_file

from keyshard.core.lanes.failure import text_of
from keyshard.errors import ClusterError

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for the port of a cluster, seconds."""

START_TIMEOUT_S = 60.0
"""Longest wait until actors have found a place, unless a job says another, seconds."""
NOWHERE_S = 5.0
"""The same where no node has what they ask for, unless a job waits longer than others, seconds."""

_log = logging.getLogger(__name__)


def connect() -> None:
    """Be connected to Ray: as the program is, else as ``ray.init()`` does it.

    That is the cluster of ``RAY_ADDRESS``, else one that runs on this machine, else a new one here,
    which ends with the program.

    Raises:
        ClusterError: There is no cluster where one should be.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    _answers(address, "which RAY_ADDRESS names,")
    if address in ("", "auto"):
        # Ray reads the file of the last `ray start` on this machine, even if that cluster is dead.
        file = Path(get_ray_address_file(None))
        with suppress(OSError, UnicodeDecodeError):
            _answers(file.read_text().strip(), f"which {file} names,")
    minds = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=True)
    except Exception as exc:
        where = f"at {address}, which RAY_ADDRESS names," if address else "here"
        raise _unreachable(where, text_of(exc)) from exc
    finally:
        # Ray puts its own in the place of one that ends a run in order.
        if callable(minds) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, minds)
    _log.info("connected to Ray with %s", resources_text(ray.cluster_resources()))


def _answers(address: str, by: str) -> None:
    """Ray itself waits for minutes for a cluster that is not there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as exc:
        raise _unreachable(f"at {address}, {by}", text_of(exc)) from exc


def _unreachable(where: str, why: str) -> ClusterError:
    return ClusterError(
        f"The Ray cluster {where} cannot be reached: {why}. Start one with ray start --head, set "
        "RAY_ADDRESS to one that runs, or set it to local for one in this program."
    )


def fits_nowhere(each: Mapping[str, Any]) -> bool:
    """Whether no node of the cluster has what an actor asks for, also when all is free."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return bool(nodes) and not any(
        all(has.get(name, 0) >= amount for name, amount in each.items()) for has in nodes
    )


def shortage(ready: int, wanted: int, each: Mapping[str, Any], within_s: float) -> ClusterError:
    """The error of actors that found no place in time."""
    asked = resources_text(each) if each else "no resources by name"
    if fits_nowhere(each):
        return ClusterError(
            f"No node of the cluster has {asked}, which each actor asks for. {capacity()} Ask for "
            "less, or add such a node. Where an autoscaler adds it, set start_timeout_s above "
            f"{START_TIMEOUT_S:g} s."
        )
    return ClusterError(
        f"Only {ready} of {wanted} actors found a place within {within_s:g} s. Each asks for "
        f"{asked}. {capacity()} Ask for fewer actors (parallelism) or less for each, add nodes, or "
        "raise start_timeout_s."
    )


def capacity() -> str:
    """What the cluster has for actors, and what of it is free."""
    return (
        f"The cluster has {resources_text(ray.cluster_resources())}; free are "
        f"{resources_text(ray.available_resources())}."
    )


def resources_text(resources: Mapping[str, Any]) -> str:
    """Names and amounts, without those that Ray makes for each node."""
    shown = [
        f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "object_store_memory", "memory", "accelerator_type:"))
    ]
    return ", ".join(shown) or "nothing"
