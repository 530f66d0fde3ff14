"""An outage of a service that handlers need parks no key; a poison message still does."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import Any

import pytest
import tenacity

from keyshard import KeyShardSource, Message, Reject, RetryLater, RetryPolicy
from keyshard.broker.memory import Message as Stored
from keyshard.core.lanes.circuit_breaker import (
    KEYS_MAX,
    KEYS_MIN,
    ON_TRIAL_MAX,
    PAUSE_S,
    CircuitStatus,
)
from tests.helpers import DEADLINE_S, present, wait_until
from tests.support.deadlines import deadline
from tests.support.handled_topic import HandledTopic
from tests.support.memory_topic import Run

QUICK = RetryPolicy(wait=tenacity.wait_fixed(0.15), stop=tenacity.stop_after_attempt(3))
SLOWER = RetryPolicy(wait=tenacity.wait_fixed(deadline(0.5)), stop=tenacity.stop_after_attempt(3))
"""Its retries take longer than threads of a slow machine stop."""


class Database:
    """A service that handlers need; unavailable until a time."""

    def __init__(self, orders: HandledTopic) -> None:
        self.away_until_s = 0.0
        self.attempts = 0
        self.may_answer = threading.Event()
        """Handlers wait for it, so that a test decides which messages precede the first failure."""
        self.may_answer.set()
        self._place = orders

    def away_for(self, seconds: float) -> None:
        self.away_until_s = time.monotonic() + seconds

    def handle(self, message: Message) -> None:
        self.attempts += 1
        assert self.may_answer.wait(DEADLINE_S)
        if message.value == b"poison":
            raise ValueError("poison")
        if time.monotonic() < self.away_until_s:
            raise ConnectionError("the database is away")
        self._place.note(message)

    async def coroutine(self, message: Message) -> None:
        self.handle(message)


def circuit_of(source: KeyShardSource) -> CircuitStatus:
    return present(source.status()["circuit"])


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A circuit breaker that waits for a success longer than the retries of ``SLOWER`` take."""
    monkeypatch.setattr("keyshard.core.lanes.circuit_breaker.QUIET_S", deadline(2))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("executor", ["threads", "async"])
@pytest.mark.parametrize("keys", [KEYS_MIN, 50])
def test_an_outage_parks_no_key_and_is_named(
    orders: HandledTopic, keys: int, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(orders)
    count = orders.publish(keys=keys, per_key=4)
    database.away_for(deadline(60.0))
    handle: Any = database.handle if executor == "threads" else database.coroutine
    with (
        caplog.at_level(logging.INFO, "keyshard"),
        orders.running(orders.source(), handle, retry=SLOWER) as run,
    ):
        wait_until(lambda: "_running" in run.source.__dict__)
        wait_until(lambda: circuit_of(run.source)["state"] != "closed")
        output = circuit_of(run.source)
        assert output["error"] == "ConnectionError: the database is away"
        assert output["keysFailing"] >= KEYS_MIN
        database.away_for(0.3)
        wait_until(lambda: orders.errors or orders.backlog() == 0)
        status = run.source.status()
    assert not orders.errors
    assert status["parkedKeys"] == 0
    assert status["counters"]["deadLettered"] == 0
    assert present(status["circuit"])["state"] == "closed"
    assert present(status["circuit"])["openings"] == 1
    assert orders.count == count
    assert database.attempts < count + 60, "handlers paused"
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "handlers are paused" in logged
    assert "handlers continue" in logged


@pytest.mark.simulated
@pytest.mark.parametrize("keys", [KEYS_MIN - 1, 40])
def test_the_default_policy_survives_six_seconds_for_any_number_of_keys(
    orders: HandledTopic, keys: int
) -> None:
    database = Database(orders)
    count = orders.publish(keys=keys, per_key=3)
    database.away_for(6.0)
    with orders.running(orders.source(), database.handle) as run:
        wait_until(lambda: orders.errors or orders.count == count)
        assert run.source.status()["counters"]["deadLettered"] == 0
    assert not orders.errors


@pytest.mark.simulated
def test_poison_is_parked_while_others_continue_and_after_an_outage(orders: HandledTopic) -> None:
    database = Database(orders)
    poison = [Stored(b"poison", key=f"bad-{n}") for n in range(2 * KEYS_MIN)]
    orders.publish(keys=50, per_key=2)
    orders.cluster.publish(orders.topic, *poison)
    database.away_for(1.0)
    with orders.running(orders.source(), database.handle, retry=QUICK) as run:
        wait_until(lambda: orders.errors or (orders.backlog() == 0 and orders.count == 100))
        status = run.source.status()
    assert present(status["circuit"])["state"] == "closed"
    assert status["parkedKeys"] == len(poison)


@pytest.mark.simulated
def test_a_bad_key_at_the_head_does_not_keep_good_ones_from_being_tried(
    orders: HandledTopic,
) -> None:
    """Many bad keys before the good ones: probes go round, so the good ones are found."""
    database = Database(orders)
    orders.cluster.publish(orders.topic, *[Stored(b"poison", key=f"bad-{n}") for n in range(6)])
    count = orders.publish(keys=30, per_key=2)
    with orders.running(orders.source(parallelism=1), database.handle, retry=QUICK, lanes=2) as run:
        wait_until(lambda: orders.errors or (orders.backlog() == 0 and orders.count == count))
        assert run.source.status()["parkedKeys"] == 6


def held_by(run: Run) -> int:
    """Messages in the window of a run; 0 before it has begun."""
    if "_running" not in run.source.__dict__:
        return 0
    ranges = run.source.status()["ranges"]
    return sum((each["waiting"] or 0) + (each["inFlight"] or 0) for each in ranges)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A circuit breaker that waits for fractions of its times."""
    monkeypatch.setattr("keyshard.core.lanes.circuit_breaker.STUCK_S", 0.5)
    monkeypatch.setattr("keyshard.core.lanes.circuit_breaker.PAUSE_S", 0.05)
    monkeypatch.setattr("keyshard.core.lanes.circuit_breaker.PAUSE_MAX_S", 0.1)


@pytest.mark.simulated
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("per_key", [1, 2])
def test_keys_that_fail_and_fill_the_window_make_room_for_others(
    orders: HandledTopic, per_key: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue: the source stood still for ever, though messages of good keys waited behind."""
    # Each range of a topic partition has 12 of these keys, but a topic partition has room for 10
    # rows. So no good key comes before the window is full, whichever range receives first.
    database, bad = Database(orders), 48
    poison = [Stored(b"poison", key=f"bad-{n}") for n in range(bad)] * per_key
    orders.cluster.publish(orders.topic, *poison)
    count = orders.publish(keys=10, per_key=2)
    source = orders.source(window_rows_max=20, parallelism=2, receiver_queue_size=1)
    database.may_answer.clear()
    with orders.running(source, database.handle, retry=QUICK) as run:
        # Otherwise the first keys may be parked one by one, before the window is full of them.
        wait_until(lambda: orders.errors or (held_by(run) >= 20 and database.attempts >= KEYS_MIN))
        database.may_answer.set()
        wait_until(lambda: orders.errors or orders.count == count)
        wait_until(lambda: orders.errors or run.source.status()["parkedKeys"] == bad)
        wait_until(lambda: orders.errors or orders.backlog() == 0)
    assert not orders.errors
    assert "failing keys fill the window" in caplog.text


@pytest.mark.simulated(seeds=1)
@pytest.mark.usefixtures("hurried")
def test_an_outage_that_fills_the_window_parks_few_keys_at_a_time(orders: HandledTopic) -> None:
    database = Database(orders)
    patient = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(20))
    count = orders.publish(keys=60, per_key=2)
    database.away_for(deadline(60.0))
    source = orders.source(window_rows_max=20, parallelism=2, receiver_queue_size=1)
    database.may_answer.clear()
    with orders.running(source, database.handle, retry=patient) as run:
        # Otherwise the first key may be parked before enough keys have failed for a pause.
        wait_until(lambda: orders.errors or held_by(run) >= 20)
        database.may_answer.set()
        wait_until(lambda: orders.errors or run.source.status()["parkedKeys"])
        status = run.source.status()
        assert present(status["circuit"])["keysOnTrial"] <= ON_TRIAL_MAX
        assert 0 < (status["parkedKeys"] or 0) <= ON_TRIAL_MAX, "of 60 that fail"
        database.away_for(0.0)
        wait_until(lambda: orders.errors or orders.backlog() == 0)
        run.source.unpark(all=True)
        wait_until(lambda: orders.errors or orders.count == count)
    assert not orders.errors


@pytest.mark.simulated
@pytest.mark.usefixtures("hurried")
def test_an_outage_parks_nothing_while_there_is_room(orders: HandledTopic) -> None:
    database = Database(orders)
    count = orders.publish(keys=60, per_key=1)
    database.away_for(2.0)
    with orders.running(orders.source(), database.handle, retry=QUICK) as run:
        wait_until(lambda: orders.errors or orders.count == count)
        assert run.source.status()["counters"]["parked"] == 0
    assert not orders.errors


@pytest.mark.simulated
def test_a_good_key_behind_more_bad_ones_than_a_round_tries_is_found(
    orders: HandledTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue: 300 bad keys waited in the lanes of a range, so no other message came there."""
    # On a slow machine, only rounds of probes try most of the keys.
    monkeypatch.setattr("keyshard.core.lanes.circuit_breaker.PAUSE_MAX_S", 4 * PAUSE_S)
    database, bad = Database(orders), 3 * KEYS_MAX
    tried: list[str | None] = []

    def handle(message: Message) -> None:
        tried.append(message.key)
        database.handle(message)

    orders.cluster.publish(orders.topic, *[Stored(b"poison", key=f"bad-{n}") for n in range(bad)])
    with orders.running(orders.source(parallelism=1), handle, retry=QUICK) as run:
        wait_until(lambda: "_running" in run.source.__dict__)
        wait_until(lambda: (circuit_of(run.source)["nextProbeInSeconds"] or 0) > PAUSE_S)
        published = orders.publish(keys=1, per_key=1)
        wait_until(lambda: orders.errors or orders.count == 1 or held_by(run) > bad)
        before = len(tried)
        wait_until(lambda: orders.errors or orders.count == 1)
        meanwhile = tried[before : tried.index("key-0")]
        again = len([key for key in meanwhile if key in tried[:before]])
        assert again < 2 * KEYS_MAX, "the good key is tried before keys that failed"

        def all_parked() -> bool:
            # Keys that are tried first now may be an outage, unless another succeeds after them.
            nonlocal published
            if orders.count == published:
                published += orders.publish(keys=1, per_key=1)
            return bool(orders.errors) or run.source.status()["parkedKeys"] == bad

        wait_until(all_parked)
    assert not orders.errors


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("count", [KEYS_MIN, 2 * KEYS_MAX])
def test_bad_keys_beside_good_ones_are_parked_and_delay_no_other(
    orders: HandledTopic, count: int
) -> None:
    """Issue: 5 or 3,000 poison keys paused the handlers of all keys again and again.

    How long a good key waits is counted in attempts of bad ones, whatever the machine does: those
    that were there before it may be tried once each. The retries of all would be three times that.
    """
    began: dict[bytes, int] = {}
    waited: list[int] = []
    failures = itertools.count()
    failed = 0

    def handle(message: Message) -> None:
        nonlocal failed
        if message.key is not None and message.key.startswith("bad"):
            failed = next(failures)
            raise ValueError("poison")
        waited.append(failed - began[present(message.value)])

    def publish_good() -> None:
        for key in range(10):
            value = b"%d" % len(began)
            began[value] = failed
            orders.cluster.publish(orders.topic, Stored(value, key=f"good-{key}"))

    publish_good()
    with orders.running(orders.source(), handle, retry=SLOWER) as run:
        wait_until(lambda: orders.errors or len(waited) == len(began))
        bad = iter([Stored(b"", key=f"bad-{n}") for n in range(count)])

        def all_parked() -> bool:
            if len(waited) == len(began):
                orders.cluster.publish(orders.topic, *itertools.islice(bad, 2 * KEYS_MIN))
                publish_good()
            return bool(orders.errors) or run.source.status()["parkedKeys"] == count

        wait_until(all_parked, deadline(150))
        counters = lambda: run.source.status()["counters"]  # noqa: E731
        wait_until(lambda: orders.errors or present(counters()["completed"]) >= len(began))
        status = run.source.status()
    assert not orders.errors
    assert present(status["circuit"])["openings"] == 0
    assert status["counters"]["completed"] == len(began) == len(waited)
    assert max(waited) < 1.5 * count + KEYS_MIN, "good keys wait for nobody"


@pytest.mark.simulated
def test_a_probe_that_hangs_stops_no_other_key(orders: HandledTopic) -> None:
    """Issue: the circuit breaker waited for a hung probe, and every key with it."""
    hung, released = threading.Event(), threading.Event()
    database, keys = Database(orders), 20
    orders.publish(keys=keys, per_key=1)
    database.away_for(deadline(60.0))

    def handle(message: Message) -> None:
        if circuit_of(source)["state"] == "probing" and not hung.is_set():
            hung.set()
            released.wait(deadline(30))
            raise ConnectionError("the connection hung")
        database.handle(message)

    source = orders.source()
    with orders.running(source, handle, retry=QUICK):
        wait_until(hung.is_set)
        wait_until(lambda: circuit_of(source)["state"] == "open")
        database.away_for(0.0)
        wait_until(lambda: orders.errors or orders.count == keys - 1)
        released.set()
        wait_until(lambda: orders.errors or orders.count == keys)
    assert not orders.errors


@pytest.mark.simulated
@pytest.mark.parametrize("error", [Reject("no"), RetryLater(0.01)])
def test_rejections_do_not_open_the_circuit(orders: HandledTopic, error: Exception) -> None:
    tried: set[tuple[str | None, bytes]] = set()

    def handle(message: Message) -> None:
        at = message.key, present(message.value)
        if at not in tried:
            tried.add(at)
            raise error
        orders.note(message)

    orders.publish(keys=20, per_key=3)
    with orders.running(orders.source(), handle) as run:
        wait_until(lambda: orders.errors or orders.backlog() == 0)
        assert circuit_of(run.source)["openings"] == 0


@pytest.mark.simulated
def test_a_stop_in_an_outage_ends_at_its_deadline_and_loses_nothing(orders: HandledTopic) -> None:
    database = Database(orders)
    count = orders.publish(keys=20, per_key=1)
    database.away_for(deadline(60.0))
    source = orders.source()
    began = time.monotonic()
    with orders.running(source, database.handle, drain_timeout_s=1.0):
        wait_until(lambda: "_running" in source.__dict__)
        wait_until(lambda: circuit_of(source)["state"] == "open")
        source.stop()
    assert time.monotonic() - began < deadline(10)
    assert orders.backlog() == count


@pytest.mark.parametrize("executor", ["threads", "async"])
def test_a_stop_does_not_wait_for_an_outage_to_end(orders: HandledTopic, executor: str) -> None:
    database = Database(orders)
    orders.publish(keys=50, per_key=4)
    database.away_for(deadline(60.0))
    handle: Any = database.handle if executor == "threads" else database.coroutine
    with orders.running(orders.source(), handle, drain_timeout_s=deadline(30.0)) as run:
        wait_until(lambda: "_running" in run.source.__dict__)
        wait_until(lambda: circuit_of(run.source)["state"] == "open")
        run.source.stop()
        began_s = time.monotonic()
        run.thread.join(deadline(25))
    assert time.monotonic() - began_s < deadline(20), "it does not wait for its drain"
    assert not orders.errors
    assert orders.backlog() == 200
