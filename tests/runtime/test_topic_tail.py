"""Rows of a forgotten producer name, which are found at the end of a topic partition."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.memory import Message as StoredMessage
from keyshard.broker.port import PublishOptions
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.core.publishing import NOTHING, sequence_id
from keyshard.publishing import topic_tail
from keyshard.publishing.topic_tail import TailLimits, last_stored_id
from tests.support.copied_topic import SinkTopic
from tests.support.deadlines import deadline

OTHER = StoredMessage(b"x", key="other")


class Tail:
    """A topic partition with a name that the broker has forgotten."""

    def __init__(self) -> None:
        self.world = SinkTopic()
        self.cluster = self.world.cluster
        self.where, self.elsewhere, _ = self.cluster.partitions(self.world.topic)
        self.broker = MemoryBroker(self.cluster)

    def store(self, batch_id: int, rows: int) -> None:
        """Store rows of the name, each in its own entry."""
        producer = self.broker.entry_producer(self.where, PublishOptions("s-0"))
        for row in range(rows):
            message = OutgoingMessage(b"row", "k")
            producer.publish([message], sequence_id(batch_id, row)).result(deadline(5))
        producer.close()

    def others(self, entries: int, value: bytes = b"x") -> None:
        for _ in range(entries):
            self.cluster.publish(self.where, StoredMessage(value, key="other"))

    def last_stored(self, batch_id: int) -> int:
        self.cluster.forget_producer(self.where, "s-0")
        producer = self.broker.entry_producer(self.where, PublishOptions("s-0"))
        assert producer.last_sequence_id == NOTHING
        try:
            return last_stored_id(
                self.broker, producer, "s-0", batch_id, 20, last=producer.last_entry()
            )
        finally:
            producer.close()


@pytest.fixture
def tail() -> Iterator[Tail]:
    made = Tail()
    yield made
    made.broker.close()


def test_rows_at_the_end_of_a_large_older_ledger_are_found(tail: Tail) -> None:
    tail.others(1_100)
    tail.store(0, 10)
    tail.cluster.roll_ledger(tail.where)
    tail.others(1)
    assert tail.last_stored(0) == sequence_id(0, 9)


def test_large_entries_before_the_rows_do_not_count(tail: Tail) -> None:
    tail.others(80, b"x" * 100_000)
    tail.store(0, 10)
    tail.others(18, b"x" * 100_000)
    assert tail.last_stored(0) == sequence_id(0, 9)


def test_a_chunked_message_before_the_rows_does_not_hide_them(tail: Tail) -> None:
    tail.others(10)
    tail.cluster.publish_chunked(tail.where, OTHER, 3)
    tail.store(0, 10)
    tail.others(10)
    assert tail.last_stored(0) == sequence_id(0, 9)


def test_the_limit_in_bytes_ends_the_search(tail: Tail) -> None:
    tail.store(0, 10)
    tail.others(50, b"x" * 100_000)
    assert tail.last_stored(0) == NOTHING


@pytest.mark.parametrize("seed", range(60))
def test_rows_within_the_limit_are_found_wherever_ledgers_end(
    tail: Tail, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    limit, small = 100, draw.choice((1, 8, 30))
    monkeypatch.setattr(topic_tail, "LATER_BATCH_LIMITS", TailLimits(limit, 2**20))
    monkeypatch.setattr(topic_tail, "SMALL", TailLimits(small, 2**20))
    before = draw.randrange(300)
    behind = draw.randrange(limit + 2 * small + 20)
    often = draw.choice((0.01, 0.1, 0.5))
    _publish(tail, before, often, draw)
    tail.store(3, rows := draw.randrange(1, 5))
    stored = len(tail.cluster.log(tail.where))
    _publish(tail, behind, often, draw)
    behind = len(tail.cluster.log(tail.where)) - stored
    found = tail.last_stored(3)
    if behind < limit:
        assert found == sequence_id(3, rows - 1)
    elif behind > limit + small:
        assert found == NOTHING


def _publish(tail: Tail, entries: int, often: float, draw: random.Random) -> None:
    """Publish entries of others to ledgers with ids that are not dense."""
    for _ in range(entries):
        if draw.random() < often:
            for _ in range(draw.randrange(4)):
                tail.cluster.roll_ledger(tail.elsewhere)
            tail.cluster.roll_ledger(tail.where)
        chosen = draw.random()
        if chosen < 0.02:
            tail.cluster.publish_chunked(tail.where, StoredMessage(b"chunks", key="other"), 3)
        else:
            tail.cluster.publish(tail.where, OTHER, corrupt=chosen < 0.05)
