"""Rows of a Ray job on their way to actors: the memory that they need, and the rate limit."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, cast

import pytest
import tenacity

from keyshard import RetryPolicy
from keyshard.core import range_watchdog
from keyshard.core.lanes.lane_status import LatencyHistogram
from keyshard.core.lanes.rate_limit import RateLimit
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.key_slot import key_slot
from keyshard.handlers.outcomes import FailureLog
from keyshard.handlers.process_executor import Reply
from ray_adapter.actor import CallResult
from ray_adapter.actor_pool import ActorPool
from ray_adapter.feeding import ActorFeeder
from ray_adapter.job_state import CALLS_SHARE, ActorSlot, Done, JobState
from ray_adapter.options import JobOptions, Takes
from ray_adapter.row_slices import rows_of
from tests.helpers import DEADLINE_S, block, present, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

WHERE = TopicPartition("persistent://public/default/t")
MB = 1_000_000


class Slow:
    """An actor whose later calls wait for the test."""

    def __init__(self) -> None:
        self.calls = 0
        self.goes_on = threading.Event()

    def call(self, _actor: Any, rows: Any, _start: int) -> CallResult:
        self.calls += 1
        if self.calls > 1:
            self.goes_on.wait(DEADLINE_S)
        count = rows.content.num_rows
        return CallResult(count, [None] * count, LatencyHistogram())


def test_rows_that_were_taken_are_held_no_more_while_the_actor_has_others() -> None:
    """The rows had left the window, but their content stayed until the end of the next call."""
    exchange = JobState([ActorSlot(0, None)], 1, 0.0, 256 * MB)
    actor = Slow()
    feeder = ActorFeeder(
        exchange,
        exchange.actor_slots[0],
        cast("ActorPool", actor),
        JobOptions(parallelism=1),
        FailureLog(),
    )
    thread = threading.Thread(target=feeder.run)
    thread.start()
    exchange.push([(WHERE, block(1, 0, "a"))])
    done = exchange.next_done()
    assert done is not None
    content = weakref.ref(done.pieces[0].block.content)
    exchange.push([(WHERE, block(1, 1, "a"))])
    wait_until(lambda: actor.calls == 2)
    exchange.taken(done, done.pieces)
    done = None
    held = content()
    exchange.stop()
    actor.goes_on.set()
    thread.join()
    assert held is None


class Failing:
    """An actor that handles some rows and fails with the next one."""

    def __init__(self, handles: int) -> None:
        self._handles = handles
        self.called = threading.Event()

    def call(self, _actor: Any, _rows: Any, _start: int) -> CallResult:
        self.called.set()
        timings, failed = LatencyHistogram(), Reply.of(ValueError("bad"))
        return CallResult(self._handles, [None] * self._handles, timings, failed)


@pytest.mark.parametrize(("takes", "handles", "tokens"), [("messages", 1, 2), ("arrow", 0, 0)])
def test_a_failed_attempt_has_used_its_token(takes: Takes, handles: int, tokens: int) -> None:
    """If actors were held (``hold``) before a retry, tried rows gave back their tokens."""
    limit = RateLimit(1e-6, 4)
    exchange = JobState([ActorSlot(0, None)], 1_000, 0.0, 256 * MB, limit)
    actor, patient = Failing(handles), RetryPolicy(wait=tenacity.wait_fixed(600))
    feeder = ActorFeeder(
        exchange,
        exchange.actor_slots[0],
        cast("ActorPool", actor),
        JobOptions(parallelism=1, takes=takes, retry=patient),
        FailureLog(),
    )
    exchange.push([(WHERE, block(1, number, "a")) for number in range(4)])
    thread = threading.Thread(target=feeder.run)
    thread.start()
    assert actor.called.wait(DEADLINE_S)
    exchange.hold(DEADLINE_S)
    with exchange.changed:
        available = limit.available(time.monotonic())
    exchange.stop()
    thread.join(DEADLINE_S)
    assert available == tokens


class Hanging:
    """An actor whose first call fails, and whose second call waits for the test."""

    def __init__(self) -> None:
        self.calls = 0
        self.goes_on = threading.Event()

    def call(self, _actor: Any, _rows: Any, _start: int) -> CallResult:
        self.calls += 1
        if self.calls == 1:
            return CallResult(0, [], LatencyHistogram(), Reply.of(ValueError("bad")))
        assert self.goes_on.wait(DEADLINE_S)
        return CallResult(1, [None], LatencyHistogram())


@pytest.mark.parametrize("takes", ["messages", "arrow"])
def test_an_actor_that_hangs_or_fails_is_stalled_until_it_succeeds(
    takes: Takes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_watchdog, "STALL_S", 0.05)
    exchange, actor = JobState([ActorSlot(0, None)], 1_000, 0.0, 256 * MB), Hanging()
    for _ in range(range_watchdog.CALLS_MIN):
        exchange.called(1, 0.001, LatencyHistogram())
    feeder = ActorFeeder(
        exchange, exchange.actor_slots[0], cast("ActorPool", actor),
        JobOptions(parallelism=1, takes=takes, retry=RetryPolicy(wait=tenacity.wait_fixed(600))),
        FailureLog(),
    )  # fmt: skip

    def reason() -> str:
        (slots,) = exchange.slots(time.monotonic())
        return "" if slots["stalled"] is None else slots["stalled"]["reason"]

    exchange.push([(WHERE, block(1, 0, "a"))])
    thread = threading.Thread(target=feeder.run)
    thread.start()
    try:
        wait_until(lambda: "message 1:0:0 of key 'a'" in reason())
        assert "failed once: ValueError: bad" in reason()
        exchange.hold(DEADLINE_S)  # ends the wait for the retry; the rows are given back
        exchange.go_on(exchange.actor_slots)
        wait_until(lambda: reason().startswith("a call with 1 messages has not returned"))
        actor.goes_on.set()
        wait_until(lambda: exchange.next_done() is not None)
        assert reason() == ""
        assert exchange.totals().counters["failedAttempts"] == 1
        assert exchange.totals().counters["completed"] == 1
    finally:
        exchange.stop()
        actor.goes_on.set()
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("actors", [1, 2, 8])
def test_all_calls_together_copy_a_part_of_the_window(actors: int) -> None:
    """Each call had up to 64 MiB, however small the window and however many the actors."""
    exchange = JobState([ActorSlot(index, None) for index in range(actors)], 10**6, 0.0, 16 * MB)
    value = b"x" * 100_000
    exchange.push([(WHERE, block(1, n, "a", values=[value])) for n in range(150)])
    size = 0
    for actor_slot in exchange.actor_slots:
        if exchange.waiting.rows[actor_slot.index]:
            one = sum(piece.block.column_bytes for piece in exchange.next_rows(actor_slot))
            assert one <= 16 * MB // CALLS_SHARE // actors
            size += one
    assert 0 < size <= 16 * MB // CALLS_SHARE


class Clock:
    """The time of an exchange, which moves when the exchange waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("ray_adapter.job_state.time.monotonic", lambda: self.now_s)

    def moves_in(self, exchange: JobState) -> None:
        def wait(timeout: float | None = None) -> bool:
            assert timeout
            self.now_s += timeout
            return True

        exchange.changed.wait = wait  # type: ignore[method-assign]


class Limited:
    """An exchange with a rate limit, and what its actors get."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rate: float, burst: int, actors: int = 1
    ) -> None:
        self.clock = Clock(monkeypatch)
        slots = [ActorSlot(index, None) for index in range(actors)]
        self.exchange = JobState(slots, 1_000, 0.0, 256 * MB, RateLimit(rate, burst))
        self.clock.moves_in(self.exchange)
        self.got: list[tuple[float, int]] = []

    def take(self, index: int = 0, unhandled: int = 0) -> Done:
        slot = self.exchange.actor_slots[index]
        pieces = self.exchange.next_rows(slot)
        self.got.append((self.clock.now_s, rows_of(pieces)))
        done = Done(slot, () if unhandled else pieces, [])
        self.exchange.deliver(slot, done, pieces if unhandled else (), unhandled)
        return done

    def finish(self, done: Done) -> None:
        self.exchange.taken(done, done.pieces)


def test_actors_get_no_more_rows_than_the_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries with more rows than a burst are divided; they are done when all parts are."""
    limited = Limited(monkeypatch, rate=10, burst=4)
    entry = block(1, 0, *"a" * 10)
    limited.exchange.push([(WHERE, entry), (WHERE, block(1, 1, "a"))])
    values: list[Any] = []
    while limited.exchange.waiting.rows[0]:
        assert not limited.exchange._to_commit.get(WHERE)
        done = limited.take()
        values += [value for piece in done.pieces for value in piece.block.values]
        indices = [index for piece in done.pieces for index in piece.block.indices]
        assert len(indices) <= 4
        limited.finish(done)
    assert values[:-1] == entry.values
    entries, handled = limited.exchange.next_to_commit()
    assert entries == {WHERE: [entry.id, EntryId(1, 1)]}
    assert {at for _, at, _ in handled} == {entry.id}, "its messages came in several calls"
    handed = 0
    for at_s, rows in limited.got:
        handed += rows
        assert handed <= 4 + 10 * (at_s - 100.0) + 1e-6
    assert limited.clock.now_s < 100.0 + 11 / 10 + 0.1
    assert limited.exchange.rate_limit(limited.clock.now_s) == {
        "perSecond": 10, "burst": 4, "holdsBack": False,
        "heldBackSeconds": pytest.approx(limited.clock.now_s - 100.0),
    }  # fmt: skip


def test_rows_that_the_handler_did_not_get_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Limited(monkeypatch, rate=1, burst=4)
    limited.exchange.push([(WHERE, block(1, 0, *"aaaa"))])
    for _ in range(5):
        limited.take(unhandled=4)
    assert limited.got == [(100.0, 4)] * 5


def test_retries_count_towards_the_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Limited(monkeypatch, rate=1, burst=4)
    limited.exchange.push([(WHERE, block(1, 0, *"aaaa")), (WHERE, block(1, 1, "a"))])
    limited.take()
    limited.exchange.begin_again(limited.exchange.actor_slots[0], 4)
    assert limited.clock.now_s == pytest.approx(101.0)
    limited.take()
    assert limited.clock.now_s == pytest.approx(105.0)


def test_actors_get_rows_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Limited(monkeypatch, rate=10, burst=2, actors=2)
    keys = [next(key for key in "abcdefgh" if key_slot(key) // 32_768 == actor) for actor in (0, 1)]
    for number in range(4):
        limited.exchange.push([(WHERE, block(1, number, keys[number % 2]))])
    first, second = limited.exchange.actor_slots
    with limited.exchange.changed:
        limit = present(limited.exchange._limit)
        limit.started(100.0, 2)
        until_s = limited.exchange._until_allowed_s
        assert until_s(first, limit) > 0
        assert until_s(second, limit) > 0
        limited.clock.now_s += 1
        assert until_s(second, limit) > 0
        assert until_s(first, limit) == 0
    limited.take(0)
    limited.take(1)
    assert limited.got == [(101.0, 2), (pytest.approx(101.2), 2)]


def test_retries_wait_in_turn() -> None:
    """Retries took each token as it came. Later rows waited for as many as a call takes."""
    exchange = JobState(
        [ActorSlot(0, None), ActorSlot(1, None)], 1_000, 0.0, 256 * MB, RateLimit(20, 10)
    )
    exchange.push([(WHERE, block(1, 0, *"a" * 20))])
    other, failing = sorted(exchange.actor_slots, key=lambda one: -exchange.waiting.rows[one.index])
    failing.pieces = exchange.next_rows(other)
    retries: list[int] = []

    def retry() -> None:
        while not exchange.ending:
            exchange.begin_again(failing, 1)
            retries.append(1)

    def hand() -> None:
        other.pieces = ()
        other.untaken = 0
        exchange.next_rows(other)

    retrying, handing = threading.Thread(target=retry), threading.Thread(target=hand)
    retrying.start()
    wait_until(lambda: len(retries) >= 3)
    handing.start()
    handing.join(DEADLINE_S)
    exchange.stop()
    retrying.join(DEADLINE_S)
    handing.join(DEADLINE_S)
    assert rows_of(other.pieces) == 10
