"""Bounds of scalable topics: positions by segment, after segments split and merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from keyshard.core.message import MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.read_bounds import Bound, Edge
from keyshard.core.segment_bounds import check_deleted, segment_bounds
from keyshard.errors import ConfigError

TOPIC = "topic://public/default/orders"
LOW, HIGH = "0000-7fff-0", "8000-ffff-1"
LOW_LOW, LOW_HIGH = "0000-3fff-2", "4000-7fff-3"
MERGED = "4000-ffff-4"


def segment(name: str, topic: str = "orders") -> TopicPartition:
    return TopicPartition(f"segment://public/default/{topic}/{name}")


def parsed(
    given: Mapping[Any, Any], *found: str, partitions: int = 0
) -> tuple[dict[TopicPartition, Bound], dict[TopicPartition, Bound]]:
    old = [TopicPartition("persistent://public/default/orders", one) for one in range(partitions)]
    wheres = [*old, *map(segment, found)]
    named = {
        segment(key).name if key[:1] in "0123456789abcdef" else key: one
        for key, one in given.items()
    }
    return segment_bounds("start", named, wheres, [TOPIC], Edge.EARLIEST)


def test_each_named_segment_has_its_bound() -> None:
    bounds, deleted = parsed({LOW: "3:7", HIGH: "latest"}, LOW, HIGH)
    assert bounds == {segment(LOW): MessageId(3, 7, 0), segment(HIGH): Edge.LATEST}
    assert not deleted


@pytest.mark.parametrize(
    ("given", "found", "later"),
    [
        ([LOW, HIGH], [LOW, HIGH, LOW_LOW, LOW_HIGH], [LOW_LOW, LOW_HIGH]),
        ([LOW, HIGH], [LOW, HIGH, LOW_LOW, LOW_HIGH, MERGED], [LOW_LOW, LOW_HIGH, MERGED]),
        ([HIGH, LOW_LOW, LOW_HIGH], [HIGH, LOW_LOW, LOW_HIGH, MERGED], [MERGED]),
    ],
)
def test_segments_that_came_later_have_the_bound_of_unnamed_ones(
    given: list[str], found: list[str], later: list[str]
) -> None:
    bounds, deleted = parsed(dict.fromkeys(given, "3:7"), *found)
    assert {where for where, bound in bounds.items() if bound is Edge.EARLIEST} == {
        segment(one) for one in later
    }
    assert set(bounds) == set(map(segment, found))
    assert not deleted


def test_segments_that_came_after_deleted_ones_are_known_by_their_names() -> None:
    bounds, deleted = parsed({LOW: "3:7", HIGH: "4:0"}, LOW_LOW, MERGED)
    assert bounds == dict.fromkeys(map(segment, (LOW_LOW, MERGED)), Edge.EARLIEST)
    assert deleted == {segment(LOW): MessageId(3, 7, 0), segment(HIGH): MessageId(4, 0, 0)}


def test_all_segments_came_after_the_partitions_of_a_migrated_topic() -> None:
    old = {f"persistent://public/default/orders-partition-{one}": "3:7" for one in range(2)}
    bounds, deleted = parsed(old, LOW, HIGH, partitions=2)
    assert [bounds[segment(one)] for one in (LOW, HIGH)] == [Edge.EARLIEST] * 2
    assert not deleted
    bounds, deleted = parsed(old, LOW, HIGH)
    assert len(deleted) == 2
    assert set(bounds.values()) == {Edge.EARLIEST}


@pytest.mark.parametrize(
    ("given", "found", "text"),
    [
        ([LOW], [LOW, HIGH], f"no position for .*{HIGH}"),
        ([LOW], [LOW, HIGH, LOW_HIGH, MERGED], f"no position for .*{MERGED}.*{HIGH}"),
        ([LOW_LOW, HIGH], [LOW, HIGH, LOW_LOW, LOW_HIGH], f"no position for .*{LOW}.*{LOW_HIGH}"),
        ([], [LOW, HIGH], "no position for"),
    ],
)
def test_a_segment_that_existed_needs_a_position(
    given: list[str], found: list[str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        parsed(dict.fromkeys(given, "3:7"), *found)
    assert "Name every segment that existed" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "0000-7fff-9",  # newer than all segments
        "0000-3fff-1",  # the number of a segment with other hashes
        "segment://public/default/others/0000-7fff-0",
        "segment://public/default/orders/0-7-0",
        "persistent://public/default/others-partition-0",
        "topic://public/default/orders",
        "orders",
    ],
)
def test_a_name_of_no_segment_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)is no segment of .*{TOPIC}.*Choose from"):
        parsed({LOW: "3:7", HIGH: "3:7", name: "3:7"}, LOW, HIGH, LOW_LOW, LOW_HIGH)


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="start names 7, which is no segment"):
        segment_bounds("start", {7: "3:7"}, [segment(LOW)], [TOPIC], Edge.EARLIEST)


def test_a_segment_is_named_once() -> None:
    given = {segment(LOW): "3:7", segment(LOW).name: "3:8"}
    with pytest.raises(ConfigError, match="twice"):
        segment_bounds("start", given, [segment(LOW)], [TOPIC], Edge.EARLIEST)


def test_topics_do_not_precede_one_another() -> None:
    other = segment("0000-ffff-9", "others")
    topics = [TOPIC, "topic://public/default/others"]
    with pytest.raises(ConfigError, match=r"no position for .*others"):
        segment_bounds("start", {segment(LOW): "3:7"}, [segment(LOW), other], topics, Edge.EARLIEST)


def test_an_edge_or_a_time_holds_for_all_segments_and_a_single_position_for_none() -> None:
    wheres = [segment(LOW), segment(HIGH)]
    for given in ("earliest", "latest", 1_800_000_000_000):
        bounds, deleted = segment_bounds("end", given, wheres, [TOPIC], Edge.EARLIEST)
        assert set(bounds) == set(wheres)
        assert len(set(bounds.values())) == 1
        assert not deleted
    with pytest.raises(ConfigError, match="end is '3:7', but a position belongs to one segment"):
        segment_bounds("end", "3:7", wheres[:1], [TOPIC], Edge.EARLIEST)


def test_positions_in_deleted_segments_are_named_unless_nothing_was_wanted_there() -> None:
    assert check_deleted("start", {}, Edge.LATEST) is None
    assert check_deleted("start", {segment(LOW): Edge.LATEST}, Edge.LATEST) is None
    error = check_deleted("start", {segment(LOW): MessageId(3, 7, 0)}, Edge.LATEST)
    assert error is not None
    assert f"start has a position in segment://public/default/orders/{LOW}" in str(error)
    assert error.facts["missing"] == "3:7:0"
