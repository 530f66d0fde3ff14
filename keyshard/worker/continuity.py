"""Whether a topic partition is still the one that was received from.

A cluster that was wiped hands out the same ids again. What was received before would be taken for
delivered, or acknowledged, in the place of new entries that nobody would ever get. No client tells
that it reconnected; but a wiped cluster is away for a while, for all consumers of a topic partition
at once. After such an absence, and after a start, the topic partition is doubted: nothing is taken
from it, and nothing that was known before is acknowledged, until a Reader has shown an entry that
is what it was, or that all known ids have passed, or late entries only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from keyshard.broker.port import Broker
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.fingerprint import Known, may_be_late
from keyshard.errors import BrokerError, BrokerUnavailableError, UnreadableEntryError
from keyshard.reading.scan import Scan
from keyshard.worker.range_consumers import RangeConsumers
from keyshard.worker.shared_window import SharedWindow

LOOKS_S = 3.0
"""Absence that is noticed for certain, and longest time between two looks, seconds."""
COMPARE_S = 5.0
"""Longest time of one attempt to compare, seconds."""

_log = logging.getLogger(__name__)


class Shown(Enum):
    """What a Reader showed of a topic partition that is doubted."""

    SAME = auto()
    """An entry that is what it was."""
    PASSED = auto()
    """Only higher ids than any that are known: none can be handed out a second time."""
    OTHERS = auto()
    """Nothing that is known, but something else that may be as old."""
    NEWER = auto()
    """Nothing that is known, but something else that is newer, under lower ids. Taken, it would be
    what shows next time that nothing changed; what comes next tells."""
    NOTHING = auto()
    """Nothing at all."""


class Continuity:
    """Called by who looks at the connections, who receives and who acknowledges.

    Args:
        broker: Connection to read through.
        range_consumers: Whose connections are looked at.
        shared: Its window knows what was received.
    """

    def __init__(
        self, broker: Broker, range_consumers: RangeConsumers, shared: SharedWindow
    ) -> None:
        self._broker = broker
        self._range_consumers = range_consumers
        self._lock = shared.lock
        self._window = shared.window
        self._looked_s = time.monotonic()

    def look(self) -> None:
        """Look at the connections; to be called every second."""
        now_s = time.monotonic()
        away = self._range_consumers.away()
        with self._lock:
            if now_s - self._looked_s > LOOKS_S:
                # The process, or this machine, stood still.
                away = list(self._range_consumers.by_partition)
            self._looked_s = now_s
            for partition in map(self._window.known.get, away):
                if partition is not None:
                    partition.doubt()

    def may_receive(self, topic_partition: TopicPartition, entries: Iterable[EntryId]) -> bool:
        """Whether what came now, one entry at least, is to be taken; else it has to come again.

        Raises:
            TopicRecreatedError: The topic partition is another one.
        """
        if self._doubted(topic_partition) is None:
            return True
        try:
            # What came now may be from before, where nothing shows that it is the same.
            return self._shown(topic_partition, min(entries)) in (Shown.SAME, Shown.OTHERS)
        except BrokerError as exc:
            _log.debug("%s cannot be compared: %s", topic_partition, exc)
            return False

    def acknowledgeable(
        self, topic_partition: TopicPartition, entries: Sequence[EntryId]
    ) -> Sequence[EntryId]:
        """Those of some entries that may be acknowledged; of the rest nothing is stored.

        Raises:
            TopicRecreatedError: The topic partition is another one.
            BrokerError: What is stored could not be read (retriable).
        """
        known = self._doubted(topic_partition)
        if known is None or self._shown(topic_partition) is Shown.SAME:
            return entries
        return [entry_id for entry_id in entries if entry_id not in known]

    def _doubted(self, topic_partition: TopicPartition) -> Known | None:
        if time.monotonic() - self._looked_s > LOOKS_S:
            self.look()
        return self._known(topic_partition)

    def _known(self, topic_partition: TopicPartition) -> Known | None:
        partition = self._window.known.get(topic_partition)
        return None if partition is None else partition.doubted

    def _shown(self, topic_partition: TopicPartition, first: EntryId | None = None) -> Shown:
        """Read what is stored from where anything is known, or from ``first`` on if that is lower,
        to the first entry that shows something, perhaps behind all that is known."""
        with self._lock:
            known = self._known(topic_partition)
        if known is None:
            return Shown.SAME  # another thread was faster
        start, _ = known.span
        start = start if first is None else min(start, first)
        newest: EntryBlock | None = None
        unreadable: dict[EntryId, UnreadableEntryError] = {}
        deadline = time.monotonic() + COMPARE_S
        with Scan(self._broker, topic_partition, start, None, unreadable=unreadable) as scan:
            while not scan.done:
                if time.monotonic() > deadline:
                    raise BrokerUnavailableError(
                        f"What is stored in {topic_partition} could not be compared with what was "
                        "received before its connection was lost. Check the broker's load."
                    )
                blocks = scan.read()
                with self._lock:
                    partition = self._window.known.get(topic_partition)
                    for block in blocks:
                        if partition is None or partition.compare(topic_partition, block):
                            return Shown.SAME if block.id in known else Shown.PASSED
                        if newest is None or block.publish_ms > newest.publish_ms:
                            newest = block
                    if unreadable and (partition is None or partition.compare_id(max(unreadable))):
                        return Shown.PASSED
        if newest is None:
            return Shown.NOTHING
        if any(entry_id in known for entry_id in unreadable):
            return Shown.OTHERS  # something is stored under an id that is known
        late = may_be_late(topic_partition, known, newest)
        return Shown.OTHERS if late else Shown.NEWER
