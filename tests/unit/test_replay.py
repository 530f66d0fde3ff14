"""Replay: exactly the entries of a planned batch, or a named error."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from keyshard.broker.memory import (
    Batching,
    MemoryBroker,
    MemoryCluster,
    Message,
)
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    DataLossTrimmedError,
    ReplayTimeoutError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from keyshard.reading import replay as replay_module
from keyshard.reading.replay import replay
from tests.helpers import P0, block, ids, part
from tests.support.deadlines import deadline
from tests.support.faulty_broker import ScriptedCall, answering, faulty


def end_of(
    batches: dict[TopicPartition, EntrySet],
    partial: dict[EntryId, frozenset[int]] | None = None,
) -> Checkpoint:
    return Checkpoint(
        "c", "s", 4,
        {
            where: PartitionCheckpoint(None, batch, batch, partial or {}, 1_000)
            for where, batch in batches.items()
        },
    )  # fmt: skip


def published(
    entries: int, partitions: int = 1, per_ledger: int = 10
) -> tuple[MemoryCluster, list[TopicPartition], dict[TopicPartition, list[EntryId]]]:
    """A cluster with this many entries of three messages in each topic partition."""
    cluster = MemoryCluster(entries_per_ledger=per_ledger)
    topic = cluster.create_topic("t", partitions=partitions)
    where = list(cluster.partitions(topic))
    found: dict[TopicPartition, list[EntryId]] = {tp: [] for tp in where}
    for topic_partition in where:
        for number in range(entries):
            messages = [Message(b"%d-%d" % (number, i), key="k") for i in range(3)]
            for _, entry_id in cluster.publish(
                topic_partition, *messages, batching=Batching.BY_KEY
            ):
                found[topic_partition].append(entry_id)
    return cluster, where, found


def test_exactly_the_entries_of_the_batch_are_read_from_every_partition() -> None:
    cluster, where, found = published(35, partitions=3)
    wanted = {tp: EntrySet.of(found[tp][5:30:2] + found[tp][11:14]) for tp in where[:2]}
    entries = replay(MemoryBroker(cluster), end_of({**wanted, where[2]: EntrySet()}), 10)
    assert set(entries) == set(where[:2])
    for topic_partition, batch in wanted.items():
        blocks = entries[topic_partition]
        assert [at.id for at in blocks] == list(batch)
        assert all(at.whole for at in blocks)
        number = found[topic_partition].index(blocks[0].id)
        assert blocks[0].values == [b"%d-%d" % (number, i) for i in range(3)]


def test_a_partial_entry_is_read_with_the_indices_of_the_checkpoint() -> None:
    cluster, (where,), found = published(3)
    first, second, _ = found[where]
    end = end_of({where: EntrySet.of([first, second])}, {second: frozenset({0, 2})})
    (whole, part) = replay(MemoryBroker(cluster), end, 10)[where]
    assert whole.whole
    assert part.indices == [0, 2]
    assert part.values == [b"1-0", b"1-2"]
    assert part.partition_keys == ["k", "k"]
    assert part.payload_bytes == 6
    assert (part.id, part.batch_size, part.batched) == (second, 3, True)


def test_each_ledger_and_each_long_gap_has_a_reader_and_all_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_module, "GAP_ENTRIES_MAX", 3)
    cluster, (where,), found = published(30, per_ledger=20)
    batch = [found[where][i] for i in (0, 1, 4, 8, 19, 20, 22)]
    opens = ScriptedCall()
    broker = faulty(MemoryBroker(cluster), reader=opens)
    blocks = replay(broker, end_of({where: EntrySet.of(batch)}), 10)[where]
    assert [at.id for at in blocks] == batch
    assert [start for _, start, *_ in opens.asked] == [found[where][i] for i in (0, 8, 19, 20)]
    assert all(reader._closed for reader in broker._readers)


def test_entries_that_are_gone_are_data_loss_and_named() -> None:
    cluster, (where,), found = published(10)
    cluster.trim(where, before=found[where][4])
    with pytest.raises(DataLossTrimmedError, match="3 entries of a planned batch") as caught:
        replay(MemoryBroker(cluster), end_of({where: EntrySet.of(found[where][1:7])}), 10)
    assert caught.value.facts == {
        "topic_partition": where.name,
        "missing": str(EntrySet.of(found[where][1:4])),
    }


def test_entries_of_a_topic_that_is_deleted_are_data_loss_and_named() -> None:
    cluster, (where, other), found = published(3, partitions=2)
    ends = end_of({one: EntrySet.of(found[one]) for one in (where, other)})
    missing = TopicNotFoundError("The topic does not exist.", "Create it.")
    opens = ScriptedCall(raises=lambda asked, *_: missing if asked == other else None)
    broker = faulty(MemoryBroker(cluster), reader=opens)
    with pytest.raises(DataLossTrimmedError, match="3 entries of a planned batch") as caught:
        replay(broker, ends, 10)
    assert caught.value.facts["topic_partition"] == other.name
    entries = replay(broker, ends, 10, fail_on_data_loss=False)
    assert [len(entries[one]) for one in (where, other)] == [3, 0]


def test_other_entries_under_the_ids_of_the_batch_are_refused() -> None:
    """Found by the simulation of a wiped broker: the replay had entries of the new topic."""
    cluster, (where,), found = published(3)
    cluster.wipe()
    cluster.create_topic("t", partitions=1)
    for _ in range(3):
        cluster.publish(where, Message(b"another", key="k"), publish_ms=1_001)
    with pytest.raises(TopicRecreatedError, match="published 1 ms after all delivered entries"):
        replay(MemoryBroker(cluster), end_of({where: EntrySet.of(found[where])}), 10)


def test_entries_behind_the_end_of_a_topic_are_data_loss_without_a_wait() -> None:
    cluster, (where,), found = published(2)
    beyond = EntrySet.of([found[where][1], EntryId(99, 0)])
    began = time.monotonic()
    with pytest.raises(DataLossTrimmedError, match="1 entries"):
        replay(MemoryBroker(cluster), end_of({where: beyond}), deadline(30))
    assert time.monotonic() - began < deadline(10)


def test_a_broker_that_is_away_for_a_moment_is_asked_again() -> None:
    cluster, (where,), found = published(3)
    opens = ScriptedCall(BrokerUnavailableError("away"), BrokerUnavailableError("away"))
    broker = faulty(MemoryBroker(cluster), reader=opens)
    assert len(replay(broker, end_of({where: EntrySet.of(found[where])}), 10)[where]) == 3


def test_a_broker_that_refuses_is_not_asked_again() -> None:
    cluster, (where,), found = published(1)
    opens = ScriptedCall(BrokerError("refused"))
    broker = faulty(MemoryBroker(cluster), reader=opens)
    with pytest.raises(BrokerError, match="refused"):
        replay(broker, end_of({where: EntrySet.of(found[where])}), 10)
    assert len(opens.asked) == 1


def test_a_batch_without_entries_needs_no_reader() -> None:
    cluster, (where,), _ = published(1)
    opens = ScriptedCall()
    broker = faulty(MemoryBroker(cluster), reader=opens)
    assert replay(broker, end_of({where: EntrySet()}), 10) == {}
    assert opens.asked == []


class ScriptedReader:
    """A Reader that delivers the entries of the test, and then nothing."""

    def __init__(self, *reads: Sequence[EntryBlock], at_end: Callable[[], bool]) -> None:
        self.reads = deque(reads)
        self.at_end = at_end
        self.closed = False

    def read(self, _timeout_ms: int) -> list[EntryBlock]:
        return list(self.reads.popleft()) if self.reads else []

    def stayed_connected(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def broker_with(reader: ScriptedReader) -> MemoryBroker:
    return faulty(MemoryBroker(MemoryCluster()), reader=answering(reader))


def test_an_entry_read_in_parts_is_joined_even_when_the_reader_begins_it_again() -> None:
    reader = ScriptedReader(
        [part(0, 0, 1, of=3)], [], [part(0, 0, of=3)], [part(0, 1, of=3), part(0, 2, of=3)],
        at_end=lambda: False,
    )  # fmt: skip
    (entry,) = replay(broker_with(reader), end_of({P0: EntrySet.parse("1:0")}), 10)[P0]
    assert entry.indices == [0, 1, 2]
    assert reader.closed


def test_a_reader_that_goes_back_inside_an_entry_loses_nothing() -> None:
    reader = ScriptedReader(
        [block(1, 0), part(1, 0, 1, of=3)], [block(1, 0), part(1, 0, 1, 2, of=3), block(1, 2)],
        at_end=lambda: False,
    )  # fmt: skip
    blocks = replay(broker_with(reader), end_of({P0: EntrySet.parse("1:0-2")}), 10)[P0]
    assert ids(blocks) == [(1, 0), (1, 1), (1, 2)]
    assert all(at.whole for at in blocks)


def test_half_an_entry_is_not_taken_for_all_of_it() -> None:
    reader = ScriptedReader([part(0, 0, of=2), block(1, 1)], at_end=lambda: True)
    with pytest.raises(DataLossTrimmedError, match=r"first 1:0"):
        replay(broker_with(reader), end_of({P0: EntrySet.parse("1:0-1")}), 10)


def test_a_reader_that_delivers_nothing_ends_at_the_deadline() -> None:
    reader = ScriptedReader(at_end=lambda: False)
    with pytest.raises(ReplayTimeoutError, match=r"(?s)at 1:5.*raise replay_timeout_ms"):
        replay(broker_with(reader), end_of({P0: EntrySet.parse("1:5")}), deadline(0.3))
    assert reader.closed


def test_an_entry_that_a_reader_cut_off_twice_is_read_again_instead_of_taken_in_part() -> None:
    half, following = part(0, 0, of=3), part(1, 0, of=1)
    reader = ScriptedReader(
        [half, following, half, following], [part(0, 0, 1, 2, of=3), following],
        at_end=lambda: False,
    )  # fmt: skip
    entries = replay(broker_with(reader), end_of({P0: EntrySet.parse("1:0-1")}), 10)[P0]
    assert [(list(entry.indices), entry.whole) for entry in entries] == [
        ([0, 1, 2], True),
        ([0], True),
    ]
