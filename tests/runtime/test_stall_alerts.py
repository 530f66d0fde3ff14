"""Each reason of a stall: a real source stalls, and Prometheus fires the alert for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tenacity

from keyshard import Message, Produce, RetryPolicy
from keyshard.broker.memory import LookAhead
from keyshard.broker.memory import Message as Stored
from keyshard.broker.memory.dispatch import Subscription
from keyshard.core import partition_watchdog, range_watchdog
from keyshard.core.dead_letter import DeadLetter
from keyshard.core.lanes import circuit_breaker
from keyshard.core.range_watchdog import StallKind
from keyshard.core.ring.assignment import assign, moved_ranges, reassign
from keyshard.core.ring.hash_range import split_ring
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.errors import KeyShardError
from keyshard.observe import broker_poll, monitor
from keyshard.observe.alerts import ALERTS
from tests.helpers import DEADLINE_S, key_in, wait_until
from tests.support.copied_topic import Copied
from tests.support.memory_topic import Run
from tests.support.paused_range import pause_first_range
from tests.support.promtool import fires

pytestmark = pytest.mark.usefixtures("control_folder")

RANGES = 4
FIRST, SECOND = (key_in(hash_range) for hash_range in split_ring(RANGES)[:2])
"""Keys of the first two ranges."""
LATER = RetryPolicy(wait=tenacity.wait_fixed(60), stop=tenacity.stop_never)
QUEUE_MESSAGES = 100
LOOK_AHEAD = LookAhead(per_consumer=10, per_subscription=20)
GIVEN_UP = RetryPolicy(stop=tenacity.stop_after_attempt(1))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog looks often and waits for less."""
    monkeypatch.setattr(monitor, "LOOK_S", 0.02)
    monkeypatch.setattr(range_watchdog, "STALL_S", 0.3)
    monkeypatch.setattr(partition_watchdog, "UNDELIVERED_S", 0.3)
    monkeypatch.setattr(broker_poll, "FACTS_ROUND_S", 0.05)
    monkeypatch.setattr(circuit_breaker, "QUIET_S", 0.05)


class Stalling(Copied):
    """A source that stalls until it is released."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.cluster.look_ahead = LOOK_AHEAD
        self.patch = patch
        self.released = threading.Event()
        self.moving = threading.Event()

    def send(self, *values: tuple[str, bytes]) -> None:
        self.cluster.publish(self.topic, *(Stored(value, key=key) for key, value in values))

    def handle(self, message: Message) -> Any:
        if message.value == b"hang":
            assert self.released.wait(DEADLINE_S)
        if message.value == b"until it moves":
            assert self.moving.wait(DEADLINE_S)
        if message.value == b"fail" and not self.released.is_set():
            raise ValueError("not now")
        return Produce(b"made") if message.value == b"produce" else None

    def release_all(self) -> None:
        self.released.set()
        self.release()


Case = tuple[dict[str, Any], Callable[[Stalling, Run], None], int]
"""Options of the run; makes the started run stall; number of ranges, or of topic partitions, that
stall so."""


def hang(world: Stalling, _run: Run) -> None:
    world.send((FIRST, b"hang"))


def give_up(world: Stalling, _run: Run) -> None:
    world.send((FIRST, b"fail"))


def hold_outputs(world: Stalling, _run: Run) -> None:
    world.hold()
    world.send((FIRST, b"produce"))


def disconnect(world: Stalling, _run: Run) -> None:
    # The clients of the source and of its sink; only the first consumes.
    for client in world.cluster._clients:
        client.drop(world.where[:1])


def fail_most(world: Stalling, _run: Run) -> None:
    world.send(*((key_in(ring, n), b"fail") for ring in split_ring(RANGES)[:1] for n in range(20)))


def occupy_the_worker(world: Stalling, run: Run) -> None:
    world.send((FIRST, b"hang"))
    wait_until(lambda: run.source.status()["ranges"][0]["inFlight"] == 1)
    world.send((SECOND, b"waits"))


def move(world: Stalling, run: Run) -> None:
    """Move slots of the first two ranges, while a handler of the first one hangs."""
    now = assign(RANGES)
    moved = moved_ranges(now, reassign(now, 2 * RANGES))
    first, second = (
        key_in(next(hash_range for hash_range in moved if hash_range.start in ring))
        for ring in split_ring(RANGES)[:2]
    )
    world.send((first, b"hang"), (key_in(split_ring(RANGES)[2]), b"until it moves"))
    wait_until(lambda: [run.source.status()["ranges"][n]["inFlight"] for n in (0, 2)] == [1, 1])
    world.send((second, b"waits"))
    wait_until(lambda: run.source.status()["ranges"][1]["waiting"] == 1)

    def rescale() -> None:
        with suppress(KeyShardError):
            run.source.rescale(2 * RANGES)

    threading.Thread(target=rescale, daemon=True).start()
    wait_until(lambda: run.source._active().lanes.held.ranges)
    world.moving.set()  # A free worker finds the message that waits, and that it is held.


def take_nothing_in_the_first_range(world: Stalling, _run: Run) -> None:
    """Leave more entries with the broker than its look-ahead limit."""
    pause_first_range(world.patch)
    world.send(*[(FIRST, b"waits")] * (QUEUE_MESSAGES + LOOK_AHEAD.per_subscription))


def deliver_nothing(world: Stalling, _run: Run) -> None:
    world.patch.setattr(Subscription, "dispatch", lambda _: None)
    world.send((FIRST, b"waits"))


CASES: dict[StallKind, Case] = {
    StallKind.HANDLER: ({}, hang, 1),
    StallKind.DEAD_LETTER: ({"retry": GIVEN_UP, "on_failure": "dead_letter"}, give_up, 1),
    StallKind.OUTPUTS: ({}, hold_outputs, 1),
    StallKind.DISCONNECTED: ({}, disconnect, RANGES),
    StallKind.CIRCUIT: ({}, fail_most, 1),
    StallKind.RETRIES: ({"retry": LATER}, give_up, 1),
    StallKind.WORKERS: ({"workers": 1}, occupy_the_worker, 1),
    StallKind.DRAINING: ({"workers": 2}, move, 1),
    StallKind.LOOK_AHEAD: ({}, take_nothing_in_the_first_range, 1),
    StallKind.UNDELIVERED: ({}, deliver_nothing, 1),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_alert_of_a_stall_fires_on_the_metrics_of_the_source(
    kind: StallKind,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options, stall, count = CASES[kind]
    world = Stalling(monkeypatch)
    send = DeadLetterStore.send

    def slow(dead_letters: DeadLetterStore, dead_letter: DeadLetter) -> None:
        world.released.wait(DEADLINE_S)
        send(dead_letters, dead_letter)

    monkeypatch.setattr(DeadLetterStore, "send", slow)
    run = world.running(
        world.source(admin_url=world.url, receiver_queue_size=QUEUE_MESSAGES),
        world.handle, sink=world.sink, metrics_port=0, **options,
    )  # fmt: skip

    def stalled() -> list[str]:
        status = run.source.status()
        found = (each["stalled"] for each in [*status["ranges"], *status["partitions"]])
        return [stalled["kind"] for stalled in found if stalled]

    with caplog.at_level(logging.WARNING, "keyshard"), run:
        try:
            run.wait_started()
            stall(world, run)
            wait_until(lambda: run.errors or stalled().count(kind.value) == count)
            port = run.source.__dict__["_running"]._monitor.metrics_port
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        finally:
            world.release_all()
    assert not run.errors
    alert = next(each for each in ALERTS if each.name == kind.alert)
    # Once in a minute: a slow machine may have had another reason first.
    assert "(docs/runbook.md#keyshardstalled" in caplog.text
    summary = alert.summary.replace("{{ $value }}", str(count))
    summary = summary.replace("{{ $labels.subscription }}", "keyshard")
    fires(tmp_path, [answer], alert.name, {"subscription": "keyshard"}, summary)
