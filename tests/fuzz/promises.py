"""Promises of the public API under any input."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from keyshard.broker.memory import MemoryCluster, cluster
from keyshard.errors import KeyShardError, NotRunningError
from tests.fuzz.values import SECRET
from tests.support.deadlines import DeadlineError, deadline, in_time

END_S = deadline(30)
"""Longest time of one call that the fuzzer makes, seconds."""
HANDLED_S = deadline(20)
"""Longest time until a source that takes its options handles a few messages, seconds."""
SENTENCE_CHARS_MAX = 2_000
"""An error is a sentence or a few, not a dump."""


class BrokenPromiseError(AssertionError):
    """A promise does not hold."""


def promise(holds: object, what: str) -> None:
    """Raise where something does not hold."""
    if not holds:
        raise BrokenPromiseError(what)


def promise_in_time(holds: object, end_s: float, what: str) -> None:
    """Raise where something does not hold: a ``DeadlineError`` if the time for it has passed."""
    if not holds:
        in_time(end_s, what)
    promise(holds, what)


def refused(call: Callable[[], Any], what: str) -> Any:
    """Return the result of a call, or its keyshard error, and check the text of that error.

    Raises:
        BrokenPromiseError: The call raised another error, or one whose text has no code, is too
            long or shows a secret.
    """
    try:
        return call()
    except KeyShardError as error:
        text = str(error)
        promise(text.startswith("[KEYSHARD_"), f"{what}: an error without its code: {text[:200]}")
        promise(
            len(text) <= SENTENCE_CHARS_MAX,
            f"{what}: an error of {len(text)} characters: {text[:200]}",
        )
        promise(SECRET not in text + repr(error), f"{what}: an error shows a secret: {text}")
        return error
    except DeadlineError:
        raise
    except Exception as error:
        raise BrokenPromiseError(
            f"{what}: a raw {type(error).__name__}\n{''.join(traceback.format_exception(error))}"
        ) from error


class Ended:
    """Run a call in its own thread; it must end."""

    def __init__(self, call: Callable[[], Any], what: str) -> None:
        self.result: Any = None
        self._what = what
        self._broken: BaseException | None = None

        def run() -> None:
            try:
                self.result = refused(call, what)
            except BaseException as error:  # noqa: BLE001 - it is raised in join
                self._broken = error

        self._thread = threading.Thread(target=run, name="fuzzed", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, stop: Callable[[], None]) -> None:
        """Stop the source of the call, unless the call ends by itself before the source runs."""
        end = time.monotonic() + END_S
        while self.alive and not _stopped(stop) and time.monotonic() < end:
            self._thread.join(0.01)

    def join(self) -> Any:
        """The result of :func:`refused`."""
        self._thread.join(END_S)
        if self.alive:
            raise DeadlineError(f"{self._what}: not at its end after {END_S:.0f} s")
        if self._broken is not None:
            raise self._broken
        return self.result


def _stopped(stop: Callable[[], None]) -> bool:
    try:
        stop()
    except NotRunningError:
        return False
    return True


class Cluster:
    """An in-memory cluster at a URL of its own, with one topic; a context manager."""

    def __init__(self, name: str, partitions: int) -> None:
        self.url = f"memory://{name}"
        self._name = name
        self.memory = MemoryCluster.named(name)
        self.topic = self.memory.create_topic("orders", partitions=partitions)

    def backlog(self, subscription: str = "keyshard") -> int:
        """Messages that are not acknowledged, over all topic partitions."""
        return sum(
            self.memory.backlog(where, subscription)
            for where in self.memory.partitions(self.topic)
            if subscription in self.memory.subscriptions(where)
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        cluster._NAMED.pop(self._name, None)
