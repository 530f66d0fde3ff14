"""Bounded reads of the in-memory broker: planned, cut, and read split by split."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.columns import record_batches
from keyshard.columns.record_batches import SCHEMA
from keyshard.config.segments import Segments
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.read_bounds import parse_bounds
from keyshard.core.position.replicas import UNKNOWN, LedgerReplicas
from keyshard.core.position.split import Split, cut
from keyshard.errors import (
    AuthorizationError,
    BookieReadError,
    BrokerUnavailableError,
    ChunkedMessageError,
    ConfigError,
    DataLossTrimmedError,
    EncryptedMessageError,
    KeyShardError,
    PositionAheadError,
    ReplayTimeoutError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from keyshard.reading.split_planner import plan_read, stretches
from keyshard.reading.split_reader import read_split, read_splits
from tests.helpers import present
from tests.support.disconnecting_readers import DisconnectingBroker, every_disconnect
from tests.support.faulty_broker import Fault, ScriptedCall, after, answering, faulty, giving

pytestmark = pytest.mark.usefixtures("reads_in_no_time")

T0 = 1_700_000_000_000
IDS = ("__partition", "__messageId")


class Topic:
    """Partitions with ledgers of seven entries: single messages, batches and markers."""

    def __init__(self, partitions: int = 3, entries: int = 21) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=7)
        self.topic = self.cluster.create_topic("orders", partitions)
        self.partitions = self.cluster.partitions(self.topic)
        self.admin = MemoryAdmin(self.cluster)
        self.ids: list[tuple[int, str]] = []
        self.times: dict[tuple[int, str], int] = {}
        for where in self.partitions:
            for number in range(entries):
                if number % 5 == 2:
                    self.cluster.publish_marker(where)
                else:
                    self.publish(where, 3 if number % 4 == 0 else 1, T0 + number)

    def publish(self, where: TopicPartition, messages: int, time_ms: int) -> EntryId:
        batch = [Message(b"m", key="k")] * messages
        ((_, entry_id),) = self.cluster.publish(
            where, *batch, batching=Batching.BY_KEY, publish_ms=time_ms
        )
        for index in range(messages):
            name = (where.partition, f"{entry_id.ledger}:{entry_id.entry}:{index}")
            self.ids.append(name)
            self.times[name] = time_ms
        return entry_id

    def plan(self, start: Any = "earliest", end: Any = "latest", **options: Any) -> list[Split]:
        starts = parse_bounds("start", start, self.partitions)
        ends = parse_bounds("end", end, self.partitions)
        return list(stretches(self.admin, starts, ends, 5.0, **options))

    def read(
        self, splits: Iterable[Split], broker: MemoryBroker | None = None, **options: Any
    ) -> list[tuple[int, str]]:
        broker = broker or MemoryBroker(self.cluster)
        return [
            row
            for split in splits
            for batch in read_split(broker, self.admin, split, IDS, 5.0, **options)
            for row in rows_of(batch)
        ]


def rows_of(batch: pa.RecordBatch) -> list[tuple[int, str]]:
    return list(zip(*(batch.column(name).to_pylist() for name in IDS), strict=True))


def without(ids: Collection[int]) -> Fault:
    """A fault of a list of ledgers that leaves some of them out."""
    return lambda call, where: tuple(one for one in call(where) or () if one.id not in ids)


@pytest.fixture
def topic() -> Iterator[Topic]:
    made = Topic()
    yield made
    made.cluster.validate()


@pytest.mark.parametrize("limit", [1024 * 1024, 64 * 1024 * 1024])
def test_readers_receive_ahead_as_many_bytes_as_the_read_says(topic: Topic, limit: int) -> None:
    opens = ScriptedCall()
    broker = faulty(MemoryBroker(topic.cluster), reader=opens)
    assert topic.read(topic.plan(), broker, bytes_in_flight_max=limit) == topic.ids
    assert {how.receiver_queue_bytes for _, _, how in opens.asked} == {limit}


@pytest.mark.parametrize("splits", [1, 3, 4, 13, 63, 10_000])
def test_any_number_of_splits_has_every_message_once_in_order(topic: Topic, splits: int) -> None:
    planned = cut(topic.plan(), splits)
    assert len(planned) == max(3, min(splits, 63))
    assert topic.read(planned) == topic.ids


def test_a_read_ends_at_an_encrypted_message_with_an_error_and_one_up_to_it_does_not() -> None:
    topic = Topic(partitions=1, entries=6)
    ((_, at),) = topic.cluster.publish(topic.partitions[0], Message(b"?", key="a"), encrypted=True)
    topic.publish(topic.partitions[0], 1, T0)
    with pytest.raises(EncryptedMessageError, match=f"{at.ledger}:{at.entry} of"):
        topic.read(topic.plan())
    before = topic.read(topic.plan(end=f"{at.ledger}:{at.entry}"))
    behind = topic.read(topic.plan(f"{at.ledger}:{at.entry + 1}"))
    assert (len(before), len(behind)) == (len(topic.ids) - 1, 1)


def test_messages_published_after_planning_are_not_read(topic: Topic) -> None:
    planned, before = cut(topic.plan(), 5), list(topic.ids)
    for where in topic.partitions:
        topic.publish(where, 3, T0)
        topic.cluster.roll_ledger(where)
        topic.publish(where, 1, T0)
    assert topic.read(planned) == before
    assert sorted(topic.read(topic.plan())) == sorted(topic.ids)


def test_positions_are_exact_also_inside_a_batch(topic: Topic) -> None:
    where, *others = topic.partitions
    own = [(one, MessageId(*map(int, name.split(":")))) for one, name in topic.ids if not one]
    bounds = [position for _, position in own]
    bounds += [MessageId(one.ledger, one.entry + 1, 0) for one in bounds]
    bounds += [one._replace(batch_index=one.batch_index + 1) for one in bounds[: len(own)]]
    rest = dict.fromkeys(others, "latest")
    for start in bounds:
        for end in bounds[:: 1 + len(bounds) // 9]:
            if start > end:
                continue
            expected = [(0, str(one)) for _, one in own if start <= one < end]
            planned = cut(topic.plan({where: start, **rest}, {where: end, **rest}), 4)
            assert topic.read(planned) == expected, (start, end)


def test_each_read_begins_where_the_one_before_ended(topic: Topic) -> None:
    names = [name for partition, name in topic.ids if partition == 0]
    rest = dict.fromkeys(topic.partitions[1:], "latest")
    at = ["earliest", *names[::4], "latest"]
    found = []
    for start, end in pairwise(at):
        found += topic.read(
            topic.plan({topic.partitions[0]: start, **rest}, {topic.partitions[0]: end, **rest})
        )
    assert found == [(0, name) for name in names]


@pytest.mark.parametrize("seed", range(6))
def test_times_select_exactly_however_they_are_out_of_order(seed: int) -> None:
    topic, chance = Topic(2, 0), random.Random(seed)
    for where in topic.partitions:
        for number in range(40):
            time_ms = chance.choice([T0 + number, T0 + chance.randrange(40), 10**12, 2 * T0])
            topic.publish(where, chance.randint(1, 3), time_ms)
    for start, end in ((T0, T0 + 40), (T0 + 10, T0 + 11), (0, T0), (T0 + 20, 3 * T0), (T0, T0)):
        expected = [one for one in topic.ids if start <= topic.times[one] < end]
        assert topic.read(cut(topic.plan(start, end), 7)) == expected
    moment = datetime.fromtimestamp(T0 // 1000, timezone.utc)
    assert topic.read(topic.plan(moment)) == [one for one in topic.ids if topic.times[one] >= T0]


@pytest.mark.parametrize("seed", range(6))
def test_a_read_with_a_known_disorder_is_pruned_and_loses_nothing(seed: int) -> None:
    disorder, chance = 15, random.Random(seed)
    topic = Topic(1, 0)
    newest = 0
    for number in range(200):
        time_ms = max(T0 + number + chance.randint(-10, 10), newest - disorder)
        newest = max(newest, time_ms)
        topic.publish(topic.partitions[0], 1, time_ms)
    for start in range(T0 - 5, T0 + 205, 10):
        end = start + 12
        planned = topic.plan(start, end, disorder_ms=disorder)
        assert sum(split.entries for split in planned) < 90
        expected = [one for one in topic.ids if start <= topic.times[one] < end]
        assert topic.read(cut(planned, 3)) == expected


def test_a_message_without_a_publish_time_lies_in_no_bounds_of_time() -> None:
    topic = Topic(1, 0)
    topic.publish(topic.partitions[0], 1, 0)
    topic.publish(topic.partitions[0], 1, T0)
    assert topic.read(topic.plan()) == topic.ids
    assert topic.read(topic.plan(0)) == topic.ids[1:]
    assert topic.read(topic.plan("earliest", 2 * T0)) == topic.ids[1:]


def test_bounds_without_entries_between_them_have_no_split(topic: Topic) -> None:
    assert cut(topic.plan("latest"), 5) == []
    assert cut(topic.plan("earliest", "earliest"), 5) == []
    assert cut(Topic(2, 0).plan(), 5) == []
    assert topic.read(cut(topic.plan(2 * T0), 5)) == []


@pytest.mark.parametrize("at_once", [1, 2])
def test_rows_are_exact_wherever_the_connection_is_cut(at_once: int) -> None:
    topic = Topic(1)
    (whole,) = topic.plan()
    for split in cut([whole], 2):
        wanted = topic.read([split])
        broker = DisconnectingBroker(topic.cluster)
        assert topic.read([split], broker) == wanted
        for cutting in every_disconnect(topic.cluster, broker.steps, at_once):
            assert topic.read([split], cutting) == wanted


def test_a_reader_that_ends_inside_an_entry_is_followed_by_another() -> None:
    """Later entries do not prove that the rest of an entry is gone."""
    topic = Topic(1)
    log = topic.cluster.log(topic.partitions[0])
    cut_off: list[EntryId] = []

    def partly(read: Fault, timeout_ms: int) -> list[EntryBlock]:
        blocks: list[EntryBlock] = read(timeout_ms)
        for i, block in enumerate(blocks):
            if block.batch_size == 3 and block.id not in cut_off:
                cut_off.append(block.id)
                blocks[i] = present(log.get(present(log.ordinal(block.id)))).block([0, 1])
                break
        return blocks

    broker = faulty(MemoryBroker(topic.cluster), reader=giving(read=partly))
    assert topic.read(topic.plan(), broker) == topic.ids
    assert len(cut_off) > 3


def test_an_entry_that_always_ends_early_is_a_retriable_error() -> None:
    topic = Topic(1)

    def longer(read: Fault, timeout_ms: int) -> list[EntryBlock]:
        blocks: list[EntryBlock] = read(timeout_ms)
        for block in blocks:
            if block.batch_size == 3:
                block.batch_size, block.complete = 4, False
        return blocks

    broker = faulty(MemoryBroker(topic.cluster), reader=giving(read=longer))
    with pytest.raises(BrokerUnavailableError, match="lose their connection inside entry"):
        topic.read(topic.plan(), broker)


def test_a_read_that_receives_nothing_raises_an_error_and_does_not_end(topic: Topic) -> None:
    (split,) = cut(topic.plan(), 3)[:1]
    silent = giving(read=answering([]), at_end=lambda _: False)
    broker = faulty(MemoryBroker(topic.cluster), reader=silent)
    with pytest.raises(ReplayTimeoutError, match="returned nothing for"):
        list(read_split(broker, topic.admin, split, IDS, 0.05))


def test_a_broker_that_is_away_is_waited_for_until_the_deadline(topic: Topic) -> None:
    broker = DisconnectingBroker(topic.cluster, range(10**6))
    with pytest.raises(KeyShardError) as raised:
        list(read_split(broker, topic.admin, topic.plan()[0], IDS, 0.05))
    assert raised.value.retriable


def test_a_ledger_that_is_trimmed_after_planning_is_named(topic: Topic) -> None:
    where = topic.partitions[0]
    planned = cut(topic.plan(), 6)
    first_ledger = planned[0].first.ledger
    topic.cluster.trim(where, EntryId(first_ledger + 1, 0))
    with pytest.raises(DataLossTrimmedError, match=f"from {first_ledger}:0 to "):
        topic.read(planned[:1])
    stored = [one for one in topic.ids if one[0] or int(one[1].split(":")[0]) > first_ledger]
    assert topic.read(planned, fail_on_data_loss=False) == stored


@pytest.mark.parametrize("placed", [False, True])
def test_without_permission_to_ask_for_transactions_the_broker_reads_everything(
    topic: Topic, placed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Bookies would return messages that the broker holds back behind an open transaction."""

    def placed_ledgers(_call: Fault, topic_partition: TopicPartition) -> tuple[Ledger, ...]:
        found = topic.admin.ledgers(topic_partition) or ()
        stored = LedgerReplicas(0, 6, 1, "CRC32C", ((0, ("b:1",)),))
        return tuple(replace(one, placement=replace(stored, ledger=one.id)) for one in found)

    refuses = ScriptedCall(raises=lambda where: AuthorizationError(f"{where} is refused."))
    faulty(topic.admin, held_back_behind=refuses, placed_ledgers=placed_ledgers)
    planned = topic.plan(segments=Segments("auto" if placed else "broker"))
    why = {span.placement for split in planned for span in split.spans}
    held = "it is unknown whether transactions hold back its entries"
    assert why == {held if placed else UNKNOWN}
    assert topic.read(planned) == topic.ids
    assert f"hold back entries of {topic.partitions[0]}: " in caplog.text


@pytest.mark.parametrize("gone", [0, 1])
def test_entries_of_deleted_ledgers_are_left_out_although_bookies_still_return_them(
    gone: int,
) -> None:
    """1. A read is planned inside batches; 2. a ledger is deleted; 3. no bookie has noticed."""
    topic = Topic(partitions=1, entries=0)
    (where,) = topic.partitions
    stored = [topic.publish(where, 3, T0) for _ in range(14)]
    first, last = stored[0], stored[-1]
    (split,) = topic.plan(f"{first.ledger}:0:2", f"{last.ledger}:{last.entry}:1")
    left = topic.ids[2:21] if gone else topic.ids[21:-2]
    faulty(topic.admin, ledgers=without([(first, last)[gone].ledger]))
    with pytest.raises(DataLossTrimmedError, match="7 entries of"):
        topic.read([split])
    assert topic.read([split], fail_on_data_loss=False) == left


def test_a_ledger_that_is_trimmed_while_it_is_read_is_named(topic: Topic) -> None:
    where, split = topic.partitions[0], topic.plan()[0]
    ledgers = [span.ledger for span in split.spans]

    trim = after(lambda: topic.cluster.trim(where, EntryId(ledgers[1], 0)))
    with pytest.raises(DataLossTrimmedError, match=f"7 entries of .* from {ledgers[0]}:0 to"):
        topic.read([split], faulty(MemoryBroker(topic.cluster), reader=trim))


@pytest.mark.parametrize(("read", "gone"), [(0, 0), (3, 0), (7, 1), (3, 2)])
def test_a_read_from_bookies_alone_goes_on_behind_a_ledger_that_is_deleted_meanwhile(
    read: int, gone: int
) -> None:
    """1. Some entries are read. 2. A ledger is deleted. 3. No bookie returns the next entry."""
    topic = Topic(partitions=1, entries=0)
    (where,) = topic.partitions
    stored = [topic.publish(where, 3, T0) for _ in range(21)]
    (split,) = topic.plan(f"{stored[0].ledger}:0:2")
    lost = split.spans[gone].ledger

    def read_some(call: Fault, timeout_ms: int) -> list[EntryBlock]:
        if deleted:
            return list(call(timeout_ms))
        blocks = [one for one in call(timeout_ms) if one.id < stored[read]]
        if not blocks:
            deleted.append(lost)
            raise BookieReadError("No bookie returned it.")
        return blocks

    deleted: list[int] = []
    faulty(topic.admin, ledgers=without(deleted))
    only_bookies = faulty(MemoryBroker(topic.cluster), reader=giving(read=read_some))
    with pytest.raises(DataLossTrimmedError, match="7 entries of"):
        topic.read([split], only_bookies)
    deleted.clear()
    found = topic.read([split], only_bookies, fail_on_data_loss=False)
    rest = [one for one in topic.ids[3 * read :] if not one[1].startswith(f"{lost}:")]
    assert found == topic.ids[2 : 3 * read] + rest
    deleted.clear()
    topic.admin = MemoryAdmin(topic.cluster)
    with pytest.raises(BookieReadError):
        topic.read([split], only_bookies)


def test_a_deleted_topic_is_named_and_not_made_again(topic: Topic) -> None:
    planned = cut(topic.plan(), 4)
    topic.cluster.delete_topic(topic.topic)
    with pytest.raises(DataLossTrimmedError, match="deleted topic"):
        topic.read(planned)
    assert topic.read(planned, fail_on_data_loss=False) == []
    assert topic.cluster.topics() == {}


def test_a_topic_that_is_created_again_is_not_read_for_the_old_one(topic: Topic) -> None:
    planned = cut(topic.plan(), 4)
    topic.cluster.delete_topic(topic.topic)
    topic.cluster.create_topic(topic.topic, 3)
    for where in topic.partitions:
        topic.publish(where, 1, T0)
    with pytest.raises(TopicRecreatedError, match="was deleted and created again after the read"):
        topic.read(planned)
    assert topic.read(planned, fail_on_data_loss=False) == []


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
    topic: Topic, bound: str, ledger: int, entry: int, error: type[KeyShardError],
    rest: dict[str, int],
) -> None:  # fmt: skip
    where, *others = topic.partitions
    ledgers = [span.ledger for span in topic.plan()[0].spans]
    number = ledgers[ledger] if ledger < 3 and error is not DataLossTrimmedError else ledger
    given = {where: f"{number}:{entry}", **dict.fromkeys(others, "latest")}
    with pytest.raises(error, match=f"{bound} of {where} is {number}:{entry}:0") as caught:
        topic.plan(**{bound: given})
    assert caught.value.facts["topic_partition"] == where.name
    (planned, *_) = topic.plan(**{bound: given}, fail_on_data_loss=False)
    assert planned.entries == rest[bound]


@pytest.mark.parametrize("bound", ["start", "end"])
@pytest.mark.parametrize(("ledger", "error"), [(1, TopicRecreatedError), (2, PositionAheadError)])
def test_a_place_inside_an_entry_that_is_not_there_is_named(
    topic: Topic, bound: str, ledger: int, error: type[KeyShardError]
) -> None:
    """A read up to there has not one of its messages, and a stream from there would skip some."""
    where, *others = topic.partitions
    span = topic.plan()[0].spans[ledger]
    given = {where: f"{span.ledger}:{span.end}:2", **dict.fromkeys(others, "latest")}
    with pytest.raises(error, match=f"{bound} of {where} is {span.ledger}:{span.end}:2"):
        topic.plan(**{bound: given})
    inside = given | {where: f"{span.ledger}:{span.end - 1}:999"}
    assert topic.plan(**{bound: inside})[0].end is not None


def test_the_place_of_an_empty_ledger_that_the_broker_removed_is_the_next_one(
    topic: Topic,
) -> None:
    """1. A read ends before the first entry of a ledger; 2. that closes empty, and is removed."""
    where, *others = topic.partitions
    ledgers = [span.ledger for span in topic.plan()[0].spans]
    faulty(topic.admin, ledgers=without([ledgers[1]]))
    given = {where: f"{ledgers[1]}:0", **dict.fromkeys(others, "latest")}
    assert topic.plan(start=given)[0].first == EntryId(ledgers[2], 0)
    with pytest.raises(TopicRecreatedError):
        topic.plan(start=given | {where: f"{ledgers[1]}:1"})


@pytest.mark.parametrize("bound", ["start", "end"])
def test_a_position_that_is_trimmed_is_named(topic: Topic, bound: str) -> None:
    where, *others = topic.partitions
    first = topic.plan()[0].first
    topic.cluster.trim(where, EntryId(first.ledger + 1, 0))
    given = {where: f"{first.ledger}:3", **dict.fromkeys(others, "latest")}
    with pytest.raises(DataLossTrimmedError, match=f"^.*{bound} of {where} is {first.ledger}:3:0"):
        topic.plan(**{bound: given})
    planned = topic.plan(**{bound: given}, fail_on_data_loss=False)
    assert planned[0].entries == (14 if bound == "start" else 0)


def test_the_end_of_a_read_is_the_start_of_the_next_where_all_of_it_is_trimmed(
    topic: Topic,
) -> None:
    """1. A read ends; 2. its last ledger closes, and retention removes it; 3. nothing is new."""
    ends = {one.topic_partition.name: str(one.end) for one in topic.plan()}
    for where in topic.partitions:
        topic.cluster.roll_ledger(where)
        topic.cluster.trim(where, EntryId(10**6, 0))
    again = topic.plan(start=ends)
    assert [one.entries for one in again] == [0, 0, 0]
    assert [one.entries for one in topic.plan(start=ends, end=ends)] == [0, 0, 0]
    # The next read goes on behind it.
    for where in topic.partitions:
        topic.publish(where, 1, T0)
    behind = {one.topic_partition.name: str(one.end) for one in again}
    assert [one.entries for one in topic.plan(start=behind)] == [1, 1, 1]


@pytest.mark.parametrize("place", [(0, -1, 0), (0, -1, 1), (0, 1, 0), (-1, 0, 0)])
def test_another_position_of_a_trimmed_topic_is_a_loss(
    topic: Topic, place: tuple[int, int, int]
) -> None:
    where, *others = topic.partitions
    end = topic.plan()[0].end
    assert isinstance(end, MessageId)
    topic.cluster.roll_ledger(where)
    topic.cluster.trim(where, EntryId(10**6, 0))
    position = MessageId(*(one + by for one, by in zip(end, place, strict=True)))
    given = {where: str(position), **dict.fromkeys(others, "latest")}
    with pytest.raises(DataLossTrimmedError, match=f"start of {where} is {position}"):
        topic.plan(start=given)


@pytest.mark.parametrize("bound", ["start", "end"])
@pytest.mark.parametrize("beyond", [(0, 8), (10_000, 0), (10**18, 10**18)])
def test_a_position_behind_everything_is_reported(
    topic: Topic, bound: str, beyond: tuple[int, int]
) -> None:
    where, *others = topic.partitions
    last = topic.plan()[0].last
    position = f"{last.ledger + beyond[0]}:{last.entry + beyond[1]}"
    given = {where: position, **dict.fromkeys(others, "latest")}
    with pytest.raises(ConfigError, match=f"{bound} of {where} is {position}:0, but this is after"):
        topic.plan(**{bound: given})


def test_the_position_behind_the_last_entry_is_an_empty_read(topic: Topic) -> None:
    where, *others = topic.partitions
    last = topic.plan()[0].last
    given = {where: f"{last.ledger}:{last.entry + 1}", **dict.fromkeys(others, "latest")}
    assert cut(topic.plan(given), 4) == []


def test_a_chunked_message_is_refused_by_name() -> None:
    topic = Topic(1, 3)
    topic.cluster.publish_chunked(topic.partitions[0], Message(b"x" * 10, "k"), 2)
    with pytest.raises(ChunkedMessageError):
        topic.read(topic.plan())


def test_columns_that_are_not_selected_are_not_built(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> Any:
        raise AssertionError("nobody asked for this column")

    (split,) = topic.plan()[:1]
    wanted = ("__key", "__partition")
    for name in set(record_batches._BUILDERS) - {*wanted}:
        monkeypatch.setitem(record_batches._BUILDERS, name, never)
    broker = MemoryBroker(topic.cluster)
    (batch,) = read_split(broker, topic.admin, split, wanted, 5.0)
    assert batch.schema.names == ["__key", "__partition"]
    assert batch.num_rows == len(topic.ids) // 3


def test_batches_are_the_same_however_the_entries_came(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that runs a task again goes on at the block where it ended."""
    monkeypatch.setattr(record_batches, "ROWS_PER_BATCH_MAX", 7)
    (split,) = topic.plan()[:1]

    def batches(broker: MemoryBroker) -> list[pa.RecordBatch]:
        return list(read_split(broker, topic.admin, split, SCHEMA.names, 5.0))

    wanted = batches(MemoryBroker(topic.cluster))
    assert len(wanted) > 2
    for most in (1, 2, 5):
        monkeypatch.setattr("keyshard.broker.memory.client.READ_MESSAGES_MAX", most)
        assert batches(MemoryBroker(topic.cluster)) == wanted


def test_a_source_is_planned_by_its_topics_and_read_by_its_connection() -> None:
    url = "memory://bounded-source"
    cluster = MemoryCluster.named("bounded-source")
    names = [cluster.create_topic("a", 2), cluster.create_topic("b")]
    for name in names:
        cluster.publish(name, *(Message(b"%d" % i, key=f"{i}") for i in range(9)))
    source = KeyShardSource(names, service_url=url, admin_url=url)
    splits = cut(plan_read(source), 5)
    assert {split.topic_partition.topic for split in splits} == set(names)
    values = read_splits(source.how_to_connect(), splits, ["value"])
    found = [value for batch in values for value in batch.column(0).to_pylist()]
    assert sorted(found) == sorted([b"%d" % i for i in range(9)] * 2)
    assert all(
        not cluster.subscriptions(where) for name in names for where in cluster.partitions(name)
    )


def _source(**options: Any) -> KeyShardSource:
    url = "memory://bounded-errors"
    return KeyShardSource("t", **{"service_url": url, "admin_url": url, **options})


@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        ({"admin_url": None}, {}, ConfigError),
        ({}, {}, TopicNotFoundError),
        ({}, {"disorder_max_s": -1}, ConfigError),
        ({}, {"disorder_max_s": float("nan")}, ConfigError),
        ({}, {"disorder_max_s": "1"}, ConfigError),
        ({}, {"disorder_max_s": 10**12}, ConfigError),
    ],
)
def test_a_failed_plan_is_reported(
    source: dict[str, Any], options: dict[str, Any], error: type[KeyShardError]
) -> None:
    with pytest.raises(error):
        plan_read(_source(**source), **options)


def test_planning_1000_partitions_asks_each_once_and_several_at_a_time() -> None:
    cluster = MemoryCluster()
    topic = cluster.create_topic("wide", 1_000)
    partitions = cluster.partitions(topic)
    for where in partitions[::2]:
        cluster.publish(where, Message(b"m", key="k"))

    asks = ScriptedCall()
    admin = faulty(MemoryAdmin(cluster), ledgers=asks)
    starts, ends = (parse_bounds("start", one, partitions) for one in ("earliest", "latest"))
    planned = stretches(admin, starts, ends, 5.0)
    assert sorted(asks.asked) == [(where,) for where in sorted(partitions)]
    assert len(cut(planned, 8)) == 500
