"""Receive threads: entries reach the sink, whole, in order, or as an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from keyshard.consumers import receiver
from keyshard.consumers.receive_state import ReceiveState, Rest
from keyshard.consumers.receiver import OwnedRange, RangeConsumer, Receiver
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.position.entry_assembly import EntryAssembly
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import BrokerError, KeyShardError, RuntimeStoppedError, UnreadableEntryError
from tests.helpers import DEADLINE_S, P0, P1, FakeConsumer, block, ids, part, wait_until
from tests.support.faulty_broker import Fault, ScriptedCall, after, faulty

RING = split_ring(1)[0]


class FakeSink:
    """Records deliveries; re-opens a range consumer with its next consumer."""

    def __init__(self) -> None:
        self.full: set[TopicPartition] = set()
        self.delivered: list[tuple[RangeConsumer, list[EntryBlock]]] = []
        self.failures: list[KeyShardError] = []
        self.next_consumers: list[FakeConsumer] = []
        self.error: BaseException | None = None
        self.answers: list[Rest] = []
        """Answers to the next deliveries."""

    def is_paused(self, owned_range: OwnedRange) -> bool:
        return owned_range.topic_partition in self.full

    def deliver(self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock]) -> Rest | None:
        if self.error is not None:
            raise self.error
        if self.answers:
            return self.answers.pop(0)
        self.delivered.append((range_consumer, list(entries)))
        return None

    def refused(
        self,
        range_consumer: RangeConsumer,  # noqa: ARG002
        error: UnreadableEntryError,
    ) -> Rest | None:
        raise error

    def reopen(self, range_consumer: RangeConsumer) -> bool:
        range_consumer.consumer.close()
        range_consumer.consumer = self.next_consumers.pop(0)
        range_consumer.successor = None
        range_consumer.assembly = EntryAssembly(doubted=range_consumer.assembly.doubted)
        return True

    def fail(self, error: KeyShardError) -> None:
        self.failures.append(error)

    def of(self, range_consumer: RangeConsumer) -> list[EntryBlock]:
        return [
            entry
            for where, entries in self.delivered
            for entry in entries
            if where is range_consumer
        ]


class Started:
    """Receivers that are stopped at the end of the test."""

    def __init__(self) -> None:
        self.sink = FakeSink()
        self.receivers: list[Receiver] = []

    def __call__(self, *range_consumers: RangeConsumer) -> Receiver:
        made = Receiver("test-receive", range_consumers, self.sink)
        self.receivers.append(made)
        return made


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    for made in started.receivers:
        made.stop()
        made.join(DEADLINE_S)
        assert not made._thread.is_alive()


def lane_of(
    *script: Sequence[EntryBlock] | BaseException, where: TopicPartition = P0
) -> tuple[RangeConsumer, FakeConsumer]:
    consumer = FakeConsumer(where, script=script)
    return RangeConsumer(
        OwnedRange(where, 0, RING), consumer, ReceiverQueueSize(10**6, 100)
    ), consumer


def test_entries_are_delivered_in_order_with_their_range_consumer(start: Started) -> None:
    range_consumer, _ = lane_of([block(1, 0), block(1, 1)], [], [block(1, 2)])
    other, _ = lane_of([block(5, 0)], where=P1)
    start(range_consumer, other)
    wait_until(lambda: len(start.sink.of(range_consumer)) == 3 and start.sink.of(other))
    assert ids(start.sink.of(range_consumer)) == [(1, 0), (1, 1), (1, 2)]
    assert ids(start.sink.of(other)) == [(5, 0)]


def test_only_whole_entries_are_delivered(start: Started) -> None:
    range_consumer, consumer = lane_of([part(0, 0, 1, of=4)], [], [part(0, 2, of=4)])
    start(range_consumer)
    wait_until(lambda: consumer.bell)
    assert start.sink.delivered == []
    consumer.give([part(0, 3, of=4)])
    wait_until(lambda: start.sink.delivered)
    (entry,) = start.sink.of(range_consumer)
    assert entry.indices == [0, 1, 2, 3]


def test_a_complete_entry_without_its_last_index_is_delivered_at_once(start: Started) -> None:
    """Another application acknowledged the last index, and the broker says so with the entry.

    A new subscription would bring everything unacknowledged again, once for each such entry.
    """
    partial = [replace(part(entry, 0, 1, of=3), complete=True) for entry in range(3)]
    range_consumer, consumer = lane_of([*partial[:2], block(1, 7)], [], [partial[2]])
    start(range_consumer)
    wait_until(lambda: len(start.sink.of(range_consumer)) == 4)
    assert [list(one.indices) for one in start.sink.of(range_consumer)] == [
        [0, 1], [0, 1], [0], [0, 1],
    ]  # fmt: skip
    assert range_consumer.consumer is consumer, "it was not subscribed again"
    assert range_consumer.assembly.is_empty


def test_a_full_topic_partition_is_paused_and_the_others_continue(start: Started) -> None:
    range_consumer, paused = lane_of([block(1, 0)])
    other, consumer = lane_of([block(5, 0)], where=P1)
    start.sink.full.add(P0)
    start(range_consumer, other)
    wait_until(lambda: consumer.bell)
    assert start.sink.of(other)
    assert paused.received == 0
    start.sink.full.clear()
    wait_until(lambda: start.sink.of(range_consumer))


def test_a_thread_whose_partitions_are_all_full_wakes_up_again(start: Started) -> None:
    range_consumer, consumer = lane_of([block(1, 0)])
    start.sink.full.add(P0)
    start(range_consumer)
    threading.Event().wait(2 * receiver.PAUSED_WAIT_S)
    assert consumer.received == 0
    start.sink.full.clear()
    wait_until(lambda: start.sink.of(range_consumer))


@pytest.mark.parametrize("full", [False, True])
def test_a_successor_replaces_a_waiting_or_paused_consumer(start: Started, full: bool) -> None:
    range_consumer, lost = lane_of([block(1, 0)])
    start(range_consumer)
    wait_until(lambda: start.sink.of(range_consumer))
    lost.connected = False
    if full:
        start.sink.full.add(P0)
        lost.give([block(1, 1)])
    wait_until(lambda: full or range_consumer.reception.state is ReceiveState.IDLE)
    successor = FakeConsumer(script=[[block(1, 1)]])
    start.sink.next_consumers = [successor]
    range_consumer.successor = successor
    range_consumer.wake()
    wait_until(lambda: range_consumer.consumer is successor)
    assert lost.closed
    start.sink.full.clear()
    wait_until(lambda: ids(start.sink.of(range_consumer)) == [(1, 0), (1, 1)])


def test_entries_received_without_a_connection_are_not_taken(start: Started) -> None:
    range_consumer, lost = lane_of()
    start(range_consumer)
    wait_until(lambda: lost.bell)
    lost.connected = False
    lost.give([block(1, 0)])
    wait_until(lambda: lost.bell)
    assert start.sink.delivered == []
    lost.connected = True
    lost.give([block(1, 0)])
    wait_until(lambda: start.sink.of(range_consumer))


def test_entries_received_during_a_reconnect_are_requested_again(start: Started) -> None:
    """The client may have kept the entries, or received them after the reconnect."""

    def receive(call: Fault, timeout_ms: int) -> list[EntryBlock]:
        blocks: list[EntryBlock] = call(timeout_ms)
        consumer.connected = True
        return blocks

    consumer = faulty(FakeConsumer(script=[[block(1, 0)]]), receive=receive)
    consumer.connected = False
    range_consumer = RangeConsumer(OwnedRange(P0, 0, RING), consumer, ReceiverQueueSize(10**6, 100))
    start.sink.next_consumers = [FakeConsumer(script=[[block(1, 0)]])]
    start(range_consumer)
    wait_until(lambda: start.sink.of(range_consumer))
    assert consumer.closed
    assert ids(start.sink.of(range_consumer)) == [(1, 0)]


def test_a_notification_for_a_successor_that_was_taken_meanwhile_is_ignored(start: Started) -> None:
    range_consumer, lost = lane_of()
    start(range_consumer)
    wait_until(lambda: lost.bell)
    successor = range_consumer.successor = FakeConsumer()
    start.sink.next_consumers = [successor]
    lost.give([])
    wait_until(lambda: successor.bell)
    range_consumer.wake()  # the notification of the successor, which came late
    threading.Event().wait(0.05)
    assert start.sink.failures == []
    assert successor.bell
    successor.give([block(1, 0)])
    wait_until(lambda: start.sink.of(range_consumer))


def test_entries_without_room_are_offered_again_after_a_rest(start: Started) -> None:
    range_consumer, first = lane_of([block(1, 0)])
    start.sink.answers = [Rest(time.monotonic() + 0.1)]
    start.sink.next_consumers = [FakeConsumer(script=[[block(1, 0)]])]
    start(range_consumer)
    wait_until(lambda: range_consumer.reception.state is ReceiveState.RESTING)
    assert not first.closed
    wait_until(lambda: start.sink.of(range_consumer))
    assert first.closed


def test_half_an_entry_that_could_not_be_taken_comes_again_after_a_rest(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Its end does not come, twice. 2. It cannot be taken yet. 3. Nothing else comes."""
    monkeypatch.setattr(receiver, "ENTRY_QUIET_S", 0.02)
    half = [part(1, 0, of=2)]
    range_consumer, _ = lane_of(half)
    start.sink.answers = [Rest(time.monotonic())]
    # Two are enough, unless this machine is too slow.
    start.sink.next_consumers = [FakeConsumer(script=[half]) for _ in range(11)]
    start(range_consumer)
    wait_until(lambda: start.sink.of(range_consumer))
    assert start.sink.of(range_consumer)[0].indices == [0]
    assert len(start.sink.next_consumers) < 10


class StandingStill(FakeConsumer):
    """Its worker no longer reports. According to the last report, it was connected."""

    asked = 0
    """Times that it was asked whether it has given all."""

    def has_given_all(self) -> bool:
        self.asked += 1
        return False


def test_half_an_entry_is_not_taken_for_all_of_it_while_its_worker_stands_still(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by ``tests.proofs simulation --world workers --seed-start 18321275505345``.

    1. An entry ends early: it is asked for again.
    2. The worker stands still between the same messages, and its consumer seems to be connected.
    """
    monkeypatch.setattr(receiver, "ENTRY_QUIET_S", 0.02)
    half = [part(1, 0, of=2)]
    range_consumer, _ = lane_of(half)
    second = StandingStill(script=[half])
    start.sink.next_consumers = [second]
    start(range_consumer)
    wait_until(lambda: second.asked >= 3 or start.sink.of(range_consumer))
    assert start.sink.of(range_consumer) == []
    second.give([part(1, 1, of=2)])
    wait_until(lambda: start.sink.of(range_consumer))
    assert start.sink.of(range_consumer)[0].indices == [0, 1]


def test_a_dropped_consumer_takes_its_successor_with_it(start: Started) -> None:
    range_consumer, lost = lane_of()
    made = start(range_consumer)
    wait_until(lambda: range_consumer.reception.state is ReceiveState.IDLE)
    successor = range_consumer.successor = FakeConsumer()
    assert made.drop({range_consumer.owned_range}).done.wait(DEADLINE_S)
    assert lost.closed
    assert successor.closed


def test_an_early_end_is_asked_about_once_and_then_taken_as_partial(start: Started) -> None:
    again = [block(1, 0), part(1, 0, 1, of=3), block(1, 2)]
    range_consumer, first = lane_of(again)
    start.sink.next_consumers = [FakeConsumer(script=[again])]
    start(range_consumer)
    wait_until(lambda: len(start.sink.of(range_consumer)) == 4)
    assert ids(start.sink.of(range_consumer)) == [(1, 0), (1, 0), (1, 1), (1, 2)]
    assert start.sink.of(range_consumer)[2].indices == [0, 1]
    assert first.closed
    assert range_consumer.assembly.open is None


def test_with_a_polled_queue_two_early_ends_do_not_prove_an_entry_partial(start: Started) -> None:
    """Messages of a polled queue come one by one, and a reconnect may lie between any two."""
    again = [part(1, 0, 1, of=3), block(1, 2)]
    range_consumer, _ = lane_of(again)
    range_consumer.queue = ReceiverQueueSize(10**6, 1)
    whole = [part(1, 0, 1, 2, of=3), block(1, 2)]
    start.sink.next_consumers = [FakeConsumer(script=[again]), FakeConsumer(script=[whole])]
    start(range_consumer)
    wait_until(lambda: len(start.sink.of(range_consumer)) == 2)
    assert [entry.indices for entry in start.sink.of(range_consumer)] == [[0, 1, 2], [0]]


def test_connections_that_break_twice_at_the_same_index_lose_nothing(start: Started) -> None:
    range_consumer, _ = lane_of([part(1, 0, 1, of=3)], [block(1, 2)])
    start.sink.next_consumers = [
        FakeConsumer(script=[[part(1, 0, 1, of=3)], [block(1, 2)]]),
        FakeConsumer(script=[[part(1, 0, 1, of=3)], [part(1, 2, of=3), block(1, 2)]]),
    ]
    start(range_consumer)
    wait_until(lambda: len(start.sink.of(range_consumer)) == 2)
    assert [entry.indices for entry in start.sink.of(range_consumer)] == [[0, 1, 2], [0]]


def test_silence_is_an_early_end_too(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "ENTRY_QUIET_S", 0.02)
    range_consumer, _ = lane_of([part(1, 0, of=2)])
    start.sink.next_consumers = [FakeConsumer(script=[[part(1, 0, of=2)]]) for _ in range(10)]
    start(range_consumer)
    wait_until(lambda: start.sink.of(range_consumer))
    (entry,) = start.sink.of(range_consumer)
    assert entry.indices == [0]
    assert len(start.sink.next_consumers) < 10


class AwayUnlessItGives(FakeConsumer):
    """Has a connection only while it has something to give; its client holds nothing back."""

    def is_connected(self) -> bool:
        self.asked_connected += 1
        return bool(self.script)

    def has_given_all(self) -> bool:
        return not self.script


def test_silence_without_a_connection_is_no_early_end(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "ENTRY_QUIET_S", 0.01)
    consumer = AwayUnlessItGives(script=[[part(1, 0, of=2)]])
    range_consumer = RangeConsumer(OwnedRange(P0, 0, RING), consumer, ReceiverQueueSize(10**6, 100))
    start(range_consumer)
    wait_until(lambda: consumer.bell)
    asked = consumer.asked_connected
    wait_until(lambda: consumer.asked_connected > asked + 20)  # longer than the silence
    assert start.sink.delivered == []
    consumer.give([part(1, 0, of=2), part(1, 1, of=2)])
    wait_until(lambda: start.sink.of(range_consumer))
    assert start.sink.of(range_consumer)[0].whole


def test_an_error_of_a_consumer_ends_the_thread_and_is_reported(start: Started) -> None:
    error = BrokerError("The consumer is broken.")
    range_consumer, _ = lane_of([block(1, 0)], error, [block(1, 1)])
    made = start(range_consumer)
    made.join(DEADLINE_S)
    assert start.sink.failures == [error]
    assert ids(start.sink.of(range_consumer)) == [(1, 0)]


def test_an_unforeseen_error_is_reported_with_its_text(start: Started) -> None:
    range_consumer, _ = lane_of(ZeroDivisionError("a bug"))
    start(range_consumer).join(DEADLINE_S)
    (failure,) = start.sink.failures
    assert "ZeroDivisionError('a bug')" in failure.message


def test_an_error_of_the_sink_is_reported(start: Started) -> None:
    start.sink.error = error = KeyShardError("The ids were handed out twice.")
    range_consumer, _ = lane_of([block(1, 0)])
    start(range_consumer).join(DEADLINE_S)
    assert start.sink.failures == [error]


def test_a_stop_of_the_source_ends_the_thread_silently(start: Started) -> None:
    range_consumer, _ = lane_of(RuntimeStoppedError("stopped"))
    start(range_consumer).join(DEADLINE_S)
    assert start.sink.failures == []


def test_an_idle_range_consumer_costs_nothing_until_its_client_notifies_it(start: Started) -> None:
    busy, consumer = lane_of(*([block(1, entry)] for entry in range(200)))
    idle = [lane_of(where=P1) for _ in range(8)]
    start(busy, *(range_consumer for range_consumer, _ in idle))
    wait_until(lambda: len(start.sink.of(busy)) == 200 and consumer.bell)
    wait_until(lambda: all(quiet.bell for _, quiet in idle))
    assert [quiet.received for _, quiet in idle] == [1] * 8
    range_consumer, quiet = idle[3]
    quiet.give([block(5, 0)])
    wait_until(lambda: start.sink.of(range_consumer))
    assert ids(start.sink.of(range_consumer)) == [(5, 0)]


def test_a_notification_of_a_replaced_consumer_is_ignored(
    start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "ENTRY_QUIET_S", 0.02)
    range_consumer, first = lane_of([part(1, 0, of=2)])
    second = FakeConsumer()
    start.sink.next_consumers = [second]
    start(range_consumer)
    wait_until(lambda: second.bell)
    first.give([block(1, 9)])
    second.give([block(1, 1)])
    wait_until(lambda: start.sink.of(range_consumer))
    assert ids(start.sink.of(range_consumer)) == [(1, 1)]


def test_the_thread_never_keeps_a_process_alive(start: Started) -> None:
    range_consumer, _ = lane_of()
    assert start(range_consumer)._thread.daemon


def test_range_consumers_are_added_and_dropped_while_the_receiver_runs(start: Started) -> None:
    range_consumer, consumer = lane_of([block(1, 0)])
    running = start(range_consumer)
    other, added = lane_of([block(5, 0)], where=P1)
    running.add([other])
    wait_until(lambda: start.sink.of(range_consumer) and start.sink.of(other))
    assert running.range_consumers == 2
    assert running.drop({OwnedRange(P1, 0, RING)}).done.wait(DEADLINE_S)
    assert (added.closed, consumer.closed) == (True, False)
    assert running.range_consumers == 1
    received = added.received
    served = len(start.sink.of(range_consumer))
    consumer.give([block(1, 99)])
    wait_until(lambda: len(start.sink.of(range_consumer)) > served)
    assert added.received == received


def test_a_consumer_that_cannot_be_closed_is_dropped_all_the_same(start: Started) -> None:
    stubborn = faulty(FakeConsumer(), close=ScriptedCall(raises=BrokerError("the broker is away")))
    range_consumer = RangeConsumer(OwnedRange(P0, 0, RING), stubborn, ReceiverQueueSize(10**6, 1))
    running = start(range_consumer)
    assert running.drop({OwnedRange(P0, 0, RING)}).done.wait(DEADLINE_S)
    assert running.range_consumers == 0
    assert start.sink.failures == []


def test_an_order_to_close_is_taken_back_before_it_begins(start: Started) -> None:
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        leave.wait(4 * DEADLINE_S)

    owned_range = OwnedRange(P0, 0, RING)
    consumer = faulty(FakeConsumer(), receive=after(wait))
    running = start(RangeConsumer(owned_range, consumer, ReceiverQueueSize(10**6, 1)))
    assert entered.wait(DEADLINE_S)
    drop = running.drop({owned_range})
    assert running.keep(drop)
    leave.set()
    wait_until(lambda: consumer.bell)
    assert (consumer.closed, drop.closed, drop.done.is_set()) == (False, set(), False)
    again = running.drop({owned_range})
    assert again.done.wait(DEADLINE_S)
    assert again.closed == {owned_range}
    assert not running.keep(again), "it is done"
