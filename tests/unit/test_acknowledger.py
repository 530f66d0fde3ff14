"""Acknowledging in the background: everything once, in turns, and failing loudly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from keyshard.consumers import acknowledger
from keyshard.consumers.acknowledger import Acknowledger
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import AcknowledgeError, BrokerError, BrokerUnavailableError, KeyShardError
from tests.helpers import DEADLINE_S, P0, P1, P2, FakeConsumer, wait_until
from tests.support.deadlines import deadline

Make = Callable[..., Acknowledger]


def entries(count: int, first: int = 0) -> list[EntryId]:
    return [EntryId(1, entry) for entry in range(first, first + count)]


class AcknowledgerSetup:
    """An acknowledger over one consumer per topic partition."""

    def __init__(self) -> None:
        self.consumers = {P0: FakeConsumer(P0), P1: FakeConsumer(P1)}
        self.away = threading.Event()
        self.failures: list[KeyShardError] = []
        self.made: list[Acknowledger] = []

    def consumer_of(self, topic_partition: TopicPartition) -> FakeConsumer | None:
        if self.away.is_set():
            raise BrokerUnavailableError("No consumer is connected.")
        return self.consumers.get(topic_partition)

    def start(self, timeout_s: float = 10.0) -> Acknowledger:
        made = Acknowledger(self.consumer_of, lambda _, ids: ids, timeout_s, self.failures.append)
        self.made.append(made)
        return made


@pytest.fixture
def setup() -> Iterator[AcknowledgerSetup]:
    setup = AcknowledgerSetup()
    yield setup
    for made in setup.made:
        made.stop(0.05)
        made.join(DEADLINE_S)
        assert not made._thread.is_alive()


def test_entries_go_to_a_consumer_of_their_partition(setup: AcknowledgerSetup) -> None:
    acks = setup.start()
    acks.submit(P0, entries(3))
    acks.submit(P1, entries(2, first=7))
    wait_until(lambda: not acks.waiting)
    assert setup.consumers[P0].acknowledged == entries(3)
    assert setup.consumers[P1].acknowledged == entries(2, first=7)
    assert acks.acknowledged == 5


def test_many_entries_are_acknowledged_in_several_limited_requests(
    setup: AcknowledgerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acknowledger, "ENTRIES_PER_TURN", 4)
    turns: list[int] = []
    consumer = setup.consumers[P0]
    take = consumer.acknowledge

    def in_turn(ids: Sequence[EntryId]) -> None:
        turns.append(len(ids))
        take(ids)

    monkeypatch.setattr(consumer, "acknowledge", in_turn)
    acks = setup.start()
    acks.submit(P0, entries(10))
    wait_until(lambda: not acks.waiting)
    assert turns == [4, 4, 2]
    assert consumer.acknowledged == entries(10)


def test_waiting_acknowledgements_go_together(setup: AcknowledgerSetup) -> None:
    calls: list[int] = []
    begun, goes_on = threading.Event(), threading.Event()
    consumer = setup.consumers[P0]
    take = consumer.acknowledge

    def slow(ids: list[EntryId]) -> None:
        calls.append(len(ids))
        begun.set()
        assert goes_on.wait(deadline(30))
        take(ids)

    consumer.acknowledge = slow  # type: ignore[method-assign, assignment]
    acks = setup.start()
    acks.submit(P0, entries(1))
    assert begun.wait(deadline(30))
    for number in range(1, 10):
        acks.submit(P0, entries(1, first=number))
    goes_on.set()
    wait_until(lambda: not acks.waiting)
    assert calls == [1, 9]
    assert consumer.acknowledged == entries(10)


def test_entries_refused_by_a_consumer_go_to_the_next(setup: AcknowledgerSetup) -> None:
    setup.consumers[P0].errors.extend([BrokerError("closed"), BrokerUnavailableError("away")])
    acks = setup.start()
    acks.submit(P0, entries(2))
    wait_until(lambda: not acks.waiting)
    assert setup.consumers[P0].acknowledged == entries(2)
    assert setup.failures == []


def test_entries_wait_while_no_consumer_is_connected(setup: AcknowledgerSetup) -> None:
    setup.away.set()
    acks = setup.start()
    acks.submit(P0, entries(2))
    assert acks.waiting == 2
    setup.away.clear()
    wait_until(lambda: not acks.waiting)
    assert setup.consumers[P0].acknowledged == entries(2)


def test_a_topic_partition_that_is_away_keeps_no_other_waiting(setup: AcknowledgerSetup) -> None:
    consumer_of = setup.consumer_of

    def without_p0(topic_partition: TopicPartition) -> FakeConsumer | None:
        if topic_partition == P0:
            raise BrokerUnavailableError("No consumer of P0 is connected.")
        return consumer_of(topic_partition)

    setup.consumer_of = without_p0  # type: ignore[method-assign]
    acks = setup.start()
    acks.submit(P0, entries(2))
    acks.submit(P1, entries(3))
    wait_until(lambda: setup.consumers[P1].acknowledged == entries(3))
    assert acks.waiting == 2


def test_a_failure_past_the_limit_fails_the_source_and_names_the_partition(
    setup: AcknowledgerSetup,
) -> None:
    setup.away.set()
    acks = setup.start(timeout_s=0.05)
    acks.submit(P0, entries(2))
    wait_until(lambda: setup.failures)
    (failure,) = setup.failures
    assert isinstance(failure, AcknowledgeError)
    assert failure.facts == {"topic_partition": P0.name}
    assert "2 entries" in failure.message
    assert acks.acknowledged == 0


def test_an_unforeseen_error_fails_the_source_too(setup: AcknowledgerSetup) -> None:
    setup.consumers[P0].errors.append(ZeroDivisionError("a bug"))
    acks = setup.start()
    acks.submit(P0, entries(1))
    wait_until(lambda: setup.failures)
    (failure,) = setup.failures
    assert "a bug" in str(failure)


def test_too_many_waiting_entries_are_refused(
    setup: AcknowledgerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acknowledger, "ENTRIES_WAITING_MAX", 5)
    setup.away.set()
    acks = setup.start()
    acks.submit(P0, entries(5))
    with pytest.raises(AcknowledgeError, match="5 entries wait") as caught:
        acks.submit(P1, entries(1))
    assert caught.value.facts == {"waiting": 5}
    assert acks.waiting == 5


def test_stop_sends_waiting_acknowledgements(setup: AcknowledgerSetup) -> None:
    acks = setup.start()
    for at in range(50):
        acks.submit(P0, entries(10, first=10 * at))
    acks.stop(10.0)
    assert setup.consumers[P0].acknowledged == entries(500)
    assert acks.waiting == 0


def test_stop_ends_in_time_when_the_broker_is_away(setup: AcknowledgerSetup) -> None:
    setup.away.set()
    acks = setup.start(timeout_s=600)
    acks.submit(P0, entries(1))
    acks.stop(0.05)
    wait_until(lambda: not acks._thread.is_alive())
    assert setup.failures == []
    assert acks.acknowledged == 0


def test_the_thread_never_keeps_a_process_alive(setup: AcknowledgerSetup) -> None:
    assert setup.start()._thread.daemon


def test_entries_of_a_partition_that_is_gone_are_dropped(setup: AcknowledgerSetup) -> None:
    acks = setup.start()
    acks.submit(P2, entries(3))
    acks.submit(P1, entries(2))
    wait_until(lambda: not acks.waiting)
    assert setup.consumers[P1].acknowledged == entries(2)
    assert acks.acknowledged == 2
    assert setup.failures == []


def test_entries_that_wait_are_dropped_once_their_partition_is_gone(
    setup: AcknowledgerSetup,
) -> None:
    setup.away.set()
    acks = setup.start()
    acks.submit(P0, entries(3))
    del setup.consumers[P0]
    setup.away.clear()
    wait_until(lambda: not acks.waiting)
    assert setup.failures == []
