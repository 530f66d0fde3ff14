"""The Ray cluster: connect to it, describe its resources, and call its actors."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_ray_address_file
from ray._private.worker import _connect_or_shutdown_lock

from keyshard.core.lanes.failure import text_of
from keyshard.errors import ClusterError, KeyShardError
from keyshard.threads import logged_error

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a connection to the cluster's port, seconds."""

START_TIMEOUT_S = 60.0
"""Longest wait until actors are placed, unless a job sets another, seconds."""
NOWHERE_S = 5.0
"""Longest wait if no node has the resources, unless a job sets a longer wait, seconds."""

_log = logging.getLogger(__name__)


def connect() -> None:
    """Connect to Ray as ``ray.init()`` does, unless the program is connected.

    That is the cluster of ``RAY_ADDRESS``, else a running one on this machine, else a new one,
    which ends with the program.

    Raises:
        ClusterError: The cluster cannot be reached.
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
        # ray.init() replaces the SIGTERM handler, which drains a run: restore it.
        if callable(minds) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, minds)
    _log.info("connected to Ray with %s", resources_text(ray.cluster_resources()))


def _answers(address: str, by: str) -> None:
    """Check the port of a cluster first, because Ray waits minutes for a missing cluster."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as exc:
        raise _unreachable(f"at {address}, {by}", text_of(exc)) from exc


def _unreachable(where: str, why: str) -> ClusterError:
    return ClusterError(
        f"The Ray cluster {where} cannot be reached: {why}.",
        "Start a cluster with ray start --head, or set RAY_ADDRESS to a running cluster. For a "
        "cluster in this process, set RAY_ADDRESS to local.",
    )


def fits_nowhere(each: Mapping[str, Any]) -> bool:
    """Whether no node of the cluster has the resources of an actor, even when it is idle."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return bool(nodes) and not any(
        all(has.get(name, 0) >= amount for name, amount in each.items()) for has in nodes
    )


def shortage(ready: int, wanted: int, each: Mapping[str, Any], within_s: float) -> ClusterError:
    """Return the error for actors that were not placed in time."""
    asked = resources_text(each) if each else "no named resources"
    if fits_nowhere(each):
        return ClusterError(
            f"No node of the cluster has {asked}, which each actor needs. {capacity()}",
            "Request less, or add such a node. If an autoscaler adds it, set start_timeout_s above "
            f"{START_TIMEOUT_S:g} s.",
        )
    return ClusterError(
        f"Only {ready} of {wanted} actors were placed within {within_s:g} s. Each needs {asked}. "
        f"{capacity()}",
        "Request fewer actors (parallelism) or fewer resources, add nodes, or raise "
        "start_timeout_s.",
    )


def capacity() -> str:
    """Describe the resources of the cluster, total and free."""
    return (
        f"The cluster has {resources_text(ray.cluster_resources())}; free are "
        f"{resources_text(ray.available_resources())}."
    )


def resources_text(resources: Mapping[str, Any]) -> str:
    """Return names and amounts, without the resources that Ray adds to each node."""
    shown = [
        f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "object_store_memory", "memory", "accelerator_type:"))
    ]
    return ", ".join(shown) or "nothing"


# -- A session with Ray, and its actors ------------------------------------------------------------
# Ray ends the process with exit code 1 if a thread enters its core while ``ray.shutdown()`` tears
# the core down. A thread is in the core during a call, also while the call waits, and while it
# drops the last reference to an answer or an actor. So threads other than the caller's use a
# session, which enters the core only
#
# - for short calls,
# - under the lock that ``ray.shutdown()`` holds,
# - after a check that the connection is still the same.
#
# These threads wait for answers outside of Ray, and hold no references of Ray.

GONE = (
    "Ray was shut down during the job. Unacknowledged messages are delivered again.",
    "End a job before ray.shutdown().",
)
"""Problem and remedy."""


class JobCancelled(Exception):  # noqa: N818 - ends a wait, is no error
    """The job has stopped or the actor was ended, so the caller stops waiting for its answer."""


class Session:
    """The connection to Ray with which a job or a worker started.

    Args:
        gone: Problem and remedy of the error after a shutdown of Ray.

    Raises:
        ClusterError: The program is not connected to Ray.
    """

    def __init__(self, gone: tuple[str, str] = GONE) -> None:
        self._gone = gone
        with _connect_or_shutdown_lock:
            if not ray.is_initialized():
                raise ClusterError(*gone)
            # With Ray Client, each check would be a request to the server.
            asks = not ray.util.client.ray.is_connected()
            self._id = ray.get_runtime_context().get_worker_id() if asks else None

    @property
    def lost(self) -> bool:
        """Whether Ray was shut down since, even if it was started again.

        If a shutdown is running, this waits until it has ended.
        """
        with _connect_or_shutdown_lock:
            if not ray.is_initialized():
                return True
            return self._id is not None and self._id != ray.get_runtime_context().get_worker_id()

    def check(self) -> None:
        """Check that the connection still exists.

        Raises:
            ClusterError: Ray was shut down.
        """
        if self.lost:
            raise ClusterError(*self._gone)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Prevent a shutdown during calls of Ray; for calls that do not wait for actors.

        Raises:
            ClusterError: Ray was shut down before.
        """
        with _connect_or_shutdown_lock:
            self.check()
            try:
                yield
            except BaseException as exc:
                # Frames of Ray hold references to its objects, and an error may live long.
                traceback.clear_frames(exc.__traceback__)
                raise

    def named(self, error: BaseException) -> KeyShardError:
        """Convert the error that ended a thread; after a shutdown Ray raises many types."""
        if isinstance(error, KeyShardError):
            return error
        if isinstance(error, SystemExit) or self.lost:
            named: KeyShardError = ClusterError(*self._gone)
            named.__cause__ = error
            return named
        return logged_error("The job", error)


class Actor:
    """An actor, which starts on construction.

    Args:
        session: The connection to Ray.
        make: Returns the actor's handle.

    Raises:
        ClusterError: Ray was shut down.
    """

    def __init__(self, session: Session, make: Callable[[], Any]) -> None:
        self._session = session
        self.process: tuple[int, str] | None = None
        """Its pid and host; ``None`` until it has told them, and after its end."""
        with session.inside():
            self.handle: Any = make()

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """Call a method. Pass the answer to :func:`forget` afterwards.

        Raises:
            ClusterError: Ray was shut down.
            JobCancelled: The actor was ended.
        """
        with self._session.inside():
            if self.handle is None:
                raise JobCancelled
            answer: Future[Any] = getattr(self.handle, method).remote(*args).future()
        return answer

    def end(self) -> None:
        """Kill the actor. Idempotent."""
        with _connect_or_shutdown_lock:
            handle, self.handle, self.process = self.handle, None, None
            try:
                if handle is not None:
                    with suppress(ClusterError), self._session.inside():  # without Ray it is gone
                        ray.kill(handle, no_restart=True)
            finally:
                del handle


def forget(*answers: Future[Any]) -> None:
    """Drop the references that answers hold: their destructors enter Ray's core."""
    with _connect_or_shutdown_lock:
        for answer in answers:
            answer.object_ref = None  # type: ignore[attr-defined]  # of ObjectRef.future()
