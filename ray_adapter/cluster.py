"""The Ray cluster: whether it is there, and what it has for actors."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

import ray

from keyshard.core.lanes.failure import text_of
from keyshard.errors import ClusterError

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for the port of a cluster, seconds."""

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
    _answers(address)
    minds = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=True)
    except Exception as exc:
        raise _unreachable(address, text_of(exc)) from exc
    finally:
        # Ray puts its own in the place of one that ends a run in order.
        if callable(minds) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, minds)
    _log.info("connected to Ray with %s", resources_text(ray.cluster_resources()))


def _answers(address: str) -> None:
    """Ray itself waits for minutes for a cluster that is not there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as exc:
        raise _unreachable(address, text_of(exc)) from exc


def _unreachable(address: str, why: str) -> ClusterError:
    where = f"at {address}, which RAY_ADDRESS names," if address else "here"
    return ClusterError(
        f"The Ray cluster {where} cannot be reached: {why}. Start one with ray start --head, set "
        "RAY_ADDRESS to one that runs, or unset it for one on this machine."
    )


def shortage(ready: int, wanted: int, each: Mapping[str, Any], within_s: float) -> ClusterError:
    """The error of actors that found no place in time."""
    asked = resources_text(each) if each else "no resources by name"
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
