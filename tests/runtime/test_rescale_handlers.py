"""Ranges move while handlers run: order per key, nothing twice, none lost, a pause with an end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import tenacity

from keyshard import KeyShardSource, Message, RetryPolicy
from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Stored
from keyshard.core.ring.assignment import assign, moved_ranges, reassign
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import (
    BrokerUnavailableError,
    ConfigError,
    DrainTimeoutError,
    KeyShardError,
    NotRunningError,
)
from keyshard.handlers import run
from tests.helpers import DEADLINE_S, key_in, present, wait_until
from tests.support.deadlines import deadline
from tests.support.faulty_broker import ScriptedCall, faulty
from tests.support.memory_topic import MemoryTopic
from tests.support.recorded_handler import RecordedHandler

MakeRecorded = Callable[..., RecordedHandler]

MOVED = moved_ranges(assign(4), reassign(assign(4), 8))[0]
"""Slots that get another owner from 4 ranges to 8."""
STAYS = reassign(assign(4), 8)[0][0]
"""Slots that do not, though their consumer has a smaller hash range then."""


def handle(message: Message) -> None:
    time.sleep(0.000_5)


async def handle_async(message: Message) -> None:
    await asyncio.sleep(0.000_5)


@pytest.mark.parametrize("handler", [handle, handle_async])
def test_ranges_come_and_go_while_handlers_run(
    make_recorded: MakeRecorded, handler: Callable[[Message], object]
) -> None:
    recorded = make_recorded(handler, options={"lanes": 3})
    recorded.keep_publishing()
    reports = []
    for count in (8, 3, 11, 2):
        recorded.more()
        reports.append(recorded.rescale(count))
    recorded.more()
    assert [report.epoch for report in reports] == [1, 2, 3, 4]
    assert all(report.moved_fraction == report.optimum_fraction for report in reports)
    pauses = [pause.pause_ms for report in reports for pause in report.pauses]
    assert 0 < max(pauses) < 1_000 * DEADLINE_S
    recorded.check()


def test_more_ranges_have_more_lanes_and_threads(make_recorded: MakeRecorded) -> None:
    running = threading.Semaphore(0)
    leave = threading.Event()

    def wait(message: Message) -> None:
        running.release()
        leave.wait(4 * DEADLINE_S)

    recorded = make_recorded(wait, parallelism=1, options={"lanes": 1})
    recorded.rescale(8)
    recorded.publish(*(key_in(ranges[0]) for ranges in reassign(assign(1), 8)))
    assert all(running.acquire(timeout=DEADLINE_S) for _ in range(8)), (
        "one lane for each of 8 ranges"
    )
    leave.set()
    recorded.check()


@pytest.mark.parametrize("slots", [MOVED, STAYS])
def test_a_handler_that_hangs_is_named_and_everything_continues(
    make_recorded: MakeRecorded, slots: HashRange
) -> None:
    hung, leave = key_in(slots), threading.Event()
    entered = threading.Event()

    def wait(message: Message) -> None:
        if message.key == hung and present(message.value).endswith(b":1:"):
            entered.set()
            leave.wait(4 * DEADLINE_S)

    # In this time all other handlers return.
    drain_s = deadline(1)
    recorded = make_recorded(wait, options={"lanes": 4, "drain_timeout_s": drain_s})
    recorded.publish(hung, hung, hung)
    recorded.keep_publishing()
    assert entered.wait(DEADLINE_S)
    with pytest.raises(DrainTimeoutError, match="The source continues as before") as caught:
        recorded.rescale(8)
    assert caught.value.facts["key"] == hung
    assert float(str(caught.value.facts["running_s"])) >= drain_s
    named = next(e for e in recorded.events if e.kind == "started" and (e.key, e.seq) == (hung, 1))
    assert caught.value.facts["message_id"] == f"{named.ledger}:{named.entry}:{named.index}"
    assert recorded.source.__dict__["_made"].status()["ranges"] == 4
    recorded.more()
    assert recorded.handled[hung] == [0]
    leave.set()
    wait_until(lambda: recorded.handled[hung] == [0, 1, 2])
    assert recorded.rescale(8).epoch == 1
    recorded.check()


def test_a_stop_has_no_long_wait_for_ranges_that_no_broker_gives(
    make_recorded: MakeRecorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A message of an entry is handled. 2. A rescale holds the rest of it, and the broker is
    away. 3. A stop: the rest can be handled only when that ends, and comes again."""
    monkeypatch.setattr(run, "MOVES_S", 0.2)
    moves, entered, leave = key_in(MOVED), threading.Event(), threading.Event()

    def wait(message: Message) -> None:
        entered.set()
        leave.wait(4 * DEADLINE_S)

    recorded = make_recorded(wait, options={"drain_timeout_s": 60.0}, subscribe_timeout_ms=60_000)
    [broker] = recorded.connections
    messages = [Stored(f"{moves}:{number}:".encode(), key=moves) for number in range(2)]
    recorded.cluster.publish(recorded.topic, *messages, batching=Batching.BY_KEY)
    assert entered.wait(DEADLINE_S)
    away = BrokerUnavailableError("It is away.")
    subscribes = ScriptedCall(raises=lambda *_: None if broker._closed else away)
    faulty(broker, subscribe=subscribes)
    lanes = recorded.source._active().lanes
    with ThreadPoolExecutor(1) as pool:
        rescaling = pool.submit(recorded.rescale, 8)
        wait_until(lambda: lanes.held.ranges)
        leave.set()
        wait_until(lambda: subscribes.raised)
        recorded.source.stop()
        recorded.thread.join(DEADLINE_S)
        assert not recorded.thread.is_alive()
        assert recorded.handled == {moves: [0]}
        with pytest.raises(KeyShardError):
            rescaling.result(deadline(30))
    assert recorded.error is None
    assert recorded.backlog() == 1


def test_a_handler_in_a_hash_range_that_stays_holds_nothing_up(make_recorded: MakeRecorded) -> None:
    now, later = assign(8), reassign(assign(8), 7)
    assert now[2] == later[2][:1], "its consumer is not touched"
    slow, leave, entered = key_in(now[2][0]), threading.Event(), threading.Event()

    def wait(message: Message) -> None:
        if message.key == slow and not leave.is_set():
            entered.set()
            leave.wait(4 * DEADLINE_S)

    recorded = make_recorded(wait, parallelism=8, options={"lanes": 4})
    recorded.publish(slow, slow)
    recorded.keep_publishing()
    assert entered.wait(DEADLINE_S)
    assert recorded.rescale(7).epoch == 1
    recorded.more()
    assert slow not in recorded.handled
    leave.set()
    recorded.check()


def test_a_message_that_waits_for_its_retry_moves_with_its_key(make_recorded: MakeRecorded) -> None:
    moves = key_in(MOVED)
    attempts: list[bytes] = []

    def fail_first(message: Message) -> None:
        if message.key == moves:
            attempts.append(present(message.value))
            if len(attempts) == 1:
                raise ValueError("not yet")

    policy = RetryPolicy(wait=tenacity.wait_fixed(deadline(2)), stop=tenacity.stop_after_attempt(5))
    recorded = make_recorded(fail_first, options={"retry": policy})
    recorded.publish(moves, moves, moves)
    wait_until(lambda: attempts)
    recorded.rescale(8)
    assert len(attempts) == 1
    recorded.check()
    assert len(attempts) == 4
    assert attempts[0] == attempts[1]


def test_a_broker_that_restarts_in_the_middle_costs_nothing(make_recorded: MakeRecorded) -> None:
    recorded = make_recorded(handle, options={"lanes": 3})
    recorded.keep_publishing()
    for count in (8, 3):
        recorded.more()
        with ThreadPoolExecutor(1) as pool:
            rescaling = pool.submit(recorded.rescale, count)
            while not rescaling.done():
                recorded.cluster.crash()
                time.sleep(0.005)
            assert rescaling.result().ranges_after == count
    recorded.more()
    recorded.check()


def test_batches_continue_too() -> None:
    made = MemoryTopic()
    cluster, topic, source = made.cluster, made.topic, made.source()
    sent: dict[str, list[bytes]] = {f"k{key}": [] for key in range(20)}
    got: dict[str, list[bytes]] = {key: [] for key in sent}

    def publish(first: int) -> None:
        for number in range(first, first + 10):
            for key, values in sent.items():
                values.append(b"%d" % number)
                cluster.publish(topic, Stored(values[-1], key=key))

    publish(0)
    with ThreadPoolExecutor(1) as pool:
        for batch in source.batches(max_rows=50, max_wait_s=0.02):
            for key, value in zip(*map(batch.records.column, ("__key", "value")), strict=True):
                got[key.as_py()].append(value.as_py())
            rows = sum(map(len, got.values()))
            if rows == 200 and len(sent["k0"]) == 10:
                # Not acknowledged yet: it is delivered again to the new consumers, and dropped.
                assert pool.submit(source.rescale, 7).result(DEADLINE_S).ranges_after == 7
                publish(10)
            batch.ack()
            if rows == 400:
                break
    assert got == sent


def test_a_rescale_needs_a_running_source_and_exactly_one_argument() -> None:
    source = KeyShardSource("orders")
    with pytest.raises(NotRunningError):
        source.rescale(4)
    with pytest.raises(ConfigError, match="either"):
        source.rescale()
    with pytest.raises(ConfigError, match="either"):
        source.rescale(4, balance=True)
