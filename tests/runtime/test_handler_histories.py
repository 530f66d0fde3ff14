"""Handlers in every mode, with every fault at once: the checkers judge their history.

A run that breaks a promise is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tenacity

from keyshard import RetryPolicy
from keyshard.broker.memory import MemoryBroker
from keyshard.coordinator.in_flight import InFlightEntries
from keyshard.core.dead_letter import DeadLetter
from keyshard.core.lanes.key_queue import KeyQueue, Work
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.message import Message
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.errors import BrokerError
from keyshard.testing.verify.checkers import check
from tests.helpers import DEADLINE_S, wait_until
from tests.support.failing_handler import AsyncFailingHandler, FailingHandler
from tests.support.recorded_handler import RecordedHandler, RecordedRun

MODES = {"threads": FailingHandler, "async": AsyncFailingHandler, "processes": FailingHandler}
KEYS = [*(f"flaky-{i}" for i in range(6)), *(f"plain-{i}" for i in range(6)), "poison", "wrong"]
TWICE = RetryPolicy(wait=tenacity.wait_fixed(0.005), stop=tenacity.stop_after_attempt(2))
OPTIONS: dict[str, Any] = {"lanes": 3, "retry": TWICE, "drain_timeout_s": DEADLINE_S}

MakeRecorded = Callable[..., RecordedHandler]


def options_of(mode: str) -> dict[str, Any]:
    return OPTIONS | {"executor": mode} | ({"workers": 3} if mode == "processes" else {})


def done(recorded: RecordedRun) -> int:
    """Messages that are completed, or stored as dead letters."""
    return len({event.stored for event in recorded.events if event.kind in {"completed", "parked"}})


def finish(recorded: RecordedHandler) -> None:
    """Wait until everything is done and acknowledged."""
    wait_until(
        lambda: (
            recorded.error
            or (done(recorded) == recorded.per_key.total() and not recorded.backlog())
        )
    )
    assert recorded.error is None, recorded.error


def broken(recorded: RecordedRun, per_key: Mapping[str, int]) -> dict[str, str]:
    """Promises that a history breaks, and how."""
    recorded.recorder.sent(recorded.topic, per_key)
    verdicts = check(recorded.events)
    return {verdict.name: verdict.message for verdict in verdicts if not verdict.holds}


@pytest.mark.parametrize("mode", MODES)
def test_the_history_of_retries_parking_rejects_and_a_rescale_breaks_no_promise(
    make_recorded: MakeRecorded, mode: str, tmp_path: Path
) -> None:
    handle = MODES[mode](tmp_path)
    recorded = make_recorded(handle, options=options_of(mode))
    recorded.publish(*KEYS * 10)
    wait_until(lambda: recorded.error or recorded.count >= 20)
    recorded.rescale(7)
    recorded.publish(*KEYS * 10)
    wait_until(lambda: recorded.error or recorded.count >= 150)
    recorded.rescale(2)
    finish(recorded)
    assert "poison" not in recorded.handled, "it is parked"
    handle.heal()
    assert recorded.source.unpark("poison")
    recorded.publish(*KEYS * 5)
    wait_until(lambda: len(recorded.handled["poison"]) == 25)
    finish(recorded)
    recorded.end()
    assert broken(recorded, recorded.per_key) == {}
    verdicts = {verdict.name: verdict for verdict in check(recorded.events)}
    for name in ("one handler per key", "acknowledged after the checkpoint", "routed by key"):
        assert verdicts[name].checked
    for key, count in recorded.per_key.items():
        wanted = [seq for seq in range(count) if key != "wrong" or seq % 2 == 0]
        assert recorded.handled[key] == wanted
    failures = [event for event in recorded.events if event.kind == "failed"]
    assert {event.key for event in failures} == {*KEYS[:6], "poison", "wrong"}


@pytest.mark.parametrize("mode", MODES)
def test_a_handler_that_never_returns_blocks_only_its_key_and_breaks_no_promise(
    make_recorded: MakeRecorded, mode: str, tmp_path: Path
) -> None:
    handle = MODES[mode](tmp_path)
    first = make_recorded(handle, options=options_of(mode) | {"drain_timeout_s": 0.2})
    first.publish(*["stuck", *KEYS[:12]] * 8)
    wait_until(lambda: handle.hung() and done(first) == 12 * 8 + 1)
    assert first.handled["stuck"] == [0], "the others go on, and its key waits"
    first.end()
    first.recorder.crashed()
    (tmp_path / "after").mkdir()
    other = MODES[mode](tmp_path / "after")
    other.let_go()
    second = RecordedRun(
        other, lambda: MemoryBroker(first.cluster), first.topic, options_of(mode),
        before=first, parallelism=4,
    )  # fmt: skip
    try:
        second.recorder.faults_stopped()
        wait_until(lambda: len(second.handled["stuck"]) == 8 and not first.backlog())
    finally:
        second.end()
    assert broken(second, first.per_key) == {}
    assert second.handled["stuck"] == list(range(8))


def test_the_history_of_batches_with_a_restart_and_a_rescale_breaks_no_promise(
    make_recorded: MakeRecorded,
) -> None:
    recorded = make_recorded(lambda _: None, options=OPTIONS)
    recorded.end()
    recorded.publish(*KEYS * 20)
    consume(recorded, "before", len(KEYS) * 10)
    recorded.recorder.crashed()
    consume(recorded, "after", recorded.per_key.total(), rescale=True)
    wait_until(lambda: not recorded.backlog())
    assert broken(recorded, recorded.per_key) == {}


def consume(recorded: RecordedHandler, name: str, messages: int, *, rescale: bool = False) -> None:
    """Acknowledge batches until some messages are done in all, and leave the next one behind."""
    committed: set[Any] = set()
    for number, batch in enumerate(recorded.source.batches(max_rows=15, max_wait_s=0.05)):
        named = f"{name}-{number}"
        recorded.recorder.records(named, batch)
        if rescale and number == 2:
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(recorded.rescale, 7).result(DEADLINE_S).ranges_after == 7
        recorded.recorder.acknowledging(named)
        batch.ack()
        done_now = {event.batch for event in recorded.events if event.kind == "checkpointed"}
        committed = {
            event.stored
            for event in recorded.events
            if event.kind == "delivered" and event.batch in done_now
        }
        if len(committed) == recorded.per_key.total():
            recorded.source.stop()
        elif len(committed) >= messages:
            messages = recorded.per_key.total()
            recorded.source.stop()


# -- what breaks a promise is found out ------------------------------------------------------------


def a_queue_for_each_message(lanes: Lanes, message: Message, range_index: int) -> KeyQueue:
    return KeyQueue(None, None, range_index % lanes.ranges)


def tried_again_behind_the_next(lanes: Lanes, work: Work, *args: Any, **options: Any) -> None:
    AGAIN(lanes, work, *args, **options)
    work.queue.work.rotate(-1)


def acknowledged_when_taken(in_flight: InFlightEntries, *args: Any) -> Any:
    taken = TAKE(in_flight, *args)
    for where, _, block in taken:
        with suppress(BrokerError):  # While its range moves.
            consumer = in_flight._consumers.range_consumers.consumer_of(where)
            assert consumer is not None
            consumer.acknowledge([block.id])
    return taken


def parked_without_a_dead_letter(dead_letters: DeadLetterStore, dead_letter: DeadLetter) -> None:
    """The message is nowhere then."""


def nothing_is_held(lanes: Lanes, slots: Sequence[Any]) -> None:
    """Handlers go on while their range changes hands."""


AGAIN, TAKE = Lanes.again, InFlightEntries.take
BREAKS: dict[str, tuple[Any, str, Any, set[str]]] = {
    "lanes": (Lanes, "_queue_of", a_queue_for_each_message, {"one handler per key"}),
    "retries": (Lanes, "again", tried_again_behind_the_next, {"order per key"}),
    "acknowledgements": (
        InFlightEntries, "take", acknowledged_when_taken, {"acknowledged after the checkpoint"},
    ),
    "parking": (
        DeadLetterStore, "send", parked_without_a_dead_letter,
        {"no loss", "acknowledged after the checkpoint"},
    ),
    "rescale": (Lanes, "hold", nothing_is_held, {"routed by key"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_promise_is_found(
    make_recorded: MakeRecorded, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, instead, promises = BREAKS[name]
    monkeypatch.setattr(owner, method, instead)
    recorded = make_recorded(FailingHandler(tmp_path), options=OPTIONS)
    recorded.keep_publishing()
    recorded.publish(*KEYS * 20)
    # Not every rescale finds a handler at work in a range that moves: many do.
    for count in (7, 2) * (8 if name == "rescale" else 1):
        recorded.more(100)
        recorded.rescale(count)
    recorded.more(100)
    recorded.end()
    assert broken(recorded, recorded.per_key).keys() >= promises
