"""Scalable topics: a graph of segments that split and merge, and the order in which to read them.

A scalable topic of Pulsar 5, ``topic://tenant/namespace/name``, consists of segments. Each segment
has a part of the keys and is stored as a topic of its own,
``segment://tenant/namespace/name/0000-7fff-1``. A split or a merge seals segments and creates their
successors, and the next messages of a key go to a successor. So the messages of a parent come
before those of its children (PIP-460, PIP-468).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import mmh3

from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.core.ring.assignment import Assignment, assign
from keyshard.core.ring.key_slot import broker_text
from keyshard.errors import ConfigError
from keyshard.redaction import shown

SCALABLE = "topic://"
"""Beginning of the name of a scalable topic."""
SEGMENT = "segment://"
"""Beginning of the name of a segment."""
STARTING = "-keyshard-starting"
"""Suffix of the subscription that marks a start at positions which has not ended."""
UNESCAPED = "=:!$&'()*,@"
"""Characters beside letters, digits and ``-._~`` that need no escape in a URL. The admin interface
of 5.0.1 does not find a scalable topic if a character of its name is escaped."""
HASHES = 1 << 16
"""Number of hashes by which keys belong to segments."""

_NAME = re.compile(r"topic://[^/\s]+/[^/\s]+/[^/\s]+")


def is_scalable(topic: str) -> bool:
    """Return whether a name is that of a scalable topic."""
    return topic.startswith(SCALABLE)


def check_scalable(topic: str) -> str:
    """Return the name of a scalable topic.

    Raises:
        ConfigError: It is not ``topic://tenant/namespace/name``.
    """
    if not _NAME.fullmatch(topic):
        raise ConfigError(
            f"{shown(topic)} is not the name of a scalable topic.",
            "Write 'topic://tenant/namespace/topic'.",
        )
    if TopicPartition.parse(topic).partition >= 0:
        raise ConfigError(
            f"{shown(topic)} ends like a partition, and a scalable topic has segments instead.",
            "Leave out '-partition-' and the number.",
        )
    return topic


def received_topic_name(name: str) -> str:
    """Complete the name of a topic that messages come from, or of a segment.

    Raises:
        ConfigError: The name is neither.
    """
    if name.startswith(SEGMENT):
        return name
    return check_scalable(name) if is_scalable(name) else full_topic_name(name)


def is_segment(where: TopicPartition) -> bool:
    """Return whether a topic partition is a segment of a scalable topic."""
    return where.topic.startswith(SEGMENT)


_ONE_CONSUMER = assign(1)


def receiving(where: TopicPartition, assignment: Assignment) -> Assignment:
    """Return the hash ranges with a consumer of a topic partition.

    A segment has one consumer, of the whole ring, which counts as range 0. Producers of Pulsar 5
    put keys of different ranges into one entry, and the broker routes an entry by its first key. So
    with several consumers, entries of one key would come to several of them, in no common order
    (ADR 57).

    Args:
        where: The topic partition.
        assignment: Hash ranges of each owner.
    """
    return _ONE_CONSUMER if is_segment(where) else assignment


def consumers_each(wheres: Iterable[TopicPartition], assignment: Assignment) -> int:
    """Return the number of consumers of a topic partition, of the one that has most."""
    counts = (sum(map(len, receiving(where, assignment))) for where in wheres)
    return max(counts, default=sum(map(len, assignment)))


def topic_of(where: TopicPartition) -> str:
    """Return the topic that a topic partition belongs to; of a segment, its scalable topic."""
    return scalable_topic_of(where.topic)


def scalable_topic_of(name: str) -> str:
    """Return the scalable topic of a segment, by its name; any other name unchanged."""
    if not name.startswith(SEGMENT):
        return name
    return SCALABLE + name.removeprefix(SEGMENT).rpartition("/")[0]


def place_in_order(where: TopicPartition) -> tuple[str, int]:
    """Return the place of a topic partition in the order of the messages of a key.

    Returns:
        The scope in which its keys have an order, and a number there. Of a segment, these are its
        topic and its id, which is greater than those of its parents. Otherwise, its name and 0.
    """
    if not is_segment(where):
        return where.name, 0
    return topic_of(where), int(where.topic.rpartition("-")[2])


def reading_order(where: TopicPartition) -> tuple[str, int]:
    """Return the place of a topic partition among others, ancestors before their descendants.

    Segments of a topic come by their ids, and the old partitions of a migrated topic before them.
    Other topic partitions come by topic and number.
    """
    if not is_segment(where):
        return where.topic, where.partition
    return place_in_order(where)


@dataclass(frozen=True, slots=True)
class TopicSegment:
    """One segment of a scalable topic."""

    number: int
    """Its id, which the topic never uses again."""
    first_hash: int
    """First hash of its keys, 0 to 65535."""
    last_hash: int
    """Last hash of its keys, inclusive."""
    is_sealed: bool
    """Whether nothing more is published to it."""
    parents: frozenset[int] = frozenset()
    """Ids of the segments that it succeeds."""
    created_ms: int = 0
    """Time of its creation, milliseconds since the epoch."""
    stored_in: str = ""
    """Name of the topic that it was migrated from; empty if the segment has a topic of its own."""


@dataclass(frozen=True, slots=True)
class SegmentGraph:
    """The segments of a scalable topic at one moment.

    Source: ``ScalableTopicDAG`` in ``spec/scalable-topics/wire-protocol.md`` of Pulsar.
    """

    topic: str
    epoch: int
    """Number of the graph; it grows with each change."""
    segments: Mapping[int, TopicSegment]
    """Segments that are not deleted, by id."""

    def partition(self, number: int) -> TopicPartition:
        """Return the topic partition of a segment."""
        one = self.segments[number]
        if one.stored_in:
            return TopicPartition.parse(one.stored_in)
        base = self.topic.removeprefix(SCALABLE)
        return TopicPartition(f"{SEGMENT}{base}/{one.first_hash:04x}-{one.last_hash:04x}-{number}")

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """Topic partitions of all segments, by id."""
        return tuple(map(self.partition, sorted(self.segments)))

    @property
    def parents(self) -> Mapping[TopicPartition, frozenset[TopicPartition]]:
        """Parents of each segment that are not deleted; without segments that have none."""
        found = {
            self.partition(number): frozenset(
                self.partition(parent) for parent in one.parents if parent in self.segments
            )
            for number, one in self.segments.items()
        }
        return MappingProxyType({child: parents for child, parents in found.items() if parents})

    def precedes(self, newer: SegmentGraph) -> bool:
        """Return whether this is an earlier graph of the same topic than ``newer``, or the same.

        A topic that was deleted and created again begins again at the first epoch, with segments
        that are newer than all earlier ones.
        """
        latest, latest_of_newer = (
            max((one.created_ms for one in graph.segments.values()), default=0)
            for graph in (self, newer)
        )
        same = all(
            one.created_ms == newer.segments[number].created_ms
            for number, one in self.segments.items()
            if number in newer.segments
        )
        return same and self.epoch <= newer.epoch and latest <= latest_of_newer

    def precedes_segments(self, known: Iterable[TopicPartition]) -> bool:
        """Return whether some known segments of the topic are newer than all of this graph.

        The newest segment of a topic is never deleted before the topic. So this is an earlier graph
        of it, or the topic was deleted and created again.
        """
        newest = max(self.segments, default=-1)
        places = map(place_in_order, filter(is_segment, known))
        return any(name == self.topic and number > newest for name, number in places)

    def segment_of(self, key: str | bytes) -> TopicSegment:
        """Return the segment that a message with a key is published to.

        Keys belong to segments by the upper half of the hash whose lower half is their slot
        (``ScalableTopicHashing`` of Pulsar 5.0.1).
        """
        data = broker_text(key).encode() if isinstance(key, str) else key
        return self.open_segment(mmh3.hash(data, 0, signed=False) >> 16)

    def open_segment(self, key_hash: int) -> TopicSegment:
        """Return the segment that a message with a hash of its key is published to.

        Raises:
            ValueError: No open segment has the hash.
        """
        for one in self.segments.values():
            if not one.is_sealed and one.first_hash <= key_hash <= one.last_hash:
                return one
        raise ValueError(f"no open segment of {self.topic} has hash {key_hash:#06x}")


_Segments = Mapping[TopicPartition, frozenset[TopicPartition]]
"""Other segments of each segment."""


class SegmentOrder:
    """Decides which segments wait for their parents. Any thread may call it.

    All ranges of a child pause until each parent has ended: everything in it is acknowledged, or
    this source has received all of the rest. Meanwhile the consumers of the child are subscribed:
    the subscription keeps its messages.
    """

    def __init__(self) -> None:
        self._ended: set[TopicPartition] = set()
        self.parents: _Segments = {}
        """Parents of each segment that are not deleted. Replaced, never changed."""
        self._ancestors: tuple[_Segments, dict[TopicPartition, frozenset[TopicPartition]]] = (
            self.parents, {}
        )  # fmt: skip
        """The parents that ancestors were looked up in, and the ancestors. Replaced together."""

    def waits(self, where: TopicPartition) -> bool:
        """Return whether a segment waits for one of its parents."""
        parents = self.parents.get(where) if self.parents else None
        return parents is not None and not parents <= self._ended

    def waiting(self) -> int:
        """Return the number of segments that wait."""
        return sum(map(self.waits, self.parents))

    def ancestors(self, where: TopicPartition) -> frozenset[TopicPartition]:
        """Return the segments that a segment succeeds, also through others."""
        parents = self.parents
        if where not in parents:
            return frozenset()
        of, known = self._ancestors
        if of is not parents:
            known = {}
            self._ancestors = parents, known
        if where not in known:
            found, left = set[TopicPartition](), [where]
            while left:
                new = parents.get(left.pop(), frozenset()) - found
                found |= new
                left += new
            known[where] = frozenset(found)
        return known[where]

    def awaited(self) -> set[TopicPartition]:
        """Return the parents that some segment waits for, and that wait for none themselves."""
        found = {parent for parents in self.parents.values() for parent in parents - self._ended}
        return {parent for parent in found if not self.waits(parent)}

    def forget(self, gone: Collection[TopicPartition]) -> None:
        """Forget deleted segments: a topic that is created again has the same names."""
        self._ended.difference_update(gone)

    def end(self, parent: TopicPartition) -> None:
        """Note that a sealed segment has ended, which stays so."""
        self._ended.add(parent)
