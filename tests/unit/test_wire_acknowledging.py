"""Acknowledgements of the wire transport: receipts, limits, and repeats after a loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.wire import ack_grouping
from keyshard.broker.wire import broker as brokering
from keyshard.broker.wire import consumer as consuming
from keyshard.broker.wire.broker import WireBroker
from keyshard.core.position.entry import EntryId
from keyshard.core.protobuf import fields_of
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import BrokerError, BrokerUnavailableError
from tests.helpers import wait_until
from tests.support.answering_broker import (
    ACK,
    ACK_RESPONSE,
    CLOSE_CONSUMER,
    DEADLINE_S,
    ERROR,
    FLOW,
    SUBSCRIBE,
    TOPIC,
    Fields,
    ScriptedBroker,
    Session,
    subscribed,
)
from tests.support.deadlines import deadline

pytestmark = pytest.mark.usefixtures("patient")


def test_a_lost_connection_drops_queued_entries_and_resends_acknowledgements(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_grouping, "SENT_AGAIN_WITHIN_S", DEADLINE_S)
    consumer = subscribed(brokers(scripted, operation_timeout_ms=1_000))
    rung = threading.Event()
    consumer.when_ready(rung.set)
    scripted.sessions[0].send_entry(0)
    assert rung.wait(DEADLINE_S)
    scripted.answers[SUBSCRIBE] = lambda *_: None
    scripted.sessions[0].cut()
    wait_until(lambda: consumer.losses)
    assert not consumer.is_connected()
    assert consumer.receive(10) == []
    consumer.acknowledge([EntryId(7, 5), EntryId(7, 6)])
    assert not scripted.asked_for(ACK)
    del scripted.answers[SUBSCRIBE]
    wait_until(consumer.is_connected)
    wait_until(lambda: len(scripted.asked_for(FLOW)) == 2)
    kinds = [kind for kind, _ in scripted.asked if kind in (SUBSCRIBE, ACK, FLOW)]
    assert kinds[-3:] == [SUBSCRIBE, ACK, FLOW], "before anything can come again"
    again = scripted.asked_for(SUBSCRIBE)[-1]
    assert again[13] == 1, "a subscription that was deleted begins at the earliest"
    scripted.sessions[-1].send_entry(0)
    assert [block.id for block in consumer.receive(5_000)] == [EntryId(7, 0)]


def test_many_entries_are_acknowledged_by_one_command_and_closing_comes_after_it(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    consumer.acknowledge([EntryId(7, number) for number in range(500)])
    consumer.close()
    assert [kind for kind, _ in scripted.asked if kind in (ACK, CLOSE_CONSUMER)] == [
        ACK, CLOSE_CONSUMER,
    ]  # fmt: skip
    with pytest.raises(BrokerError):
        consumer.acknowledge([EntryId(7, 1)])


def test_an_acknowledgement_without_a_receipt_is_sent_again_with_the_next_subscription(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    """This also holds if the broker ends the subscription but not the connection."""
    consumer = subscribed(brokers(scripted))
    for number, lose in enumerate((Session.cut, Session.end_consumers)):
        scripted.answers[ACK] = lambda *_: None
        consumer.acknowledge([EntryId(7, number)])
        wait_until(lambda: len(scripted.asked_for(ACK)) == 2 * number + 1)  # noqa: B023 - called at once
        del scripted.answers[ACK]
        lose(scripted.sessions[-1])
        wait_until(lambda: len(scripted.asked_for(ACK)) == 2 * number + 2)  # noqa: B023 - called at once
        first, second = scripted.asked_for(ACK)[-2:]
        assert first[3] == second[3]
        assert first[1] != second[1]
        assert consumer.unconfirmed(DEADLINE_S) == 0
    assert len(scripted.sessions) == 2


def test_unconfirmed_acknowledgements_of_a_consumer_go_through_another(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    """Another consumer may have received the entry. Then the next one does not get it again."""

    def moving(session: Session, _: int, fields: Fields) -> None:
        session.reply(ERROR, {1: fields[5], 2: 6, 3: b"moving"})

    broker = brokers(scripted)
    ended, stays = (
        broker.subscribe(
            SubscriptionSpec(TOPIC, "s", hash_range, consumer_name="c", receiver_queue_size=10),
            StartPosition.EARLIEST,
        )
        for hash_range in split_ring(2)
    )
    first, second = scripted.sessions[-1].consumers
    scripted.answers[ACK] = lambda *_: None
    ended.acknowledge([EntryId(7, 0)])
    wait_until(lambda: scripted.asked_for(ACK))
    del scripted.answers[ACK]
    scripted.answers[SUBSCRIBE] = moving
    scripted.sessions[-1].reply(CLOSE_CONSUMER, {1: first, 2: 0})
    wait_until(lambda: ended.losses)
    ended.close(for_another=True)
    wait_until(lambda: len(scripted.asked_for(ACK)) == 2)
    one, again = scripted.asked_for(ACK)
    assert (one[1], again[1]) == (first, second)
    assert one[3] == again[3]
    assert stays.unconfirmed(DEADLINE_S) == 0


def test_unconfirmed_acknowledgements_go_through_another_if_a_close_is_refused(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    broker = brokers(scripted)
    ended, _stays = (
        broker.subscribe(
            SubscriptionSpec(TOPIC, "s", hash_range, consumer_name="c", receiver_queue_size=10),
            StartPosition.EARLIEST,
        )
        for hash_range in split_ring(2)
    )
    _, second = scripted.sessions[-1].consumers
    scripted.answers[ACK] = lambda *_: None
    ended.acknowledge([EntryId(7, 0)])
    wait_until(lambda: scripted.asked_for(ACK))
    del scripted.answers[ACK]
    scripted.answers[CLOSE_CONSUMER] = lambda session, _, fields: session.reply(
        ERROR, {1: fields[2], 2: 1, 3: b"metadata"}
    )
    with pytest.raises(BrokerUnavailableError, match="metadata"):
        ended.close(for_another=True)
    del scripted.answers[CLOSE_CONSUMER]
    wait_until(lambda: scripted.asked_for(ACK)[-1][1] == second)


def test_acknowledgements_from_before_a_long_absence_are_not_sent_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the cluster was wiped meanwhile, other entries have the ids acknowledged before."""
    monkeypatch.setattr(ack_grouping, "SENT_AGAIN_WITHIN_S", 0.1, raising=False)

    def moving(session: Session, _: int, fields: Fields) -> None:
        session.reply(ERROR, {1: fields[5], 2: 6, 3: b"moving"})

    consumer = subscribed(brokers(scripted))
    scripted.answers[ACK] = lambda *_: None
    consumer.acknowledge([EntryId(7, 0)])
    wait_until(lambda: scripted.asked_for(ACK))
    del scripted.answers[ACK]
    scripted.answers[SUBSCRIBE] = moving
    scripted.sessions[0].cut()
    wait_until(lambda: consumer.losses)
    consumer.acknowledge([EntryId(7, 1)])
    time.sleep(0.15)
    del scripted.answers[SUBSCRIBE]
    wait_until(consumer.is_connected)
    assert consumer.unconfirmed(DEADLINE_S) == 0
    consumer.acknowledge([EntryId(7, 2)])
    assert consumer.unconfirmed(DEADLINE_S) == 0
    named = [fields_of(fields[3])[2] for fields in scripted.asked_for(ACK)]  # type: ignore[arg-type]
    assert named == [0, 2]


def test_closing_waits_for_receipts(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "CONFIRM_S", DEADLINE_S)
    may_answer = threading.Event()

    def answer(*what: Any) -> None:
        if may_answer.wait(DEADLINE_S):
            Session.answer(*what)

    scripted.answers[ACK] = answer
    consumer = subscribed(brokers(scripted))
    consumer.acknowledge([EntryId(7, 1)])
    closing = threading.Thread(target=consumer.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_answer.set()
    closing.join(DEADLINE_S)
    assert [kind for kind, _ in scripted.asked if kind in (ACK, CLOSE_CONSUMER)] == [
        ACK, CLOSE_CONSUMER,
    ]  # fmt: skip


def test_without_receipts_no_more_than_a_limit_is_acknowledged(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_grouping, "WAITING_MAX", 3)
    may_answer = threading.Event()

    def answer(*what: Any) -> None:
        if may_answer.wait(DEADLINE_S):
            Session.answer(*what)

    scripted.answers[ACK] = answer
    consumer = subscribed(brokers(scripted))
    consumer.acknowledge([EntryId(7, number) for number in range(4)])
    with pytest.raises(BrokerUnavailableError, match="not confirmed 4"):
        consumer.acknowledge([EntryId(7, 5)])
    may_answer.set()
    assert consumer.unconfirmed(DEADLINE_S) == 0
    consumer.acknowledge([EntryId(7, 5)])


def test_closing_names_acknowledgements_without_a_receipt(
    scripted: ScriptedBroker,
    brokers: Callable[..., WireBroker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(brokering, "CONFIRM_S", 0.2)
    broker = brokers(scripted)
    one, other = subscribed(broker), subscribed(broker)
    one.acknowledge([EntryId(7, 1)])
    assert one.unconfirmed(DEADLINE_S) == 0
    scripted.answers[ACK] = lambda *_: None
    one.acknowledge([EntryId(7, 2), EntryId(7, 3)])
    other.acknowledge([EntryId(7, 4)])
    began = time.monotonic()
    broker.close()
    assert time.monotonic() - began < deadline(5)
    assert "not confirm the acknowledgement of 3 entries" in caplog.text
    assert len(scripted.asked_for(CLOSE_CONSUMER)) == 2, "in good order all the same"


def test_a_refused_acknowledgement_is_sent_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    refused = threading.Event()

    def refuse(session: Session, _: int, fields: Fields) -> None:
        del scripted.answers[ACK]
        session.reply(ACK_RESPONSE, {1: fields[1], 4: 2, 5: b"no bookie", 6: fields[8]})
        refused.set()

    scripted.answers[ACK] = refuse
    consumer = subscribed(brokers(scripted))
    consumer.acknowledge([EntryId(7, 1)])
    assert refused.wait(DEADLINE_S)
    wait_until(lambda: len(scripted.asked_for(ACK)) == 2)
    assert consumer.unconfirmed(DEADLINE_S) == 0
