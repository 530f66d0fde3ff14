"""The connection is lost at every step of code that concludes from absent entries of a Reader.

Stored entries are still found, and none is called lost, resolved or done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.columns.messages import messages_of
from keyshard.coordinator.startup import audit
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.read_target import Gap
from keyshard.core.ring.hash_range import split_ring
from keyshard.dead_letters.parking import ParkingState
from keyshard.dead_letters.startup import open_dead_letters
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.errors import (
    BrokerUnavailableError,
    DataLossAckedElsewhereError,
    DataLossTrimmedError,
    KeyShardError,
    ReplayTimeoutError,
    TopicRecreatedError,
)
from keyshard.observe.doctor import examine
from keyshard.reading.gap_reader import GapReport, inspect_ack_gaps, search
from keyshard.reading.replay import replay
from tests.helpers import COMMITTED, block, config, key_in
from tests.support.disconnecting_readers import NEVER, DisconnectingBroker, every_disconnect

pytestmark = pytest.mark.usefixtures("reads_in_no_time")

RING = split_ring(1)[0]


class Topic:
    """Three ledgers of seven entries; every fourth is a batch of three, every fifth a marker."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=7)
        self.where = TopicPartition(self.cluster.create_topic("orders"))
        self.markers: list[EntryId] = []
        self.entries: list[EntryId] = []
        for number in range(21):
            if number % 5 == 2:
                self.markers.append(self.cluster.publish_marker(self.where))
                continue
            messages = [Message(b"%d" % number, key="k")] * (3 if number % 4 == 0 else 1)
            ((_, entry_id),) = self.cluster.publish(
                self.where, *messages, batching=Batching.BY_KEY, publish_ms=1_000
            )
            self.entries.append(entry_id)

    def checkpoint(self, batch: EntrySet, **changes: Any) -> Checkpoint:
        state = PartitionCheckpoint(None, batch, batch, {}, 10**15)
        return Checkpoint("standalone", "unit", 4, {self.where: state}, **changes)


@pytest.fixture
def topic() -> Iterator[Topic]:
    made = Topic()
    yield made
    made.cluster.validate()


def steps_of(cluster: MemoryCluster, action: Callable[[MemoryBroker], object]) -> int:
    """Steps of the Readers when nothing is cut."""
    broker = DisconnectingBroker(cluster)
    with suppress(KeyShardError):
        action(broker)
    assert broker.steps > 2
    return broker.steps


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_replay_gives_its_whole_batch_wherever_the_connection_is_cut(
    topic: Topic, at_once: int
) -> None:
    wanted = EntrySet.of([*topic.entries[2:9], *topic.entries[-3:]])
    end = topic.checkpoint(wanted)

    def read(broker: MemoryBroker) -> None:
        blocks = replay(broker, end, 30, fail_on_data_loss=False)[topic.where]
        assert EntrySet.of(one.id for one in blocks) == wanted
        assert all(one.whole for one in blocks)

    for broker in every_disconnect(topic.cluster, steps_of(topic.cluster, read), at_once):
        read(broker)


def test_exactly_the_trimmed_entries_are_a_data_loss_wherever_the_connection_is_cut(
    topic: Topic,
) -> None:
    topic.cluster.trim(topic.where, topic.entries[5])
    beyond = EntryId(99, 4)
    end = topic.checkpoint(EntrySet.of([*topic.entries[2:9], beyond]))

    def read(broker: MemoryBroker) -> None:
        with pytest.raises(DataLossTrimmedError) as caught:
            replay(broker, end, 30)
        assert caught.value.facts["missing"] == str(EntrySet.of([*topic.entries[2:5], beyond]))

    for broker in every_disconnect(topic.cluster, steps_of(topic.cluster, read)):
        read(broker)


def test_a_connection_that_never_lasts_is_a_named_retriable_error(topic: Topic) -> None:
    end = topic.checkpoint(EntrySet.of(topic.entries))
    for fail_on_data_loss in (True, False):
        with pytest.raises((BrokerUnavailableError, ReplayTimeoutError)) as caught:
            replay(
                DisconnectingBroker(topic.cluster, range(NEVER)), end, 0.05,
                fail_on_data_loss=fail_on_data_loss,
            )  # fmt: skip
        assert caught.value.retriable


def test_ack_gaps_and_entries_are_distinguished_wherever_the_connection_is_lost(
    topic: Topic,
) -> None:
    ack_gaps = EntrySet.of([*topic.markers[:-1], *topic.entries[3:-1:2]])

    def look(broker: MemoryBroker, seconds: float = 30) -> GapReport:
        found = inspect_ack_gaps(broker, topic.where, ack_gaps, time.monotonic() + seconds)
        assert not found.proofs.resolved & EntrySet.of(topic.entries)
        return found

    whole = look(MemoryBroker(topic.cluster))
    assert whole.proofs.resolved == EntrySet.of(topic.markers[:-1])
    for broker in every_disconnect(topic.cluster, steps_of(topic.cluster, look)):
        found = look(broker)
        assert (found.complete, found.proofs.resolved, found.existing) == (
            True, whole.proofs.resolved, whole.existing,
        )  # fmt: skip
        assert found.proofs.ledger_ends == whole.proofs.ledger_ends


def test_the_first_entry_of_a_gap_is_found_wherever_the_connection_is_cut(topic: Topic) -> None:
    empty = Gap(topic.markers[0], EntryId(topic.markers[0].ledger, topic.markers[0].entry + 1))
    full = Gap(topic.markers[0], topic.entries[-1])
    behind = Gap(EntryId(99, 0), EntryId(99, 5))
    following = next(one for one in topic.entries if one > topic.markers[0])

    def look(broker: MemoryBroker) -> None:
        assert search(broker, topic.where, [empty], ()) == (None, 0, 1)
        assert search(broker, topic.where, [full], ()) == (following, 0, 0)
        assert search(broker, topic.where, [empty, full], ()) == (following, 0, 1)
        assert search(broker, topic.where, [behind], ()) == (None, 0, 1)

    for broker in every_disconnect(topic.cluster, steps_of(topic.cluster, look)):
        look(broker)


def acknowledged(topic: Topic) -> None:
    """Acknowledge all entries of the topic on the source's own subscription."""
    consumer = MemoryBroker(topic.cluster).subscribe(
        SubscriptionSpec(topic.where, "unit", RING, consumer_name="c", receiver_queue_size=100),
        StartPosition.EARLIEST,
    )
    consumer.acknowledge(topic.entries)
    consumer.close()


def test_the_audit_names_foreign_acknowledgements_wherever_the_connection_is_cut(
    topic: Topic,
) -> None:
    acknowledged(topic)
    end = topic.checkpoint(EntrySet.of(topic.entries[:4]))
    lost = EntrySet.of(topic.entries[4:])

    def look(broker: MemoryBroker) -> None:
        with pytest.raises(DataLossAckedElsewhereError) as caught:
            audit(broker, MemoryAdmin(topic.cluster), config(topic.where.topic), end, [topic.where])
        assert caught.value.facts["count"] == len(lost)

    for broker in every_disconnect(topic.cluster, steps_of(topic.cluster, look)):
        look(broker)


def test_the_audit_resolves_nothing_that_it_could_not_look_at(topic: Topic) -> None:
    """The audit took entries for markers that no Reader had shown by its deadline."""
    acknowledged(topic)
    source = config(topic.where.topic, operation_timeout_ms=1_000)
    end = topic.checkpoint(EntrySet.of(topic.entries[:4]))
    broker = DisconnectingBroker(topic.cluster, range(NEVER))
    with pytest.raises(BrokerUnavailableError):
        audit(broker, MemoryAdmin(topic.cluster), source, end, [topic.where])


def test_a_topic_made_again_is_recognised_wherever_the_connection_is_cut(topic: Topic) -> None:
    """The newest delivered entry is younger than the checkpoint: silence is no answer."""
    state = PartitionCheckpoint(None, EntrySet.of(topic.entries[:4]), EntrySet(), {}, 1)
    end = Checkpoint("standalone", "unit", 4, {topic.where: state})
    source = config(topic.where.topic)
    acknowledged(topic)

    def look(broker: MemoryBroker) -> None:
        with pytest.raises(TopicRecreatedError):
            audit(broker, MemoryAdmin(topic.cluster), source, end, [topic.where])

    for broker in every_disconnect(topic.cluster, steps_of(topic.cluster, look)):
        look(broker)


def test_the_doctor_sees_the_same_sample_wherever_the_connection_is_cut(topic: Topic) -> None:
    for _ in range(5):
        batch = [Message(b"v", key=key_in(one)) for one in split_ring(8)]
        topic.cluster.publish(topic.where, *batch, batching=Batching.MIXED)

    def look(broker: MemoryBroker) -> list[object]:
        return [*examine(config(topic.where.topic), lambda: broker, MemoryAdmin(topic.cluster))]

    healthy = look(MemoryBroker(topic.cluster))
    for broker in every_disconnect(topic.cluster, steps_of(topic.cluster, look)):
        assert look(broker) == healthy


# -- dead letters -----------------------------------------------------------------------------


def dead_letter(topic: Topic, number: int, key: str) -> DeadLetter:
    (message,) = messages_of(topic.where, block(7, number, key, values=[b"%d" % number]))
    assert message.message_id == MessageId(7, number, 0)
    return DeadLetter(message, "unit", DeadLetterKind.PARKED, 3, "broken")


class Letters:
    """A dead-letter topic with six dead letters of two keys."""

    def __init__(self, topic: Topic) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=4)
        self.name = self.cluster.create_topic("letters")
        dead_letters = self.open(MemoryBroker(self.cluster))
        self.before = dead_letters.checkpoint(COMMITTED)
        for number in range(6):
            dead_letters.send(dead_letter(topic, number, "ab"[number % 2]))
        self.clients[-1].close()

    def open(
        self, broker: MemoryBroker, parked: Mapping[str, Any] | None = None
    ) -> DeadLetterStore:
        self.clients = [broker]
        return open_dead_letters(broker, self.name, config("orders"), parked, fail=print)


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_no_parked_key_is_forgotten_wherever_the_connection_is_cut(
    topic: Topic, from_checkpoint: bool
) -> None:
    made = Letters(topic)

    def fold(broker: MemoryBroker) -> None:
        try:
            dead_letters = made.open(broker, made.before if from_checkpoint else None)
            assert dead_letters.keys.parking.states() == {
                "a": ParkingState.PARKED,
                "b": ParkingState.PARKED,
            }
            parked = dead_letters.keys.parking.parked
            assert [parked.keys[key].count for key in "ab"] == [3, 3]
        finally:
            broker.close()

    for broker in every_disconnect(made.cluster, steps_of(made.cluster, fold)):
        fold(broker)


def test_every_dead_letter_of_a_key_is_read_wherever_the_connection_is_cut(topic: Topic) -> None:
    made = Letters(topic)

    def read(broker: DisconnectingBroker) -> None:
        cuts, broker.cuts = broker.cuts, ()
        try:
            dead_letters = made.open(broker)
            broker.cuts, broker.steps = cuts, 0
            assert dead_letters.keys.unpark("a")
            first = dead_letters.first("a")
            assert first is not None
            rest = dead_letters.replay("a", first)
            found = [first]
            while (one := rest.next()) is not None:
                found.append(one)
            assert [one.dead_letter.message.value for one in found] == [b"0", b"2", b"4"]
        finally:
            broker.close()

    for broker in every_disconnect(made.cluster, steps_of(made.cluster, read)):  # type: ignore[arg-type]
        read(broker)
