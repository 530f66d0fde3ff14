"""The way into Ray for threads that run beside the caller's.

Ray ends the process, with exit code 1, if a thread reaches its core while ``ray.shutdown()`` takes
that down. A call does that, a call that still waits, and the last reference to an answer or an
actor. So these threads enter Ray only here: for short calls, under the lock that
``ray.shutdown()`` holds, and after a look whether Ray is still the one that they began with. They
wait for answers outside of Ray, and hold no references of Ray's.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray._private.worker import _connect_or_shutdown_lock

from keyshard.core.lanes.failure import Failure
from keyshard.errors import ClusterError, KeyShardError

GONE = (
    "Ray was shut down while the job ran. Messages that were not acknowledged are delivered again. "
    "End a job before ray.shutdown()."
)


class GivenUp(Exception):  # noqa: N818 - ends a wait, no error
    """Nobody waits for an actor any more."""


class Session:
    """The connection to Ray that a job, or a worker, begins with.

    Args:
        gone: What the error says when Ray was shut down.

    Raises:
        ClusterError: There is none.
    """

    def __init__(self, gone: str = GONE) -> None:
        self._gone = gone
        with _connect_or_shutdown_lock:
            if not ray.is_initialized():
                raise ClusterError(gone)
            # Through Ray Client each question would be one to the server.
            asks = not ray.util.client.ray.is_connected()
            self._id = ray.get_runtime_context().get_worker_id() if asks else None

    @property
    def lost(self) -> bool:
        """Whether Ray was shut down since, whatever was started then; waits for a shutdown."""
        with _connect_or_shutdown_lock:
            if not ray.is_initialized():
                return True
            return self._id is not None and self._id != ray.get_runtime_context().get_worker_id()

    def check(self) -> None:
        """Check that it is there.

        Raises:
            ClusterError: It is not.
        """
        if self.lost:
            raise ClusterError(self._gone)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Call Ray, which nobody shuts down meanwhile; for calls that do not wait for actors.

        Raises:
            ClusterError: It was shut down before.
        """
        with _connect_or_shutdown_lock:
            self.check()
            try:
                yield
            except BaseException as exc:
                # The frames of Ray hold references, and an error lives long.
                traceback.clear_frames(exc.__traceback__)
                raise

    def named(self, error: BaseException) -> KeyShardError:
        """The error that ended a thread; Ray raises many types once it is shut down."""
        if isinstance(error, KeyShardError):
            return error
        if isinstance(error, SystemExit) or self.lost:
            named: KeyShardError = ClusterError(self._gone)
        else:
            named = KeyShardError(f"The job ended unexpectedly: {Failure.of(error).reason}.")
        named.__cause__ = error
        return named


class Actor:
    """An actor, which starts.

    Args:
        session: The connection to Ray.
        make: Makes it.

    Raises:
        ClusterError: Ray was shut down.
    """

    def __init__(self, session: Session, make: Callable[[], Any]) -> None:
        self._session = session
        with session.inside():
            self.handle: Any = make()

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """Call a method; :func:`forget` the answer.

        Raises:
            ClusterError: Ray was shut down.
            GivenUp: The actor was ended.
        """
        with self._session.inside():
            if self.handle is None:
                raise GivenUp
            answer: Future[Any] = getattr(self.handle, method).remote(*args).future()
        return answer

    def end(self) -> None:
        """Kill it, whatever it does. Idempotent."""
        with _connect_or_shutdown_lock:
            handle, self.handle = self.handle, None
            try:
                if handle is not None:
                    with suppress(ClusterError), self._session.inside():  # without Ray it is gone
                        ray.kill(handle, no_restart=True)
            finally:
                del handle


def forget(*answers: Future[Any]) -> None:
    """Drop what Ray refers to answers with: their destructors reach its core, too."""
    with _connect_or_shutdown_lock:
        for answer in answers:
            answer.object_ref = None  # type: ignore[attr-defined]  # of ObjectRef.future()
