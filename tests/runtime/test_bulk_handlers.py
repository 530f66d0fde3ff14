"""Handlers that return at once get messages in bulk; nothing that they may rely on changes."""

from __future__ import annotations

import threading

import pytest

from keyshard import Message
from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Stored
from keyshard.core.lanes import bulk
from keyshard.core.lanes.bulk import Arrivals, Bulk
from keyshard.core.message import MessageId
from keyshard.handlers import dispatcher
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.handled_topic import AT_ONCE, HandledTopic

KEYS, PER_KEY = 50, 60
LAST = b"%d" % (PER_KEY - 1)


@pytest.fixture
def bulks(monkeypatch: pytest.MonkeyPatch) -> list[Bulk]:
    """All bulks that begin. Handlers count as fast from the first, whatever the machine does."""
    monkeypatch.setattr(bulk, "COUNTED_MIN", 0)
    monkeypatch.setattr(bulk, "FAST_S", deadline(1.0))
    monkeypatch.setattr(dispatcher, "HANGS_S", deadline(0.2))
    begun: list[Bulk] = []
    start = Arrivals.start

    def recorded(self: Arrivals, now_s: float) -> Bulk | None:
        started = start(self, now_s)
        begun.extend([] if started is None else [started])
        return started

    monkeypatch.setattr(Arrivals, "start", recorded)
    return begun


def publish(orders: HandledTopic) -> int:
    for start in range(0, PER_KEY, 4):
        orders.cluster.publish(
            orders.topic,
            *(Stored(b"%d" % n, key=f"k{k}") for n in range(start, start + 4) for k in range(KEYS)),
            batching=Batching.BY_KEY,
        )
    return KEYS * PER_KEY


def in_order(orders: HandledTopic) -> bool:
    wanted = [b"%d" % n for n in range(PER_KEY)]
    return all(orders.seen[f"k{k}"] == wanted for k in range(KEYS))


def test_messages_are_handled_in_bulk_in_order_and_acknowledged(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    count = publish(orders)
    source = orders.source(parallelism=3)
    with orders.running(source, orders.note):
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
        wait_until(lambda: source.status()["counters"]["completed"] == count)
    assert bulks
    assert in_order(orders)


def test_a_message_that_fails_in_a_bulk_is_tried_again_before_newer_ones_of_its_key(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    count = publish(orders)
    failed: set[tuple[str | None, bytes | None]] = set()

    def handle(message: Message) -> None:
        name = message.key, message.value
        if bulks and len(failed) < 3 and name not in failed:
            failed.add(name)
            raise ValueError("not yet")
        orders.note(message)

    source = orders.source()
    with orders.running(source, handle, retry=AT_ONCE):
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
        assert source.status()["counters"]["failedAttempts"] == len(failed) == 3
    assert in_order(orders)


def test_a_handler_that_hangs_in_a_bulk_delays_no_other_key(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    count = publish(orders)
    go_on = threading.Event()
    hung: list[str | None] = []
    ids: list[MessageId] = []

    def handle(message: Message) -> None:
        if bulks and not hung:
            ids.append(message.message_id)
            hung.append(message.key)
            assert go_on.wait(deadline(30))
        orders.note(message)

    source = orders.source()
    with orders.running(source, handle):
        wait_until(lambda: len(hung) == 1)
        others = [f"k{k}" for k in range(KEYS) if f"k{k}" != hung[0]]
        wait_until(lambda: all(orders.seen[key][-1:] == [LAST] for key in others))
        running = [one for one in source.status()["ranges"] if one["inFlight"]]
        assert len(running) == 1
        assert len(orders.seen[hung[0]]) < PER_KEY
        stack = source.__dict__["_running"]._subject.handling.stack(None, None, ids[0])
        assert "assert go_on.wait(deadline(30))" in "".join(stack["stack"])
        go_on.set()
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
    assert in_order(orders)


def test_a_stop_begins_no_entry_of_a_bulk_that_has_not_started(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    publish(orders)
    stopped: list[int] = []

    def handle(message: Message) -> None:
        orders.note(message)
        if bulks and not stopped:
            source.stop()
            stopped.append(orders.count)
            wait_until(lambda: bulks[-1].apart)

    source = orders.source()
    with orders.running(source, handle):
        wait_until(lambda: bool(stopped))
    assert orders.count < stopped[0] + 4, "only the entry that runs is finished"
    assert present(bulks[-1]).apart
