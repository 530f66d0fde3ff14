"""Splits whose entries were trimmed, or whose topic was deleted, since they were planned."""

from __future__ import annotations

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.core.position.split import cut
from keyshard.errors import BookieReadError, DataLossTrimmedError, TopicRecreatedError
from tests.support.faulty_broker import Fault, after, faulty, giving
from tests.support.split_topic import T0, SplitTopic, without

pytestmark = pytest.mark.usefixtures("reads_in_no_time")


def test_a_ledger_that_is_trimmed_after_planning_is_named(split_topic: SplitTopic) -> None:
    where = split_topic.partitions[0]
    planned = cut(split_topic.plan(), 6)
    first_ledger = planned[0].first.ledger
    split_topic.cluster.trim(where, EntryId(first_ledger + 1, 0))
    with pytest.raises(DataLossTrimmedError, match=f"from {first_ledger}:0 to "):
        split_topic.read(planned[:1])
    stored = [one for one in split_topic.ids if one[0] or int(one[1].split(":")[0]) > first_ledger]
    assert split_topic.read(planned, fail_on_data_loss=False) == stored


@pytest.mark.parametrize("gone", [0, 1])
def test_entries_of_deleted_ledgers_are_left_out_although_bookies_still_return_them(
    gone: int,
) -> None:
    """1. A read is planned inside batches; 2. a ledger is deleted; 3. no bookie has noticed."""
    topic = SplitTopic(partitions=1, entries=0)
    (where,) = topic.partitions
    stored = [topic.publish(where, 3, T0) for _ in range(14)]
    first, last = stored[0], stored[-1]
    (split,) = topic.plan(f"{first.ledger}:0:2", f"{last.ledger}:{last.entry}:1")
    left = topic.ids[2:21] if gone else topic.ids[21:-2]
    faulty(topic.admin, ledgers=without([(first, last)[gone].ledger]))
    with pytest.raises(DataLossTrimmedError, match="7 entries of"):
        topic.read([split])
    assert topic.read([split], fail_on_data_loss=False) == left


def test_a_ledger_that_is_trimmed_while_it_is_read_is_named(split_topic: SplitTopic) -> None:
    where, split = split_topic.partitions[0], split_topic.plan()[0]
    ledgers = [span.ledger for span in split.spans]

    trim = after(lambda: split_topic.cluster.trim(where, EntryId(ledgers[1], 0)))
    with pytest.raises(DataLossTrimmedError, match=f"7 entries of .* from {ledgers[0]}:0 to"):
        split_topic.read([split], faulty(MemoryBroker(split_topic.cluster), reader=trim))


@pytest.mark.parametrize(("read", "gone"), [(0, 0), (3, 0), (7, 1), (3, 2)])
def test_a_read_from_bookies_alone_goes_on_behind_a_ledger_that_is_deleted_meanwhile(
    read: int, gone: int
) -> None:
    """1. Some entries are read. 2. A ledger is deleted. 3. No bookie returns the next entry."""
    topic = SplitTopic(partitions=1, entries=0)
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


def test_a_deleted_topic_is_named_and_not_made_again(split_topic: SplitTopic) -> None:
    planned = cut(split_topic.plan(), 4)
    split_topic.cluster.delete_topic(split_topic.topic)
    with pytest.raises(DataLossTrimmedError, match="deleted topic"):
        split_topic.read(planned)
    assert split_topic.read(planned, fail_on_data_loss=False) == []
    assert split_topic.cluster.topics() == {}


def test_a_topic_that_is_created_again_is_not_read_for_the_old_one(split_topic: SplitTopic) -> None:
    planned = cut(split_topic.plan(), 4)
    split_topic.cluster.delete_topic(split_topic.topic)
    split_topic.cluster.create_topic(split_topic.topic, 3)
    for where in split_topic.partitions:
        split_topic.publish(where, 1, T0)
    with pytest.raises(TopicRecreatedError, match="was deleted and created again after the read"):
        split_topic.read(planned)
    assert split_topic.read(planned, fail_on_data_loss=False) == []
