"""Detects whether a topic partition is still the one that was received from.

A wiped cluster assigns the same ids again. New entries would then be taken for delivered ones, or
acknowledged in their place, and no consumer would get them. Clients do not report a reconnect. But
a wiped cluster is not reachable for a while, for all consumers of a topic partition at once.

So a topic partition is doubted after such an absence and after a start. While it is doubted, no
entry that was known before is acknowledged, and a Reader compares the stored entries with the known
ones before received entries are taken:

- A known entry is stored unchanged: the cluster was not wiped, and the doubt ends.
- An entry above all known ids is stored: ids only grow, so no known id can be assigned again. The
  doubt ends, and the received entries must come again.
- Only entries that may be as old as the known ones are stored, such as late entries of a slow
  range: received entries are taken, but the doubt stays.
- A stored entry proves that ids were assigned a second time, such as a known id with a later
  publish time: :class:`TopicRecreatedError` ends the source.
- Otherwise, no entry is taken, and the comparison is repeated later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from keyshard.broker.port import Broker
from keyshard.consumers.range_consumers import RangeConsumers
from keyshard.consumers.shared_window import SharedWindow
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.topic_identity import KnownEntries, may_be_late
from keyshard.errors import BrokerError, BrokerUnavailableError, UnreadableEntryError
from keyshard.reading.scan import Scan

CHECK_S = 3.0
"""Absence that is detected for certain, and longest time between two checks, seconds."""
COMPARE_S = 5.0
"""Longest time of one comparison, seconds."""

_log = logging.getLogger(__name__)


class Comparison(Enum):
    """Result of the comparison of a doubted topic partition."""

    SAME = auto()
    """A known entry is unchanged."""
    PASSED = auto()
    """No known entry, but one above all known ids: the broker cannot assign those again."""
    OTHERS = auto()
    """No known entry, but another one that may be as old."""
    NEWER = auto()
    """No known entry, but a newer one under a lower id. If it were taken, it would show next time
    that nothing changed. The next entries decide."""
    NOTHING = auto()
    """No entry at all."""


class IdentityCheck:
    """Doubts topic partitions after an absence, and compares their stored entries with known ones.

    The threads that check connections, receive and acknowledge call it.

    Args:
        broker: Connection for Readers.
        range_consumers: The consumers whose connections are checked.
        shared: Its window knows the received entries.
    """

    def __init__(
        self, broker: Broker, range_consumers: RangeConsumers, shared: SharedWindow
    ) -> None:
        self._broker = broker
        self._range_consumers = range_consumers
        self._lock = shared.lock
        self._window = shared.window
        self._checked_s = time.monotonic()

    def check_connections(self) -> None:
        """Check the connections. Call it every second."""
        now_s = time.monotonic()
        away = self._range_consumers.away()
        with self._lock:
            if now_s - self._checked_s > CHECK_S:
                # The process or the machine was suspended.
                away = list(self._range_consumers.by_partition)
            self._checked_s = now_s
            for partition in map(self._window.known.get, away):
                if partition is not None:
                    partition.doubt()

    def may_receive(self, topic_partition: TopicPartition, entries: Iterable[EntryId]) -> bool:
        """Whether received entries, at least one, may be taken; if not, they must come again.

        Raises:
            TopicRecreatedError: The topic partition was created again.
        """
        if self._doubted(topic_partition) is None:
            return True
        try:
            # If no entry shows that nothing was wiped, these may have been received before a wipe.
            return self._compare(topic_partition, {}, min(entries)) in (
                Comparison.SAME,
                Comparison.OTHERS,
            )
        except BrokerError as exc:
            _log.debug("%s cannot be compared: %s", topic_partition, exc.summary)
            return False

    def acknowledgeable(
        self, topic_partition: TopicPartition, entries: Sequence[EntryId]
    ) -> Sequence[EntryId]:
        """Return the entries that may be acknowledged; the others are no longer stored.

        An unreadable entry under a known id may be acknowledged: it ends no doubt, and a sealed
        segment gets no entry that would end it.

        Raises:
            TopicRecreatedError: The topic partition was created again.
            BrokerError: The stored entries could not be read (retriable).
        """
        known, unreadable = self._doubted(topic_partition), dict[EntryId, UnreadableEntryError]()
        if known is None or self._compare(topic_partition, unreadable) is Comparison.SAME:
            return entries
        return [one for one in entries if one not in known or one in unreadable]

    def _doubted(self, topic_partition: TopicPartition) -> KnownEntries | None:
        if time.monotonic() - self._checked_s > CHECK_S:
            self.check_connections()
        return self._known(topic_partition)

    def _known(self, topic_partition: TopicPartition) -> KnownEntries | None:
        partition = self._window.known.get(topic_partition)
        return None if partition is None else partition.doubted

    def _compare(
        self,
        topic_partition: TopicPartition,
        unreadable: dict[EntryId, UnreadableEntryError],
        first: EntryId | None = None,
    ) -> Comparison:
        """Read stored entries up to the first one that ends the doubt, or to the last.

        The read begins at the first known entry, or at ``first`` if that is lower. It may end after
        all known entries. Unreadable entries are put into ``unreadable``.
        """
        with self._lock:
            known = self._known(topic_partition)
        if known is None:
            return Comparison.SAME  # another thread was faster
        start, _ = known.span
        start = start if first is None else min(start, first)
        newest: EntryBlock | None = None
        deadline = time.monotonic() + COMPARE_S
        with Scan(self._broker, topic_partition, start, None, unreadable=unreadable) as scan:
            while not scan.done:
                if time.monotonic() > deadline:
                    raise BrokerUnavailableError(
                        f"The entries of {topic_partition} could not be compared with those "
                        "received before the connection was lost.",
                        "Check the load of the broker.",
                    )
                blocks = scan.read()
                with self._lock:
                    partition = self._window.known.get(topic_partition)
                    for block in blocks:
                        if partition is None or partition.compare(topic_partition, block):
                            return Comparison.SAME if block.id in known else Comparison.PASSED
                        if newest is None or block.publish_ms > newest.publish_ms:
                            newest = block
                    if unreadable and (partition is None or partition.compare_id(max(unreadable))):
                        return Comparison.PASSED
        if any(entry_id in known for entry_id in unreadable):
            return Comparison.OTHERS  # an entry is stored under a known id
        if newest is None:
            return Comparison.NOTHING
        late = may_be_late(topic_partition, known, newest)
        return Comparison.OTHERS if late else Comparison.NEWER
