"""Watches the scalable topics of a namespace, and the segments of single topics.

Each watch is a session of the protocol, and sessions share a connection of their own. The broker
answers the command that opens a session, and then pushes changes. Of a topic it sends the
whole graph of the segments again, of a namespace the names of created and deleted topics. Source:
``spec/scalable-topics/wire-protocol.md`` of Pulsar, sections 4 and 7.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import suppress
from typing import Any

from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.connection_pool import ConnectionPool
from keyshard.broker.wire.errors import NOT_AUTHENTICATED, RefusedError
from keyshard.broker.wire.frames import Frame, api
from keyshard.broker.wire.requests import new_id
from keyshard.core.topic_segments import HASHES, SCALABLE, SegmentGraph, TopicSegment
from keyshard.errors import BrokerUnavailableError, ConfigError

ABSENT = "Scalable topic not found"
"""The broker's text for a topic that does not exist."""
LOOK_S = 0.05
"""Time between two looks whether the connection still stands, seconds."""
_SEALED = 1


class _Watch(ABC):
    """One session. The reading thread calls :meth:`take`.

    Args:
        at: The connection.
        number: Id of the session.
    """

    def __init__(self, at: WireConnection, number: int) -> None:
        self.first: Future[None] = Future()
        """Done with the first report."""
        self._at = at
        self._number = number
        self._over = False

    @property
    def is_open(self) -> bool:
        return self._at.is_open and not self._over

    def close(self) -> None:
        if not self._over:
            self._over = True
            with suppress(BrokerUnavailableError):
                self._end()

    @abstractmethod
    def begin(self) -> None:
        """Send the command that opens the session."""

    @abstractmethod
    def take(self, update: Any) -> None:
        """Take a report."""

    @abstractmethod
    def _end(self) -> None:
        """Send the command that closes the session."""

    def _refused(self, update: Any) -> None:
        self._over = True
        with suppress(InvalidStateError):
            self.first.set_exception(RefusedError(update.error, update.message))


class WireSegmentWatch(_Watch):
    """The segments of one scalable topic.

    Args:
        topic: ``topic://tenant/namespace/name``.
        changed: Called by the reading thread when the segments changed.
        at: The connection.
        number: Id of the session.
    """

    def __init__(
        self, topic: str, changed: Callable[[], None], at: WireConnection, number: int
    ) -> None:
        super().__init__(at, number)
        self.graph: SegmentGraph
        self._topic = topic
        self._changed = changed

    def begin(self) -> None:
        # Without the third field, the broker creates a missing topic.
        self._at.send("scalable_topic_lookup", api.ScalableTopicLookup(
            session_id=self._number, topic=self._topic.encode(), create_if_missing=False
        ))  # fmt: skip

    def take(self, update: Any) -> None:
        first = self.first.done()
        if update.HasField("error") or not update.HasField("graph"):
            self._refused(update)
        elif not first:
            self.graph = _graph_of(self._topic, update.graph)
            self.first.set_result(None)
        elif not (found := _graph_of(self._topic, update.graph)).precedes(self.graph):
            self.graph = found
        if first:
            self._changed()

    def _end(self) -> None:
        self._at.send("scalable_topic_close", api.ScalableTopicClose(session_id=self._number))


class WireNamespaceWatch(_Watch):
    """The names of the scalable topics of one namespace.

    Args:
        namespace: ``tenant/namespace``.
        changed: Called by the reading thread with the names of created and deleted topics.
        at: The connection.
        number: Id of the session.
    """

    def __init__(
        self,
        namespace: str,
        changed: Callable[[Sequence[str]], None],
        at: WireConnection,
        number: int,
    ) -> None:
        super().__init__(at, number)
        self._namespace = namespace
        self._changed = changed

    def begin(self) -> None:
        self._at.send("watch_scalable_topics", api.WatchScalableTopics(
            watch_id=self._number, namespace=self._namespace.encode()
        ))  # fmt: skip

    def take(self, update: Any) -> None:
        if update.HasField("error"):
            self._refused(update)
        elif self.first.done():
            names = (*update.diff.added, *update.diff.removed, *update.snapshot.topics)
            self._changed([name.decode(errors="replace") for name in names])
        else:
            # A look at the topics follows, so their names are not needed.
            self.first.set_result(None)

    def _end(self) -> None:
        self._at.send(
            "watch_scalable_topics_close", api.WatchScalableTopicsClose(watch_id=self._number)
        )


class ScalableWatches:
    """Watches on a connection that nothing else uses.

    Args:
        pool: Opens the connection.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._opening = threading.Lock()
        self._at: WireConnection | None = None
        self._lock = threading.Lock()
        self._watches: dict[int, _Watch] = {}
        """Watches by the ids of their sessions; those that are over until the next one is opened.
        """

    def of_segments(
        self, topic: str, changed: Callable[[], None], timeout_s: float
    ) -> WireSegmentWatch:
        """Watch the segments of a topic.

        Args:
            topic: ``topic://tenant/namespace/name``.
            changed: Called by the reading thread when the segments changed.
            timeout_s: Longest wait for the first graph, seconds.

        Raises:
            ConfigError: The broker does not know scalable topics.
            BrokerUnavailableError: No answer in time (retriable).
            RefusedError: The broker refuses, or the topic does not exist.
        """
        end_s = time.monotonic() + timeout_s
        at = self._connection(end_s)
        if not at.features.supports_scalable_topics:
            raise ConfigError(
                f"The broker at {at.address} does not know scalable topics, so {topic} "
                "cannot be consumed.",
                "Name a persistent topic, or use a broker of Pulsar 5.0 or later.",
            )
        number = new_id()
        watch = WireSegmentWatch(topic, changed, at, number)
        self._open(number, watch, at, end_s, f"the segments of {topic}")
        return watch

    def of_topics(
        self, prefix: str, changed: Callable[[Sequence[str]], None], timeout_s: float
    ) -> WireNamespaceWatch | None:
        """Watch the topics of a namespace.

        Args:
            prefix: Beginning of their names, with the namespace. The broker reports others, too.
            changed: Called by the reading thread with the names of created and deleted topics.
            timeout_s: Longest wait for the first answer, seconds.

        Returns:
            ``None`` if the broker does not report topics.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
            RefusedError: The broker refuses.
        """
        end_s = time.monotonic() + timeout_s
        at = self._connection(end_s)
        if not at.features.supports_scalable_topics:
            return None
        number, namespace = new_id(), prefix.removeprefix(SCALABLE).rpartition("/")[0]
        watch = WireNamespaceWatch(namespace, changed, at, number)
        self._open(number, watch, at, end_s, f"the scalable topics of {namespace}")
        return watch

    def _connection(self, end_s: float) -> WireConnection:
        """Return the connection; open another one if it is lost or unresponsive."""
        if not self._opening.acquire(timeout=max(0.001, end_s - time.monotonic())):
            raise BrokerUnavailableError(
                "No connection for reports of scalable topics was opened in time.",
                "Check that the broker is running.",
            )
        try:
            at = self._at
            if at is None or not at.is_open or at.unresponsive():
                if at is not None:
                    at.close("it was replaced")  # Its watches are over, and are opened again.
                left_s = max(0.001, end_s - time.monotonic())
                self._at = at = self._pool.apart(self._pushed, left_s)
            return at
        finally:
            self._opening.release()

    def _open(
        self,
        number: int,
        watch: _Watch,
        at: WireConnection,
        end_s: float,
        what: str,
    ) -> None:
        """Open a session, and wait for its first report."""
        with self._lock:
            self._watches = {key: one for key, one in self._watches.items() if one.is_open}
            self._watches[number] = watch
        try:
            watch.begin()
            while at.is_open and (left_s := end_s - time.monotonic()) > 0:
                with suppress(NoAnswerError):
                    watch.first.result(min(LOOK_S, left_s))
                    return
            raise BrokerUnavailableError(
                f"The broker at {at.address} did not report {what}.", "Check its load."
            )
        except BaseException as exc:
            watch.close()
            if isinstance(exc, RefusedError) and exc.code == NOT_AUTHENTICATED:
                self._pool.retire(at)
            raise

    def _pushed(self, frame: Frame) -> None:
        """Hand a report to its watch. Called by the reading thread."""
        update = frame.command
        if frame.name == "scalable_topic_update":
            watch = self._watches.get(update.session_id)
        elif frame.name == "watch_scalable_topics_update":
            watch = self._watches.get(update.watch_id)
        else:
            return
        if watch is not None and watch.is_open:
            watch.take(update)


def _graph_of(topic: str, found: Any) -> SegmentGraph:
    segments = {
        one.segment_id: TopicSegment(
            one.segment_id,
            one.hash_start % HASHES,
            one.hash_end % HASHES,
            one.state == _SEALED,
            frozenset(one.parent_ids),
            one.created_at_ms,
            one.legacy_topic_name.decode(errors="replace"),
        )
        for one in found.segments
    }
    return SegmentGraph(topic, found.epoch, segments)
