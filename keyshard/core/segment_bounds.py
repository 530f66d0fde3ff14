"""Bounds of scalable topics: a position for each segment that existed when positions were noted.

Segments split and merge, so the segments of a topic are others than those of earlier positions. A
segment that came later contains only messages after these positions:

- If positions are starts, it is read from its beginning.
- If positions are ends, nothing of it is read.

The names of segments tell which came later: the segments of a hash follow each other by number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from keyshard.core.message import MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.read_bounds import Bound, Edge, parse_bound
from keyshard.core.topic_segments import HASHES, SCALABLE, is_segment, topic_of
from keyshard.errors import ConfigError, DataLossTrimmedError
from keyshard.redaction import listed, shown

_SEGMENT = re.compile(
    r"(?P<topic>segment://[^/\s]+/[^/\s]+/[^/\s]+)"
    r"/(?P<first>[0-9a-f]{4})-(?P<last>[0-9a-f]{4})-(?P<number>\d{1,18})"
)
_BEFORE_ALL = -1
"""Number of the partitions that a topic was migrated from: all segments came later."""


class _Place(NamedTuple):
    """The hashes of a segment, and its place in the order of the segments of a hash."""

    topic: str
    first_hash: int
    last_hash: int
    number: int

    def precedes(self, other: _Place) -> bool:
        """Return whether ``other`` came later, and has some of the hashes."""
        overlap = self.first_hash <= other.last_hash and other.first_hash <= self.last_hash
        return overlap and self.topic == other.topic and self.number < other.number


def segment_bounds(
    name: str,
    given: object,
    found: Collection[TopicPartition],
    topics: Collection[str],
    unnamed: Edge,
) -> tuple[dict[TopicPartition, Bound], dict[TopicPartition, Bound]]:
    """Parse the bound of each segment of scalable topics.

    Args:
        name: The option, for errors.
        given: One edge or time for all, or a mapping from names of segments to bounds.
        found: The segments of the topics, and the partitions that topics were migrated from.
        topics: The scalable topics.
        unnamed: Bound of a segment that came after the named ones.

    Returns:
        The bound of each segment, and the bounds of those that were deleted since.

    Raises:
        ConfigError: A bound is malformed, or a single position; a name is no segment of the topics,
            or a segment has no bound and did not come after the named ones.
    """
    if not isinstance(given, Mapping):
        bound = parse_bound(name, given)
        if isinstance(bound, MessageId):
            raise ConfigError(
                f"{name} is {shown(given)}, but a position belongs to one segment, and the "
                "segments of a scalable topic change.",
                "Write a position for each segment by its name, or 'earliest', 'latest' or a time.",
            )
        return dict.fromkeys(found, bound), {}
    named: dict[TopicPartition, Bound] = {}
    for key, value in given.items():
        where = _named(name, key, found, topics)
        if where in named:
            raise ConfigError(f"{name} names {where} twice.", "Name it once.")
        named[where] = parse_bound(f"{name} of {where}", value)
    places = {where: _place(where) for where in (*named, *found)}
    rest = sorted(set(found) - named.keys())
    others = [places[where] for where in named]
    if missing := [where for where in rest if not _came_later(places[where], others)]:
        raise ConfigError(
            f"{name} has no position for {listed(missing)}.",
            "Name every segment that existed when the positions were noted. A position may also "
            "be 'earliest' or 'latest'.",
        )
    bounds = {where: named.get(where, unnamed) for where in found}
    return bounds, {where: bound for where, bound in named.items() if where not in bounds}


def check_deleted(
    name: str, deleted: Mapping[TopicPartition, Bound], nothing: Edge
) -> DataLossTrimmedError | None:
    """Return the error for positions in segments that were deleted; ``None`` if there are none.

    Args:
        name: The option.
        deleted: Bounds of deleted segments.
        nothing: The bound of a segment of which nothing is wanted.
    """
    lost = sorted(where for where, bound in deleted.items() if bound is not nothing)
    if not lost:
        return None
    return DataLossTrimmedError(
        f"{name} has a position in {listed(lost)}, which the broker has deleted since. It is "
        "unknown whether there were messages after it.",
        "Take positions of the segments that exist, or begin at 'earliest'. To go on with the "
        "stored segments, set fail_on_data_loss to false.",
        topic_partition=lost[0].name,
        missing=str(deleted[lost[0]]),
    )


def _named(
    name: str, key: object, found: Collection[TopicPartition], topics: Collection[str]
) -> TopicPartition:
    """Return the segment that a key names, which exists or was deleted.

    Raises:
        ConfigError: It was never a segment of the topics.
    """
    text = key.name if isinstance(key, TopicPartition) else key
    where = TopicPartition.parse(text) if isinstance(text, str) else None
    if where in found:
        assert where is not None
        return where
    if where is not None and _was_deleted(where, found, topics):
        return where
    segments = listed(sorted(found))
    raise ConfigError(
        f"{name} names {shown(text)}, which is no segment of {listed(sorted(topics))}.",
        f"Choose from: {segments}.",
    )


def _was_deleted(
    where: TopicPartition, found: Collection[TopicPartition], topics: Collection[str]
) -> bool:
    """Return whether a topic partition that does not exist may have been a segment of a topic."""
    if not is_segment(where):
        scheme, _, path = where.topic.partition("://")
        return scheme == "persistent" and SCALABLE + path in topics
    if not _SEGMENT.fullmatch(where.name) or topic_of(where) not in topics:
        return False
    others = {
        _place(one).number for one in found if is_segment(one) and topic_of(one) == topic_of(where)
    }
    # A topic uses no number again, and its newest segment is never deleted.
    number = _place(where).number
    return number not in others and number < max(others, default=_BEFORE_ALL)


def _place(where: TopicPartition) -> _Place:
    match = _SEGMENT.fullmatch(where.name)
    if match is None:
        return _Place(where.topic.partition("://")[2], 0, HASHES - 1, _BEFORE_ALL)
    return _Place(
        match["topic"].partition("://")[2],
        int(match["first"], 16),
        int(match["last"], 16),
        int(match["number"]),
    )


def _came_later(one: _Place, named: Iterable[_Place]) -> bool:
    """Return whether some named segments precede ``one`` in all of its hashes, and follow none."""
    before: list[_Place] = []
    for other in named:
        if one.precedes(other):
            return False
        if other.precedes(one):
            before.append(other)
    reached = one.first_hash
    for other in sorted(before, key=lambda other: other.first_hash):
        if other.first_hash > reached:
            return False
        reached = max(reached, other.last_hash + 1)
    return reached > one.last_hash
