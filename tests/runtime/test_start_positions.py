"""Streams that start at positions and times: exactly the messages behind a bounded read."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest

import keyshard
from keyshard import Checkpoint, KeyShardSource
from keyshard.broker.admin.port import BEGINS_PROPERTY, ID_PROPERTY
from keyshard.broker.memory import Batching, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.coordinator.start_positions import positions_of
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.split import cut
from keyshard.errors import (
    AdminError,
    ConfigError,
    DataLossAckedElsewhereError,
    DataLossTrimmedError,
    KeyShardError,
    NotRunningError,
    PositionAheadError,
    TopicRecreatedError,
)
from keyshard.reading import scan
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from tests.helpers import received, rows_of, started, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic

pytestmark = pytest.mark.simulated(seeds=1)

T0 = 1_700_000_000_000


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "READ_WAIT_MS", 1)


class Topic(MemoryTopic):
    """Partitions with single messages, producer batches and markers, in short ledgers."""

    def __init__(self, chance: random.Random, partitions: int = 2, *, markers: float = 0.2) -> None:
        super().__init__(partitions, entries_per_ledger=chance.randint(1, 6))
        self.chance = chance
        self.markers = markers
        self.partitions = self.where
        self.places: dict[TopicPartition, list[EntryId]] = {one: [] for one in self.partitions}
        self.sent: list[str] = []
        for where in self.partitions:
            self.publish(where, chance.randint(1, 25))

    def publish(self, where: TopicPartition, entries: int) -> None:
        for _ in range(entries):
            if self.chance.random() < self.markers:
                self.places[where].append(self.cluster.publish_marker(where))
                continue
            names = [f"{len(self.sent) + i}" for i in range(self.chance.choice([1, 1, 4]))]
            key = f"k{self.chance.randrange(9)}"
            ((_, entry),) = self.cluster.publish(
                where, *(Message(one.encode(), key=key) for one in names),
                batching=Batching.BY_KEY, publish_ms=T0 + len(self.sent),
            )  # fmt: skip
            self.places[where].append(entry)
            self.sent += names

    def any_position(self, where: TopicPartition) -> str:
        """The position of an entry, or the one behind it, such as the end of a ledger."""
        ledger, entry = self.chance.choice(self.places[where])
        if self.chance.random() < 0.5:
            # The index may be beyond the last message of the entry, and the entry may be no batch.
            return f"{ledger}:{entry}:{self.chance.randrange(6)}"
        return f"{ledger}:{entry + self.chance.randrange(2)}"

    def source(self, **options: Any) -> KeyShardSource:
        return KeyShardSource(
            self.topic, subscription="s", service_url=self.url, admin_url=self.url,
            parallelism=3, **options,
        )  # fmt: skip

    def read(self, **bounds: Any) -> list[str]:
        source = self.source()
        splits = cut(plan_read(source, **bounds), self.chance.randint(1, 5))
        batches = read_splits(source.how_to_connect(), splits, ["value"])
        return [value.decode() for one in batches for value in one.column(0).to_pylist()]

    def stream(self, rows: int, *, commit: bool = True, **options: Any) -> list[str]:
        """The values of a stream, until it has so many rows and no further ones come."""
        found: list[str] = []
        with self.source(**options).open() as stream:
            while batch := stream.next_batch(timeout_s=deadline(10) if len(found) < rows else 0.05):
                for one in batch:
                    found += [value.decode() for value in one["value"].to_pylist()]
                if commit:
                    stream.commit(batch)
            if commit:
                wait_until(lambda: all(self.cluster.backlog(one, "s") == 0
                                       for one in self.partitions))  # fmt: skip
        return found


@pytest.mark.parametrize("seed", range(40))
def test_a_read_up_to_positions_and_a_stream_from_them_have_every_message_once(seed: int) -> None:
    topic = Topic(random.Random(seed))
    positions = {where.name: topic.any_position(where) for where in topic.partitions}
    before = topic.read(end=positions)
    rest = len(topic.sent) - len(before)
    behind = topic.stream(rest, starting_position=json.dumps(positions))
    assert Counter(before + behind) == Counter(topic.sent)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_died_before_its_first_checkpoint_begins_there_again(seed: int) -> None:
    topic = Topic(random.Random(seed))
    positions = {where.name: topic.any_position(where) for where in topic.partitions}
    before = topic.read(end=positions)
    rest = len(topic.sent) - len(before)
    first = topic.stream(rest, commit=False, starting_position=json.dumps(positions))
    # Options that have changed since do not matter.
    again = topic.stream(rest, starting_position="earliest")
    assert Counter(before + first) == Counter(before + again) == Counter(topic.sent)


def batch_of_ten(seed: int) -> tuple[Topic, TopicPartition, EntryId]:
    """A topic that ends with a producer batch."""
    topic = Topic(random.Random(seed), partitions=1)
    (where,) = topic.partitions
    ((_, entry),) = topic.cluster.publish(
        where, *(Message(b"%d" % i, key="k") for i in range(10)), batching=Batching.BY_KEY
    )
    topic.sent = [f"{i}" for i in range(10)]
    return topic, where, entry


def test_a_batch_that_begins_inside_a_producer_batch_runs_again_the_same() -> None:
    topic, where, entry = batch_of_ten(8)
    start = json.dumps({where.name: f"{entry.ledger}:{entry.entry}:6"})
    first = topic.source(starting_position=start).coordinator()
    with started(first):
        received(first, 4)
        end = first.batches.cut()
        assert end is not None
        rows = rows_of(first, end)
    ids = [f"{entry.ledger}:{entry.entry}:{index}" for index in range(6, 10)]
    (part,) = rows.values()
    assert [row["value"] for row in part] == [b"6", b"7", b"8", b"9"]
    assert [row["__messageId"] for row in part] == ids
    assert end.partitions[where].partial == {entry: {6, 7, 8, 9}}
    again = topic.source(starting_position="earliest").coordinator()
    with started(again, end, planned=True):
        assert rows_of(again, end) == rows
        again.batches.release(end)
        wait_until(lambda: topic.cluster.backlog(where, "s") == 0)
        assert again.batches.cut() is None


def test_an_entry_of_which_nothing_is_left_ends_no_bounded_run_too_late() -> None:
    topic, where, entry = batch_of_ten(11)
    start = json.dumps({where.name: f"{entry.ledger}:{entry.entry}:10"})
    coordinator = topic.source(starting_position=start).coordinator()
    with started(coordinator, available_now=True):
        assert coordinator.batches.cut_available(None) is None
        wait_until(lambda: topic.cluster.backlog(where, "s") == 0)


@pytest.mark.parametrize("left", [0, 1])
def test_an_entry_of_which_nothing_is_left_is_no_loss_where_no_checkpoint_has_it(left: int) -> None:
    """Found by ``tests.proofs simulation --world workers --seed-start 91391483325405``.

    1. A batch is planned of what other ranges have.
    2. The entry that the source begins behind comes, and is acknowledged: nothing of it is owed.
    3. The process dies, and the batch is the newest that anybody knows.
    """
    topic, where, entry = batch_of_ten(11)
    topic.publish(where, 1)
    start = json.dumps({where.name: f"{entry.ledger}:{entry.entry}:{10 - left}"})
    first = topic.source(starting_position=start).coordinator()
    with started(first):
        received(first, 1 + left)
        end = first.batches.cut()
        assert end is not None
        first.batches.release(end)
        wait_until(lambda: topic.cluster.backlog(where, "s") == 0)
    state = end.partitions[where]
    known = state.batch - EntrySet.of([entry])
    before = EntryId(entry.ledger, entry.entry - 1)
    older = replace(state, floor=before, delivered=known, batch=known, partial={})
    again = topic.source(starting_position=start).coordinator()
    try:
        with pytest.raises(DataLossAckedElsewhereError) if left else nullcontext():
            again.start(replace(end, partitions={where: older}))
    finally:
        again.stop()


def test_a_cursor_that_was_set_back_begins_at_whole_entries_again() -> None:
    topic, where, entry = batch_of_ten(9)
    first = topic.places[where][0]
    with closing(MemoryAdmin(topic.cluster)) as admin:
        assert admin.begin(where, "s", MessageId(*first, 0))
    output = {BEGINS_PROPERTY: f"{entry.ledger}:{entry.entry}:6", "team": "billing"}
    subscription = topic.cluster.subscriptions(where)["s"]
    subscription.properties = output
    everything = topic.read()
    assert Counter(topic.stream(len(everything))) == Counter(everything)
    # The position in the entry is removed, so it has no effect if the cursor comes there later.
    assert subscription.properties.pop(ID_PROPERTY)
    assert subscription.properties == {"team": "billing"}


def test_entries_before_the_start_stay_away_when_the_broker_forgets() -> None:
    topic, where, entry = batch_of_ten(13)
    start = json.dumps({where.name: f"{entry.ledger}:{entry.entry}:6"})
    assert topic.stream(4, starting_position=start) == ["6", "7", "8", "9"]
    wait_until(lambda: topic.cluster.backlog(where, "s") == 0)
    again = topic.source(starting_position="earliest").coordinator()
    with started(again):
        topic.cluster.reset_cursor(where, "s", entry)
        received(again, 4)
        end = again.batches.cut()
        assert end is not None
        (rows,) = rows_of(again, end).values()
        assert [row["value"] for row in rows] == [b"6", b"7", b"8", b"9"]


def test_a_handler_gets_only_messages_behind_the_start() -> None:
    topic, where, entry = batch_of_ten(10)
    start = json.dumps({where.name: f"{entry.ledger}:{entry.entry}:6"})
    source = topic.source(starting_position=start)
    found: list[bytes | None] = []

    def note(message: keyshard.Message) -> None:
        found.append(message.value)
        if len(found) == 4:
            source.stop()

    source.run(note)
    assert found == [b"6", b"7", b"8", b"9"]
    assert topic.cluster.backlog(where, "s") == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_begins_where_a_read_of_everything_ended(seed: int) -> None:
    topic = Topic(random.Random(seed))
    ends = {one.topic_partition.name: str(one.end) for one in plan_read(topic.source())}
    before = topic.read()
    assert Counter(before) == Counter(topic.sent)
    for where in topic.partitions:
        topic.publish(where, 10)
    behind = topic.stream(len(topic.sent) - len(before), starting_position=json.dumps(ends))
    assert Counter(before + behind) == Counter(topic.sent)


def test_earliest_and_latest_may_stand_for_positions() -> None:
    topic = Topic(random.Random(1))
    first, second = topic.partitions
    start = json.dumps({first.name: "latest", second.name: "earliest"})
    earlier = topic.read(end={first: "latest", second: "earliest"})
    found = topic.stream(len(topic.sent) - len(earlier), starting_position=start)
    assert Counter(found) == Counter(topic.sent) - Counter(earlier)


def test_a_stream_from_a_time_has_the_same_messages_as_a_read_from_that_time() -> None:
    topic = Topic(random.Random(2))
    behind = topic.read(start=T0 + 9)
    found = topic.stream(len(behind), starting_position="2023-11-14T22:13:20.009Z")
    assert Counter(found) == Counter(behind)


def test_a_subscription_that_exists_comes_before_positions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This includes a subscription of a run that died before its first checkpoint."""
    topic = Topic(random.Random(3))
    places = {where.name: topic.places[where][1] for where in topic.partitions}
    start = json.dumps({name: f"{one.ledger}:{one.entry}" for name, one in places.items()})
    first = topic.stream(0, commit=False, starting_position=start)
    assert "exists on" not in caplog.text
    other = json.dumps({where.name: "latest" for where in topic.partitions})
    second = topic.stream(len(first), starting_position=other)
    assert Counter(second) == Counter(topic.read(start=json.loads(start)))
    assert "exists on 2 of 2 topic partitions" in caplog.text


@pytest.mark.parametrize(
    ("position", "error"),
    [
        ("99:0", PositionAheadError),
        ("0:3", DataLossTrimmedError),
        ("{ledger}:70", TopicRecreatedError),
        (None, ConfigError),
    ],
)
def test_nothing_is_created_where_one_position_is_wrong(
    position: str | None, error: type[KeyShardError]
) -> None:
    topic = Topic(random.Random(4))
    first, second = topic.partitions
    start = {first.name: "latest"}
    if position is not None:
        start[second.name] = position.format(ledger=topic.places[second][0].ledger)
    with pytest.raises(error, match="starting_position"):
        topic.stream(0, starting_position=json.dumps(start))
    assert not any(topic.cluster.subscriptions(where) for where in topic.partitions)
    if error is not ConfigError:
        topic.stream(0, starting_position=json.dumps(start), fail_on_data_loss=False)


@pytest.mark.parametrize("ahead", ["{ledger}:{end}:2", "{ledger}:99", "9999:7:1"])
def test_entries_before_a_position_beyond_the_end_are_delivered(ahead: str) -> None:
    """A start that accepts a missing topic gets all of its messages."""
    topic = Topic(random.Random(6), partitions=1, markers=0)
    topic.cluster._store._entries_per_ledger = 1_000
    (where,) = topic.partitions
    stored = plan_read(topic.source())[0].end
    assert isinstance(stored, MessageId)
    position = {where.name: ahead.format(ledger=stored.ledger, end=stored.entry)}
    lenient = {"fail_on_data_loss": False}
    assert plan_read(topic.source(**lenient), end=position)[0].end == stored
    assert topic.stream(0, starting_position=json.dumps(position), **lenient) == []
    before = len(topic.sent)
    topic.publish(where, 5)
    assert topic.stream(len(topic.sent) - before, **lenient) == topic.sent[before:]


def test_a_moved_subscription_is_reported_before_anything_is_consumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker creates it at the end, then moves it; another client may act in between."""
    topic = Topic(random.Random(5), partitions=1)
    (where,) = topic.partitions
    begin = MemoryAdmin.begin

    def at_the_end(
        self: MemoryAdmin, one: TopicPartition, subscription: str, position: MessageId
    ) -> bool:
        return begin(self, one, subscription, MessageId(position.ledger + 99, 0, 0))

    monkeypatch.setattr(MemoryAdmin, "begin", at_the_end)
    place = topic.places[where][0]
    with pytest.raises(AdminError, match=r"should begin at .* Nothing was consumed"):
        topic.stream(0, starting_position=json.dumps({where.name: f"{place.ledger}:0"}))


@pytest.mark.parametrize("seed", range(5))
def test_a_read_up_to_the_position_of_a_stream_has_its_rows(seed: int) -> None:
    topic = Topic(random.Random(seed), markers=0.0)
    source = topic.source(starting_position="earliest", batch_rows_max=7)
    found: Counter[str] = Counter()
    with source.open() as stream:
        while found.total() < len(topic.sent):
            batch = stream.next_batch(timeout_s=deadline(10))
            assert batch is not None
            found.update(value.decode() for one in batch for value in one["value"].to_pylist())
            stream.commit(batch)
            ends: dict[str, Any] = {}
            with suppress(NotRunningError):  # an entry of a slow range is missing
                ends = dict(positions_of(source, Checkpoint.from_json(batch.checkpoint)))
            if ends:
                assert Counter(topic.read(end=ends)) == found
    assert ends, "at the end there is no gap"


def test_a_gap_in_the_rows_of_a_stream_is_named() -> None:
    topic = Topic(random.Random(7), partitions=1)
    (where,) = topic.partitions
    stored = topic.places[where]
    delivered = EntrySet.of(one for one in stored if one != stored[2])
    state = PartitionCheckpoint(delivered=delivered)
    with pytest.raises(NotRunningError, match=f"1 entries .*, the first is {stored[2].ledger}:"):
        positions_of(topic.source(), Checkpoint("", "s", 3, {where: state}))


@pytest.mark.parametrize("seed", range(6, 16))
def test_a_stream_without_rows_stays_where_it_began(seed: int) -> None:
    topic = Topic(random.Random(seed))
    start = {where.name: topic.any_position(where) for where in topic.partitions}
    source = topic.source(starting_position=json.dumps(start))
    topic.stream(0, commit=False, starting_position=json.dumps(start))
    assert topic.read(end=positions_of(source, Checkpoint("", "s", 3))) == topic.read(end=start)


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        (
            '{"orders": "soon"}',
            "starting_position of 'orders' is 'soon'. Write 'earliest'",
        ),
        ("2026-11-21", "which has no time zone"),
        ("7:120", "Write 'earliest' or 'latest', a position for each topic partition as JSON"),
        (None, "starting_position is None. Write 'earliest' or 'latest'"),
    ],
)
def test_an_invalid_start_is_refused_at_once(start: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KeyShardSource("orders", admin_url="http://broker:8080", starting_position=start)
    assert sentence in caught.value.message


def test_positions_need_the_admin_interface() -> None:
    with pytest.raises(ConfigError, match="Set admin_url, or begin at 'earliest'"):
        KeyShardSource("orders", starting_position='{"orders": "7:120"}')
