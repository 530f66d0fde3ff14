"""The source's side of a worker: its requests, and the replacement of a dead worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import (
    BrokerUnavailableError,
    KeyShardError,
    UnexpectedError,
    WorkerUnreachableError,
)
from keyshard.threads import owned_by
from keyshard.workers.consumer import EntryHolders, RemoteConsumer
from keyshard.workers.encoding import DeliveredTotals, WorkerDelivery
from keyshard.workers.supervisor import WorkerSupervisor
from keyshard.workers.worker import Worker
from tests.helpers import block, wait_until

WHERE = TopicPartition("persistent://public/default/orders", 0)
WANTED = SubscriptionSpec(WHERE, "s", split_ring(1)[0], "c", 10)
LONG_S = 10.0


class Hosts(Worker):
    """A scripted worker that records its calls."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.kind = self.name = name
        self.pid, self.machine = 0, "here"
        self._told = told
        self._dead = threading.Event()
        self.answers = threading.Event()
        """Whether it answers a subscription, or lets it wait."""
        self.answers.set()
        self.asked = threading.Event()
        """Set when a subscription has arrived."""
        self.numbers: list[int] = []
        """The numbers of all consumers that it was asked to host."""
        self.hosted: set[int] = set()
        self.taken: dict[int, DeliveredTotals] = {}
        self.message_bytes: list[int | None] = []
        """The size of messages that each subscription named."""
        self.away: set[str] = set()
        self.status: int | None = None
        """Its exit status."""

    def request(self, command: str, timeout_s: float, **arguments: Any) -> Any:  # noqa: ARG002
        if command == "subscribe":
            self.asked.set()
            assert self.answers.wait(LONG_S)
            if arguments["topic"] in self.away:
                raise BrokerUnavailableError("The broker is away.")
            if self._dead.is_set():
                raise WorkerUnreachableError(f"{self.name} has died.")
            self.numbers.append(arguments["number"])
            self.message_bytes.append(arguments["message_bytes"])
            self.hosted.add(arguments["number"])
        elif command == "close_consumer":
            self.hosted.discard(arguments["number"])

    def take(self, taken: Mapping[int, DeliveredTotals]) -> list[WorkerDelivery]:
        self.taken |= taken
        if self._dead.wait(0.01):
            raise WorkerUnreachableError(f"{self.name} has died.")
        return []

    def die(self) -> None:
        self._dead.set()

    def kill(self) -> None:
        self._told.append(f"kill {self.name}")

    def exit_status(self) -> int | None:
        return self.status

    def leave(self) -> None:
        self._dead.set()

    def end(self, _timeout_s: float) -> None:
        self._told.append(f"end {self.name}")


class SupervisedWorker:
    """Workers one after the other, for one source."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.away: set[str] = set()
        """Topics that no other worker than the first can subscribe to."""
        self.workers: list[Hosts] = []
        self.holders = EntryHolders()
        self.next_answers = True
        self.supervisor = WorkerSupervisor(self._start, 1.0, "keyshard-worker-0")

    def _start(self, _stop: threading.Event) -> Hosts:
        self.workers.append(Hosts(f"worker {len(self.workers)}", self.told))
        self.told.append(f"start {self.workers[-1].name}")
        if len(self.workers) > 1:
            self.workers[-1].away = self.away
        if not self.next_answers:
            self.workers[-1].answers.clear()
        return self.workers[-1]

    def subscribe(self) -> RemoteConsumer:
        return self.supervisor.subscribe(WANTED, StartPosition.EARLIEST, self.holders)

    def second(self, what: Callable[[Hosts], object]) -> Hosts:
        """Return the replacement of the first worker, once ``what`` is true for it."""
        wait_until(lambda: len(self.workers) == 2 and what(self.workers[1]))
        return self.workers[1]


@contextmanager
def supervised() -> Iterator[SupervisedWorker]:
    made = SupervisedWorker()
    try:
        yield made
    finally:
        made.supervisor.close(0.0)


def test_a_worker_that_is_given_up_is_ended_before_another_one_has_its_ranges() -> None:
    with supervised() as at:
        at.subscribe()
        at.workers[0].die()
        at.second(lambda worker: worker.hosted)
        assert at.told.index("end worker 0") < at.told.index("start worker 1")


@pytest.mark.parametrize(
    ("status", "text", "hint"),
    [(-9, "was killed by SIGKILL (9)", "memory limit"), (None, "has ended", "")],
)
def test_the_end_of_a_worker_is_explained(
    status: int | None, text: str, hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The message said that the worker had ended, and never why."""
    with supervised() as at:
        consumer = at.subscribe()
        at.next_answers = False
        at.workers[0].status = status
        at.workers[0].die()
        wait_until(consumer.problem)
        assert consumer.problem() == f"The worker 0 {text}, and a replacement is starting."
        wait_until(lambda: "consumers move to a replacement" in caplog.text)
        at.second(lambda _: True).answers.set()
    assert f"worker 0 {text} (worker 0 has died): its 1 consumers move" in caplog.text
    assert hint in caplog.text


def test_a_replacement_knows_the_size_of_the_messages() -> None:
    """The replacement began with one permit. Then Pulsar 5.0 sent nothing for 22 to 48 s."""
    with supervised() as at:
        consumer = at.subscribe()
        blocks = [block(0, 0, "a", "b", "c"), block(0, 1)]
        consumer.arrived(WorkerDelivery(consumer.number, blocks))
        consumer.receive(0)
        at.workers[0].die()
        second = at.second(lambda worker: worker.message_bytes)
        assert at.workers[0].message_bytes == [None]
        assert second.message_bytes == [sum(one.column_bytes for one in blocks) // 4]


def test_topic_partitions_whose_broker_is_away_do_not_hold_up_others() -> None:
    with supervised() as at:
        for partition in range(1, 31):
            at.away.add(f"{WHERE.topic}-{partition}")
            where = TopicPartition(f"{WHERE.topic}-{partition}", 0)
            wanted = replace(WANTED, topic_partition=where)
            at.supervisor.subscribe(wanted, StartPosition.EARLIEST, at.holders)
        consumer = at.subscribe()
        at.workers[0].die()
        at.second(lambda worker: consumer.number in worker.hosted)


def test_no_number_is_given_twice_and_reports_under_an_old_one_are_dropped() -> None:
    with supervised() as at:
        consumer = at.subscribe()
        (old,) = at.workers[0].numbers
        at.workers[0].die()
        second = at.second(lambda worker: worker.hosted)
        assert second.numbers == [consumer.number] != [old]
        at.supervisor.took(old, DeliveredTotals(7))
        at.supervisor.took(consumer.number, DeliveredTotals(1))
        wait_until(lambda: second.taken)
        assert second.taken == {consumer.number: DeliveredTotals(1)}


def test_a_consumer_whose_worker_dies_while_subscribing_is_not_held_by_the_next() -> None:
    """Found by the simulation, seed 900100084 of workers.

    1. A worker is asked to subscribe a range, and dies.
    2. The next one is there, and is given the range, before the question has failed.
    3. The request fails: its caller knows no consumer, and tries again.
    """
    with supervised() as at:
        first = at.workers[0]
        first.answers.clear()
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                at.subscribe()
            except BrokerUnavailableError as exc:
                errors.append(exc)

        asking = threading.Thread(target=ask)
        asking.start()
        assert first.asked.wait(LONG_S)
        first.die()
        second = at.second(lambda worker: worker.hosted)
        first.answers.set()
        asking.join(LONG_S)
        assert errors
        assert not second.hosted
        assert at.subscribe().number in second.hosted


def test_a_consumer_that_is_closed_while_it_is_brought_back_is_forgotten() -> None:
    with supervised() as at:
        consumer = at.subscribe()
        at.next_answers = False
        at.workers[0].die()
        second = at.second(lambda worker: worker.asked.is_set())
        closing = threading.Thread(target=consumer.close)
        closing.start()
        wait_until(lambda: consumer.closed)
        second.answers.set()
        closing.join(LONG_S)
        wait_until(lambda: second.numbers and not second.hosted)
        wait_until(lambda: not at.supervisor.facts().consumers)


def test_an_unexpected_error_of_the_thread_of_a_worker_ends_the_source_by_name() -> None:
    errors: list[KeyShardError] = []
    with owned_by(errors.append), supervised() as at:

        def broken(taken: Mapping[int, DeliveredTotals]) -> list[WorkerDelivery]:
            raise KeyError("a bug")

        at.workers[0].take = broken  # type: ignore[method-assign]
        wait_until(lambda: errors)
    assert isinstance(errors[0], UnexpectedError)
    assert "Thread keyshard-worker-0 ended unexpectedly: KeyError('a bug')" in errors[0].message


def test_an_unexpected_error_while_consumers_are_brought_back_ends_the_source_by_name() -> None:
    errors: list[KeyShardError] = []
    with owned_by(errors.append), supervised() as at:
        consumer = at.subscribe()

        consumer.spec = None  # type: ignore[assignment]
        at.workers[0].die()
        wait_until(lambda: errors)
    assert isinstance(errors[0], UnexpectedError)
    assert "Thread keyshard-resubscribe-worker-0 ended unexpectedly" in errors[0].message
