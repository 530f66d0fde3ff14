"""Contract: entries with a producer name and sequence ids, each stored once."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pyarrow as pa
import pytest

from keyshard.broker.port import EntryProducer, PublishOptions
from keyshard.broker.unconfirmed import MaybeStoredError
from keyshard.columns.content import gather
from keyshard.columns.outgoing import OutgoingMessage, outgoing_of
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    DeduplicationError,
    KeyShardError,
    MessageTooLargeError,
    ProducerBusyError,
    ProducerFencedError,
    QuotaExceededError,
)
from tests.contract.contract_harness import (
    DEADLINE_S,
    BreakableHarness,
    Harness,
    receive,
    subscribe,
)
from tests.contract.entries import (
    NAME,
    deduplicated,
    named,
    numbered,
    rows,
    stored,
    values,
)
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline, in_time, joined


@pytest.fixture(autouse=True)
def _publishing(request: pytest.FixtureRequest) -> None:
    """A client that publishes no entries runs only the case of the refusal."""
    name = "breakable" if "breakable" in request.fixturenames else "harness"
    refusing = request.node.originalname == "test_a_client_that_publishes_no_entries_is_refused"
    if request.getfixturevalue(name).publishes_entries is refusing:
        pytest.skip("the transport publishes entries" if refusing else "pulsar-client cannot")


def test_a_client_that_publishes_no_entries_is_refused(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    with pytest.raises(ConfigError, match="transport"):
        broker.entry_producer(where, PublishOptions("name"))


@pytest.mark.parametrize("partitions", [0, 2])
def test_messages_become_the_entries_that_are_asked_for(harness: Harness, partitions: int) -> None:
    where = TopicPartition(harness.create_topic(partitions), 1 if partitions else -1)
    broker = harness.broker()
    producer = broker.entry_producer(where, PublishOptions())
    sent = [producer.publish(numbered(start, start + 5), start) for start in range(0, 50, 5)]
    sent.append(producer.publish(rows(b"alone", key=None), 50))
    producer.flush()
    found = stored(broker, where)
    assert found.ids == [one.result(0) for one in sent]
    assert found.values == [*values(range(50)), b"alone"]
    assert [block.rows for block in found.blocks] == [5] * 10 + [1]
    assert [block.batched for block in found.blocks] == [True] * 10 + [False]
    assert found.blocks[0].partition_keys == ["k"] * 5
    assert found.blocks[-1].partition_keys == [None]


def test_every_field_of_a_message_arrives(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    sent = [
        OutgoingMessage(b"\x00\xff", "k", ordering_key="o", properties={"a": "1", "b": ""}),
        OutgoingMessage(None, "j", ordering_key="o", event_ms=1_700_000_000_123),
    ]
    producer = broker.entry_producer(where, PublishOptions())
    producer.publish(sent, 0)
    producer.publish(sent[1:], 2)
    producer.flush()
    found = stored(broker, where)
    columns = gather(found.blocks, ["value", "__key", "__orderingKey", "__properties"])
    assert columns["value"].to_pylist() == [b"\x00\xff", None, None]
    assert columns["__key"].to_pylist() == ["k", "j", "j"]
    assert columns["__orderingKey"].to_pylist() == ["o", "o", "o"]
    pairs = [dict(one or ()) for one in columns["__properties"].to_pylist()]
    assert pairs == [{"a": "1", "b": ""}, {}, {}]
    event_times = gather(found.blocks, ["__eventTime"])["__eventTime"].cast("int64").to_pylist()
    assert event_times == [None, 1_700_000_000_123_000, 1_700_000_000_123_000]


def test_columns_are_published_as_several_entries(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    batch = pa.record_batch(
        {
            "value": [b"a", None, b"c", b"d"],
            "__keyBytes": [b"\xff", b"\xff", b"\xff", None],
            "__eventTime": pa.array([None, 7, None, None], pa.timestamp("ms", "UTC")),
        }
    )
    producer = broker.entry_producer(where, PublishOptions())
    sent = producer.publish_all(outgoing_of(batch), [2, 3, 4], 0)
    producer.flush()
    found = stored(broker, where)
    assert found.ids == [one.result(0) for one in sent]
    assert [block.rows for block in found.blocks] == [2, 1, 1]
    columns = gather(found.blocks, ["value", "__key", "__eventTime"])
    assert columns["value"].to_pylist() == [b"a", None, b"c", b"d"]
    assert columns["__key"].to_pylist() == ["/w==", "/w==", "/w==", None]
    assert columns["__eventTime"].cast("int64").to_pylist() == [None, 7_000, None, None]


def test_entries_that_cannot_be_published_fail_one_by_one(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    producer = broker.entry_producer(where, PublishOptions())
    columns = outgoing_of(pa.record_batch({"value": [b"a", b"b", b"c"]}))
    producer.close()
    sent = producer.publish_all(columns, [1, 2, 3], 0)
    assert [type(one.exception(DEADLINE_S)) for one in sent] == [BrokerError] * 3


def test_consumers_get_entries_by_their_key(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    producer = broker.entry_producer(where, PublishOptions())
    for number in range(10):
        producer.publish(numbered(number, number + 1, f"k{number % 2}"), number)
    producer.flush()
    received = receive([consumer], 10).by_key()
    assert received == {"k0": values(range(0, 10, 2)), "k1": values(range(1, 10, 2))}


def test_a_sequence_id_is_stored_once_in_entries_of_any_size(harness: Harness) -> None:
    where, broker = deduplicated(harness), harness.broker()
    first = named(broker, where)
    assert first.last_sequence_id == -1
    first.publish(numbered(0, 10), 0)
    first.publish(numbered(10, 20), 10)
    first.flush()
    first.close()

    second = named(broker, where)
    assert second.last_sequence_id == 19
    again = second.publish(numbered(15, 20), 15)
    new = second.publish(numbered(20, 30), 20)
    second.flush()
    assert again.result(0) is None
    assert new.result(0) is not None
    assert stored(broker, where).values == values(range(30))


def test_an_entry_of_old_and_new_messages_stores_the_new_ones(harness: Harness) -> None:
    where, broker = deduplicated(harness), harness.broker()
    first = named(broker, where)
    first.publish(numbered(0, 10), 0)
    first.flush()
    first.close()
    second = named(broker, where)
    mixed = second.publish(numbered(5, 15), 5)
    second.flush()
    found = stored(broker, where)
    assert found.values == values(range(15))
    assert mixed.result(0) == found.ids[-1]


def test_a_stored_id_beyond_the_published_ids_fences_the_producer(harness: Harness) -> None:
    where, broker = deduplicated(harness), harness.broker()
    first = named(broker, where)
    first.publish(numbered(0, 10), 100)
    first.flush()
    first.close()
    second = named(broker, where)
    with pytest.raises(ProducerFencedError, match=NAME):
        second.publish(numbered(0, 5), 50)


def test_sequence_ids_of_different_names_are_independent(harness: Harness) -> None:
    where, broker = deduplicated(harness), harness.broker()
    for name in ("a", "b"):
        producer = named(broker, where, name)
        producer.publish(numbered(0, 3), 0)
        producer.flush()
    assert stored(broker, where).values == values(range(3)) * 2


def test_a_name_in_use_is_refused_until_it_is_free(harness: Harness) -> None:
    where = deduplicated(harness)
    holder = named(harness.broker(), where)
    other = harness.broker()
    opened: list[EntryProducer] = []
    refused: list[KeyShardError] = []

    def open_until_it_works() -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not opened and time.monotonic() < end_s:
            try:
                opened.append(named(other, where))
            except ProducerBusyError as exc:  # noqa: PERF203 - it tries again
                refused.append(exc)

    opening = threading.Thread(target=open_until_it_works)
    opening.start()
    # The name is refused at once, or asked for again for as long as a request may take.
    opening.join(0.5)
    assert not opened
    holder.publish(numbered(0, 3), 0)
    holder.flush()
    holder.close()
    joined(opening, DEADLINE_S)
    assert opened[0].last_sequence_id == 2
    assert all(one.retriable for one in refused)


def test_the_admin_interface_reports_deduplication(harness: Harness) -> None:
    assert not harness.admin().deduplicates(harness.create_topic())
    assert harness.admin().deduplicates(deduplicated(harness).topic)


def test_without_deduplication_a_name_is_refused_after_its_first_entry(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    producer = named(broker, where)
    with suppress(DeduplicationError):
        for start in range(0, 50, 5):
            producer.publish(numbered(start, start + 5), start)
    with pytest.raises(DeduplicationError):
        producer.flush()
    assert stored(broker, where).values == values(range(5))


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(harness: Harness) -> None:
    where, broker = deduplicated(harness), harness.broker()
    producer = named(broker, where)
    limit = producer.message_bytes_max
    with pytest.raises(MessageTooLargeError):
        producer.publish(rows(b"x" * (limit + 1)), 0)
    producer.publish(rows(b"x" * (limit - 1_000)), 0)
    producer.publish(rows(b"small"), 1)
    producer.flush()
    assert [len(present(one)) for one in stored(broker, where).values] == [limit - 1_000, 5]


@pytest.mark.parametrize("name", [None, NAME])
def test_a_move_of_the_topic_loses_and_repeats_nothing(harness: Harness, name: str | None) -> None:
    if name is not None and not harness.release.knows_every_id:
        pytest.skip("before Pulsar 5.0, such a producer ends")
    where, broker = deduplicated(harness), harness.broker()
    producer = broker.entry_producer(where, PublishOptions(name, send_timeout_s=60))
    sent = []
    for number in range(300):
        sent.append(producer.publish(numbered(number * 3, number * 3 + 3), number * 3))
        if number in (100, 200):
            harness.unload(where)
    producer.flush()
    assert [one.exception(0) for one in sent] == [None] * 300
    assert stored(broker, where).values == values(range(900))


def test_a_named_producer_ends_if_the_broker_may_have_forgotten_its_ids(
    harness: Harness,
) -> None:
    """Before Pulsar 5.0, a broker that has loaded a topic may know too few stored ids."""
    where, broker = deduplicated(harness), harness.broker()
    producer = named(broker, where)
    assert producer.knows_every_id is harness.release.knows_every_id

    def move() -> None:
        for _ in range(20):
            harness.unload(where)

    moving = threading.Thread(target=move)
    moving.start()
    number, ended = 0, None
    while ended is None and moving.is_alive():
        try:
            producer.publish(numbered(number * 3, number * 3 + 3), number * 3)
        except BrokerUnavailableError as exc:
            ended = exc
        number += 1
    joined(moving, DEADLINE_S)
    with suppress(MaybeStoredError):
        producer.flush()
    assert isinstance(ended, MaybeStoredError | None)
    assert ended is None or not producer.knows_every_id
    found = stored(broker, where).values
    assert found == values(range(len(found)))
    assert len(found) == number * 3 or not producer.knows_every_id


def test_a_broker_that_dies_loses_and_repeats_nothing(breakable: BreakableHarness) -> None:
    if not breakable.release.knows_every_id:
        pytest.skip("before Pulsar 5.0, such a producer ends")
    where, broker = deduplicated(breakable), breakable.broker()
    producer = broker.entry_producer(where, PublishOptions(NAME, send_timeout_s=120))
    sent = []
    for number in range(2_000):
        sent.append(producer.publish(numbered(number * 3, number * 3 + 3), number * 3))
        if number == 1_000:
            sent[0].result(DEADLINE_S)
            breakable.crash()
    producer.flush()
    assert [one.exception(0) for one in sent] == [None] * 2_000
    assert stored(breakable.broker(), where).values == values(range(6_000))


def test_a_named_producer_ends_with_its_first_late_entry(breakable: BreakableHarness) -> None:
    where, broker = deduplicated(breakable), breakable.broker()
    producer = broker.entry_producer(where, PublishOptions(NAME, send_timeout_s=1.0))
    producer.publish(numbered(0, 3), 0)
    producer.flush()
    with breakable.away():
        late = [producer.publish(numbered(start, start + 3), start) for start in (3, 6)]
        with pytest.raises(BrokerUnavailableError) as caught:
            producer.flush()
        assert caught.value.retriable
        assert all(isinstance(one.exception(0), BrokerUnavailableError) for one in late)
        with pytest.raises(BrokerUnavailableError):
            producer.publish(numbered(9, 12), 9)
    again = named(breakable.broker(), where)
    assert again.last_sequence_id == 2
    again.publish(numbered(3, 12), 3)
    again.flush()
    assert stored(breakable.broker(), where).values == values(range(12))


def test_without_a_name_only_late_entries_fail(breakable: BreakableHarness) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    producer = broker.entry_producer(where, PublishOptions(send_timeout_s=1.0))
    with breakable.away():
        late = producer.publish(numbered(0, 1), 0)
        with pytest.raises(BrokerUnavailableError):
            late.result(DEADLINE_S)

    def takes() -> bool:
        return producer.publish(rows(b"later"), 1).exception(DEADLINE_S) is None

    wait_until(takes)


@pytest.mark.parametrize("name", [None, NAME])
def test_a_topic_beyond_its_quota_takes_nothing_until_it_has_room(
    breakable: BreakableHarness, name: str | None
) -> None:
    where, broker = deduplicated(breakable), breakable.broker()
    subscribe(broker, where)  # the quota limits the backlog of this subscription
    producer = broker.entry_producer(where, PublishOptions(name, send_timeout_s=DEADLINE_S))
    producer.publish(numbered(0, 3), 0)
    producer.flush()
    breakable.exceed_quota(where.topic, exceeded=True)

    def opens() -> bool:
        try:
            broker.entry_producer(where, PublishOptions()).close()
        except QuotaExceededError:
            return False
        return True

    wait_until(lambda: not opens(), deadline(60))
    waiting = producer.publish(numbered(3, 6), 3)
    breakable.exceed_quota(where.topic, exceeded=False)
    wait_until(opens, deadline(60))
    if name is not None and not breakable.release.knows_every_id:
        assert isinstance(waiting.exception(DEADLINE_S), MaybeStoredError)
        assert stored(broker, where).values == values(range(3))
        return
    assert waiting.exception(DEADLINE_S) is None
    assert stored(broker, where).values == values(range(6))


def test_waiting_entries_are_bounded_in_number_and_time(
    breakable: BreakableHarness,
) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    how = PublishOptions(send_timeout_s=1.5, pending_messages_max=10)
    producer = broker.entry_producer(where, how)
    with breakable.away():
        for start in (0, 5):
            producer.publish(numbered(start, start + 5), start)
        began_s = time.monotonic()
        with pytest.raises(BrokerUnavailableError):
            # The waiting entries fail first, or this one does.
            producer.publish(numbered(10, 15), 10).result(DEADLINE_S)
        assert time.monotonic() - began_s > 0.5
        in_time(began_s + deadline(10), "the send timeout is 1 s")


def test_a_closed_producer_refuses_work_and_closes_again(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    producer = harness.broker().entry_producer(where, PublishOptions())
    producer.close()
    producer.close()
    with pytest.raises(BrokerError):
        producer.publish(rows(b"x"), 0)
