"""Positions at which a bounded read starts and ends: also missing ones."""

from __future__ import annotations

from itertools import pairwise

import pytest

from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId
from keyshard.core.position.split import cut
from keyshard.errors import (
    ConfigError,
    DataLossTrimmedError,
    KeyShardError,
    PositionAheadError,
    TopicRecreatedError,
)
from tests.support.faulty_broker import faulty
from tests.support.split_topic import T0, SplitTopic, without

pytestmark = pytest.mark.usefixtures("reads_in_no_time")


def test_positions_are_exact_also_inside_a_batch(split_topic: SplitTopic) -> None:
    where, *others = split_topic.partitions
    own = [(one, MessageId(*map(int, name.split(":")))) for one, name in split_topic.ids if not one]
    bounds = [position for _, position in own]
    bounds += [MessageId(one.ledger, one.entry + 1, 0) for one in bounds]
    bounds += [one._replace(batch_index=one.batch_index + 1) for one in bounds[: len(own)]]
    rest = dict.fromkeys(others, "latest")
    for start in bounds:
        for end in bounds[:: 1 + len(bounds) // 9]:
            if start > end:
                continue
            expected = [(0, str(one)) for _, one in own if start <= one < end]
            planned = cut(split_topic.plan({where: start, **rest}, {where: end, **rest}), 4)
            assert split_topic.read(planned) == expected, (start, end)


def test_each_read_begins_where_the_one_before_ended(split_topic: SplitTopic) -> None:
    names = [name for partition, name in split_topic.ids if partition == 0]
    rest = dict.fromkeys(split_topic.partitions[1:], "latest")
    at = ["earliest", *names[::4], "latest"]
    found = []
    for start, end in pairwise(at):
        found += split_topic.read(
            split_topic.plan(
                {split_topic.partitions[0]: start, **rest}, {split_topic.partitions[0]: end, **rest}
            )
        )
    assert found == [(0, name) for name in names]


@pytest.mark.parametrize("bound", ["start", "end"])
@pytest.mark.parametrize(
    ("ledger", "entry", "error", "rest"),
    [
        (1, 9, TopicRecreatedError, {"start": 7, "end": 14}),  # that ledger has seven entries
        (0, 1, DataLossTrimmedError, {"start": 21, "end": 0}),
        (2, 8, PositionAheadError, {"start": 0, "end": 21}),
        (99, 0, PositionAheadError, {"start": 0, "end": 21}),
    ],
)
def test_a_position_of_a_missing_entry_is_named_or_stored_entries_are_read(  # noqa: PLR0917
    split_topic: SplitTopic, bound: str, ledger: int, entry: int, error: type[KeyShardError],
    rest: dict[str, int],
) -> None:  # fmt: skip
    where, *others = split_topic.partitions
    ledgers = [span.ledger for span in split_topic.plan()[0].spans]
    number = ledgers[ledger] if ledger < 3 and error is not DataLossTrimmedError else ledger
    given = {where: f"{number}:{entry}", **dict.fromkeys(others, "latest")}
    with pytest.raises(error, match=f"{bound} of {where} is {number}:{entry}:0") as caught:
        split_topic.plan(**{bound: given})
    assert caught.value.facts["topic_partition"] == where.name
    (planned, *_) = split_topic.plan(**{bound: given}, fail_on_data_loss=False)
    assert planned.entries == rest[bound]


@pytest.mark.parametrize("bound", ["start", "end"])
@pytest.mark.parametrize(("ledger", "error"), [(1, TopicRecreatedError), (2, PositionAheadError)])
def test_a_place_inside_an_entry_that_is_not_there_is_named(
    split_topic: SplitTopic, bound: str, ledger: int, error: type[KeyShardError]
) -> None:
    """A read up to there has not one of its messages, and a stream from there would skip some."""
    where, *others = split_topic.partitions
    span = split_topic.plan()[0].spans[ledger]
    given = {where: f"{span.ledger}:{span.end}:2", **dict.fromkeys(others, "latest")}
    with pytest.raises(error, match=f"{bound} of {where} is {span.ledger}:{span.end}:2"):
        split_topic.plan(**{bound: given})
    inside = given | {where: f"{span.ledger}:{span.end - 1}:999"}
    assert split_topic.plan(**{bound: inside})[0].end is not None


def test_the_place_of_an_empty_ledger_that_the_broker_removed_is_the_next_one(
    split_topic: SplitTopic,
) -> None:
    """1. A read ends before the first entry of a ledger; 2. that closes empty, and is removed."""
    where, *others = split_topic.partitions
    ledgers = [span.ledger for span in split_topic.plan()[0].spans]
    faulty(split_topic.admin, ledgers=without([ledgers[1]]))
    given = {where: f"{ledgers[1]}:0", **dict.fromkeys(others, "latest")}
    assert split_topic.plan(start=given)[0].first == EntryId(ledgers[2], 0)
    with pytest.raises(TopicRecreatedError):
        split_topic.plan(start=given | {where: f"{ledgers[1]}:1"})


@pytest.mark.parametrize("bound", ["start", "end"])
def test_a_position_that_is_trimmed_is_named(split_topic: SplitTopic, bound: str) -> None:
    where, *others = split_topic.partitions
    first = split_topic.plan()[0].first
    split_topic.cluster.trim(where, EntryId(first.ledger + 1, 0))
    given = {where: f"{first.ledger}:3", **dict.fromkeys(others, "latest")}
    with pytest.raises(DataLossTrimmedError, match=f"^.*{bound} of {where} is {first.ledger}:3:0"):
        split_topic.plan(**{bound: given})
    planned = split_topic.plan(**{bound: given}, fail_on_data_loss=False)
    assert planned[0].entries == (14 if bound == "start" else 0)


def test_the_end_of_a_read_is_the_start_of_the_next_where_all_of_it_is_trimmed(
    split_topic: SplitTopic,
) -> None:
    """1. A read ends; 2. its last ledger closes, and retention removes it; 3. nothing is new."""
    ends = {one.topic_partition.name: str(one.end) for one in split_topic.plan()}
    for where in split_topic.partitions:
        split_topic.cluster.roll_ledger(where)
        split_topic.cluster.trim(where, EntryId(10**6, 0))
    again = split_topic.plan(start=ends)
    assert [one.entries for one in again] == [0, 0, 0]
    assert [one.entries for one in split_topic.plan(start=ends, end=ends)] == [0, 0, 0]
    # The next read goes on behind it.
    for where in split_topic.partitions:
        split_topic.publish(where, 1, T0)
    behind = {one.topic_partition.name: str(one.end) for one in again}
    assert [one.entries for one in split_topic.plan(start=behind)] == [1, 1, 1]


@pytest.mark.parametrize("place", [(0, -1, 0), (0, -1, 1), (0, 1, 0), (-1, 0, 0)])
def test_another_position_of_a_trimmed_topic_is_a_loss(
    split_topic: SplitTopic, place: tuple[int, int, int]
) -> None:
    where, *others = split_topic.partitions
    end = split_topic.plan()[0].end
    assert isinstance(end, MessageId)
    split_topic.cluster.roll_ledger(where)
    split_topic.cluster.trim(where, EntryId(10**6, 0))
    position = MessageId(*(one + by for one, by in zip(end, place, strict=True)))
    given = {where: str(position), **dict.fromkeys(others, "latest")}
    with pytest.raises(DataLossTrimmedError, match=f"start of {where} is {position}"):
        split_topic.plan(start=given)


@pytest.mark.parametrize("bound", ["start", "end"])
@pytest.mark.parametrize("beyond", [(0, 8), (10_000, 0), (10**18, 10**18)])
def test_a_position_behind_everything_is_reported(
    split_topic: SplitTopic, bound: str, beyond: tuple[int, int]
) -> None:
    where, *others = split_topic.partitions
    last = split_topic.plan()[0].last
    position = f"{last.ledger + beyond[0]}:{last.entry + beyond[1]}"
    given = {where: position, **dict.fromkeys(others, "latest")}
    with pytest.raises(ConfigError, match=f"{bound} of {where} is {position}:0, but this is after"):
        split_topic.plan(**{bound: given})


def test_the_position_behind_the_last_entry_is_an_empty_read(split_topic: SplitTopic) -> None:
    where, *others = split_topic.partitions
    last = split_topic.plan()[0].last
    given = {where: f"{last.ledger}:{last.entry + 1}", **dict.fromkeys(others, "latest")}
    assert cut(split_topic.plan(given), 4) == []
