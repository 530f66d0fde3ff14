"""Watches the segments of a scalable topic.

The session is a lookup that stays open: the broker answers it with the graph of the segments, and
sends the whole graph again after each change. Source: ``spec/scalable-topics/wire-protocol.md`` of
Pulsar, section 4.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import suppress
from typing import Any

from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.connection_pool import ConnectionPool
from keyshard.broker.wire.errors import RefusedError
from keyshard.broker.wire.frames import Frame, api
from keyshard.broker.wire.requests import new_id
from keyshard.core.topic_segments import HASHES, SegmentGraph, TopicSegment
from keyshard.errors import BrokerUnavailableError, ConfigError

ABSENT = "Scalable topic not found"
"""The broker's text for a topic that does not exist."""
LOOK_S = 0.05
"""Time between two looks whether the connection still stands, seconds."""
_SEALED = 1


class WireSegmentWatch:
    """The segments of one scalable topic, on a connection of its own.

    Args:
        pool: Opens the connection.
        topic: ``topic://tenant/namespace/name``.
        changed: Called by the reading thread when the segments changed.
        timeout_s: Longest wait for the first graph, seconds.

    Raises:
        ConfigError: The broker does not know scalable topics.
        BrokerUnavailableError: No answer in time (retriable).
        RefusedError: The broker refuses, or the topic does not exist.
    """

    def __init__(
        self, pool: ConnectionPool, topic: str, changed: Callable[[], None], timeout_s: float
    ) -> None:
        end_s = time.monotonic() + timeout_s
        self._topic = topic
        self._changed = changed
        self._session = new_id()
        self._first: Future[None] = Future()
        self.graph: SegmentGraph
        self._over = False
        self._at = pool.apart(self._pushed, timeout_s)
        try:
            self._begin(self._at, end_s)
        except BaseException:
            self._at.close()
            raise

    def _begin(self, at: WireConnection, end_s: float) -> None:
        if not at.features.supports_scalable_topics:
            raise ConfigError(
                f"The broker at {at.address} does not know scalable topics, so {self._topic} "
                "cannot be consumed.",
                "Name a persistent topic, or use a broker of Pulsar 5.0 or later.",
            )
        # Without the third field, the broker creates a missing topic.
        at.send(
            "scalable_topic_lookup",
            api.ScalableTopicLookup(
                session_id=self._session, topic=self._topic.encode(), create_if_missing=False
            ),
        )
        while at.is_open and (left_s := end_s - time.monotonic()) > 0:
            with suppress(NoAnswerError):
                self._first.result(min(LOOK_S, left_s))
                return
        raise BrokerUnavailableError(
            f"The broker at {at.address} did not report the segments of {self._topic}.",
            "Check its load.",
        )

    @property
    def is_open(self) -> bool:
        return self._at.is_open and not self._over

    def close(self) -> None:
        self._over = True
        self._at.close()

    def _pushed(self, frame: Frame) -> None:
        """Take a report. Called by the reading thread."""
        update = frame.command
        if frame.name != "scalable_topic_update" or update.session_id != self._session:
            return
        first = self._first.done()
        if update.HasField("error") or not update.HasField("graph"):
            with suppress(InvalidStateError):
                self._first.set_exception(RefusedError(update.error, update.message))
            self._over = True
        elif not first:
            self.graph = _graph_of(self._topic, update.graph)
            self._first.set_result(None)
        elif not (found := _graph_of(self._topic, update.graph)).precedes(self.graph):
            self.graph = found
        if first:
            self._changed()


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
