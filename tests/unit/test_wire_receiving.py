"""Entries and permits of the wire transport, against a scripted broker."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import cast

import pytest

from keyshard.broker import framing
from keyshard.broker.port import ReadOptions
from keyshard.broker.wire import broker as brokering
from keyshard.broker.wire import consumer as consuming
from keyshard.broker.wire import receiver_queue, stored_entry
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.permits import LENT_MAX
from keyshard.core.position.entry import EntryId
from keyshard.core.protobuf import message
from keyshard.errors import CorruptEntryError
from tests.helpers import wait_until
from tests.support.answering_broker import (
    ACK,
    CLOSE_CONSUMER,
    CONNECT,
    CONNECTED,
    FLOW,
    SUBSCRIBE,
    TOPIC,
    Fields,
    ScriptedBroker,
    Session,
    entry,
    next_of,
    subscribed,
)

pytestmark = pytest.mark.usefixtures("patient")


def test_permits_are_given_back_as_entries_are_taken(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    for number in range(5):
        scripted.sessions[0].send_entry(number)
    taken = 0
    while taken < 5:
        taken += len(consumer.receive(1_000))
    wait_until(lambda: len(scripted.asked_for(FLOW)) > 1)
    assert [fields[2] for fields in scripted.asked_for(FLOW)] == [10, 5]
    assert scripted.asked_for(SUBSCRIBE)[0][3] == 3


def test_a_silent_broker_gets_a_limited_number_of_extra_permits(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "QUIET_S", 0.01)
    monkeypatch.setattr(brokering, "NUDGE_LONGEST_WAIT_S", 0.02)
    consumer = subscribed(brokers(scripted))

    def granted() -> int:
        return sum(cast(int, fields[2]) for fields in scripted.asked_for(FLOW))

    used = 0
    for count in (0, 2, 1, 30):
        for number in range(used, used + count):
            scripted.sessions[0].send_entry(number)
            used += 1
            wait_until(lambda: consumer.receive(100))
            assert granted() <= 10 + used + LENT_MAX
        wait_until(lambda: granted() == 10 + used + LENT_MAX)  # noqa: B023 - called at once
        wait_until(lambda: not consumer._watched)
    assert granted() == 10 + used + LENT_MAX, "nobody asks for ever"
    before = granted()
    scripted.sessions[0].cut()
    # The new subscription begins with its queue.
    wait_until(lambda: granted() == before + 10 + LENT_MAX)


def test_a_broker_with_untaken_entries_gets_no_extra_permits(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "QUIET_S", 0.2)
    scripted.answers[FLOW] = lambda session, *_: session.send_entry(0)
    consumer = subscribed(brokers(scripted))
    wait_until(lambda: not consumer._watched)
    assert len(scripted.asked_for(FLOW)) < 1 + LENT_MAX
    assert consumer.receive(1_000)
    assert consumer._watched


def test_a_reader_asks_for_nothing_behind_the_last_entry_that_is_wanted(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    how = ReadOptions(10, last=EntryId(7, 12))
    reader = brokers(scripted).reader(TOPIC, EntryId(7, 0), how)
    (session,) = scripted.sessions

    def permits() -> int:
        return sum(cast("int", fields[2]) for fields in scripted.asked_for(FLOW))

    for number in range(13):
        wait_until(lambda: permits() > number)  # noqa: B023
        session.send_entry(number)
        assert next_of(reader.read) == number
    assert permits() <= 13 + 1


def test_entries_requested_before_the_last_ledger_may_all_come(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    reader = brokers(scripted).reader(
        TOPIC, EntryId(6, 0), ReadOptions(300, last=EntryId(7, 2), first=300)
    )
    (session,) = scripted.sessions
    session.send_entry(0)
    assert next_of(reader.read) == 0
    for number in range(1, 300):
        session.send_entry(number)
    taken = 1
    while taken < 300:
        taken += len(reader.read(5_000))
    assert reader.stayed_connected()
    assert scripted.asked_for(FLOW)[0][2] == 300


def test_a_reader_that_begins_behind_the_end_accepts_earlier_entries(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    reader = brokers(scripted).reader(
        TOPIC, EntryId(7, 900), ReadOptions(1_000, last=EntryId(7, 900), first=1_000)
    )
    (session,) = scripted.sessions
    session.send_entry(0)
    assert next_of(reader.read) == 0
    wait_until(lambda: [fields[2] for fields in scripted.asked_for(FLOW)] == [1, 900])
    for number in range(1, 900):
        session.send_entry(number)
    taken = 1
    while taken < 900:
        taken += len(reader.read(5_000))
    assert reader.stayed_connected()


def test_a_consumer_that_gets_more_than_its_permits_subscribes_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    broker = brokers(scripted)
    consumer, other = subscribed(broker, queue=10), subscribed(broker)
    for number in range(1_000):
        scripted.sessions[0].send_entry(number, consumer=0)
    scripted.sessions[0].send_entry(0, consumer=1)
    assert next_of(other.receive) == 0
    assert len(consumer._queue) <= 2 * 10 + 200
    taken: list[int] = []

    def anew() -> bool:
        taken.extend(block.id.entry for block in consumer.receive(0))
        return len(scripted.asked_for(SUBSCRIBE)) == 3 and consumer.is_connected()

    wait_until(anew)
    assert taken == list(range(len(taken)))
    assert (consumer.losses, other.losses) == (1, 0)
    scripted.sessions[0].send_entry(0, consumer=2)
    assert next_of(consumer.receive) == 0


def test_a_corrupt_entry_is_named_where_it_lies_and_never_acknowledged(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    broker = brokers(scripted)
    consumer, reader = subscribed(broker), broker.reader(TOPIC, EntryId(7, 0))
    bad = b"\x0e\x01\0\0\0\0" + entry(1)
    for number, take in enumerate((consumer.receive, reader.read)):
        for entry_id, stored in enumerate([entry(0), bad, entry(2), bad, bad, entry(5)]):
            scripted.sessions[0].send_entry(entry_id, stored, number)
        found = [next_of(take) for _ in range(6)]
        assert found == [0, "7:1", 2, "7:3", "7:4", 5]
    broker.close()
    assert not scripted.asked_for(ACK)


def test_late_entries_of_an_ended_subscription_are_dropped(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    (session,) = scripted.sessions
    session.end_consumers()
    session.send_entry(8, consumer=0)
    wait_until(lambda: len(scripted.asked_for(FLOW)) == 2)
    session.send_entry(9, consumer=0)
    session.send_entry(1, consumer=1)
    assert next_of(consumer.receive) == 1
    assert consumer.receive(10) == []


def test_an_entry_that_was_found_corrupt_before_a_cut_comes_again_in_its_order(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    for entry_id, stored in enumerate([entry(0), b"\x0e\x01\0\0\0\0" + entry(1)]):
        scripted.sessions[0].send_entry(entry_id, stored)
    wait_until(lambda: len(consumer._queue) == 2)
    assert next_of(consumer.receive) == 0
    scripted.sessions[0].cut()
    wait_until(lambda: consumer.losses and consumer.is_connected())
    scripted.sessions[1].send_entry(0)
    assert next_of(consumer.receive) == 0


def test_permits_of_a_corrupt_batch_are_given_back_as_the_broker_counts_them(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    metadata = message({1: b"p", 2: 0, 3: 1, 11: 10})
    checksum_wrong = b"\x0e\x01\0\0\0\0" + struct.pack(">I", len(metadata)) + metadata
    scripted.sessions[0].send_entry(0, checksum_wrong)
    with pytest.raises(CorruptEntryError):
        wait_until(lambda: consumer.receive(5_000))
    wait_until(lambda: [fields[2] for fields in scripted.asked_for(FLOW)] == [10, 10])


def declaring(count: int) -> bytes:
    """A batch that declares to have messages, and has none."""
    metadata = message({1: b"p", 2: 0, 3: 1, 11: count % 2**64})
    return struct.pack(">I", len(metadata)) + metadata


@pytest.mark.parametrize(
    ("count", "grants"),
    [(2**31 - 1, [2**31 - 1, 4]), (2**31, [2**31 - 1, 5]), (2**32 - 3, []), (-1, [])],
)
def test_permits_follow_the_declared_size_of_a_batch_within_31_bits(
    count: int, grants: list[int], scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    """Ten messages ahead; a grant of more than 31 bits would end the connection of everybody."""
    consumer = subscribed(brokers(scripted))
    for number in range(4):
        scripted.sessions[0].send_entry(number)
        assert next_of(consumer.receive) == number
    scripted.sessions[0].send_entry(4, declaring(count))
    with pytest.raises(CorruptEntryError, match="declare"):
        wait_until(lambda: consumer.receive(5_000))
    scripted.sessions[0].send_entry(5)
    assert next_of(consumer.receive) == 5
    wait_until(lambda: len(scripted.asked_for(FLOW)) > len(grants))
    assert [fields[2] for fields in scripted.asked_for(FLOW)][1:] == grants
    assert not consumer.losses


def test_a_consumer_with_excess_permits_subscribes_again_and_no_other_is_lost(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    """The broker adds negative declared sizes of a batch to the permits."""
    broker = brokers(scripted)
    consumer, other = subscribed(broker), subscribed(broker)
    scripted.sessions[0].send_entry(0, declaring(-(2**30)), consumer=0)
    with pytest.raises(CorruptEntryError):
        wait_until(lambda: consumer.receive(5_000))
    assert consumer.receive(0) == []
    wait_until(lambda: len(scripted.asked_for(SUBSCRIBE)) == 3 and consumer.is_connected())
    assert len(scripted.asked_for(CLOSE_CONSUMER)) == 1
    assert (consumer.losses, other.losses) == (1, 0)
    scripted.sessions[0].send_entry(1, consumer=2)
    assert next_of(consumer.receive) == 1


def test_the_beginning_of_an_oversized_frame_is_kept(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is unreadable, whatever the limit of the broker."""

    def connected(session: Session, _: int, __: Fields) -> None:
        session.reply(CONNECTED, {1: b"t", 2: 21, 3: 2**31 - 1})

    scripted.answers[CONNECT] = connected
    for module in (framing, stored_entry):
        monkeypatch.setattr(module, "KEPT_BYTES_MAX", 200_000)
    consumer = subscribed(brokers(scripted))
    (session,) = scripted.sessions
    sizes = [(0, 1), (1, 3_000_000), (2, 100_000), (3, 200_001), (4, 300_000), (5, 1)]
    for number, size in sizes:
        session.send_entry(number, entry(number, bytes(size)))
    found: list[int] = []
    refused: list[str] = []

    def taken() -> bool:
        try:
            found.extend(block.id.entry for block in consumer.receive(5_000))
        except CorruptEntryError as exc:
            refused.append(exc.message)
        return len(found) + len(refused) == len(sizes)

    wait_until(taken)
    assert found == [0, 2, 5]
    assert [one.split()[1] for one in refused] == ["7:1", "7:3", "7:4"]
    assert all("bytes, more than 200000" in one for one in refused)
    assert not consumer.losses


def test_a_consumer_that_takes_nothing_does_not_hold_up_another(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    broker = brokers(scripted)
    idle, busy = subscribed(broker), subscribed(broker)
    (session,) = scripted.sessions
    for number in range(10):
        session.send_entry(number, entry(number, bytes(500_000)), consumer=0)
    session.send_entry(99, consumer=1)
    assert [block.id.entry for block in busy.receive(5_000)] == [99]
    assert busy.last_entry() == EntryId(7, 3)
    assert idle.losses == busy.losses == 0


def test_permits_begin_with_one_message_and_grow_with_measured_sizes(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted), queue=10, queue_bytes=1 << 20)
    for sent, permits in enumerate(([1], [1, 2], [1, 2, 3], [1, 2, 3, 5])):
        wait_until(lambda: [fields[2] for fields in scripted.asked_for(FLOW)] == permits)  # noqa: B023
        scripted.sessions[-1].send_entry(sent)
        assert consumer.receive(5_000)
    scripted.sessions[-1].cut()
    wait_until(lambda: scripted.asked_for(FLOW)[-1][2] == 10)


def test_large_messages_are_sent_ahead_one_by_one(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted), queue=1_000, queue_bytes=100_000)
    for number in range(5):
        scripted.sessions[-1].send_entry(number, entry(number, bytes(90_000)))
        assert consumer.receive(5_000)
    wait_until(lambda: [fields[2] for fields in scripted.asked_for(FLOW)] == [1] * 6)


def test_entries_beyond_the_memory_of_a_queue_are_dropped_and_requested_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Small messages let a queue of 100 KB grow. 2. All of a sudden each message has 90 KB."""
    monkeypatch.setattr(receiver_queue, "EXCESS_BYTES_MAX", 200_000)
    consumer = subscribed(brokers(scripted), queue=1_000, queue_bytes=100_000)
    sent = 0
    for _ in range(8):
        scripted.sessions[-1].send_entry(sent)
        sent += 1
        assert consumer.receive(5_000)
    for number in range(sent, sent + 100):
        scripted.sessions[-1].send_entry(number, entry(number, bytes(90_000)))
    wait_until(lambda: consumer._queue.overflown)
    assert consumer._queue.held_bytes < 500_000
    assert not consumer.has_given_all()
    came = []
    while not consumer.losses:
        came += [block.id.entry for block in consumer.receive(100)]
    assert came == list(range(sent, sent + len(came)))
    wait_until(consumer.is_connected)
    assert scripted.asked_for(CLOSE_CONSUMER)
    # As many as fit of such messages.
    wait_until(lambda: scripted.asked_for(FLOW)[-1][2] == 1)
    assert consumer._shared.excess.bytes == 0
