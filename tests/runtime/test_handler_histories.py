"""Handlers in every mode, with every sort of trouble at once: the checkers judge what happened.

And that they do: a run that breaks a promise is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tenacity

from handler_world import HandlerWorld, RecordedRun
from helpers import wait_until
from keyshard import RetryPolicy
from keyshard.broker.memory import MemoryBroker
from keyshard.coordinator.handed_out import HandedOut
from keyshard.core.dead_letter.letters import Letter
from keyshard.core.lanes.lanes import KeyQueue, Lanes, Work
from keyshard.core.message import Message
from keyshard.dead_letter.dead_letters import DeadLetters
from keyshard.errors import BrokerError
from keyshard.testing.verify.checkers import check
from troubled import Troubled, TroubledAsync

MODES = {"threads": Troubled, "async": TroubledAsync, "processes": Troubled}
KEYS = [*(f"flaky-{i}" for i in range(6)), *(f"plain-{i}" for i in range(6)), "poison", "wrong"]
TWICE = RetryPolicy(wait=tenacity.wait_fixed(0.005), stop=tenacity.stop_after_attempt(2))
OPTIONS: dict[str, Any] = {"lanes": 3, "retry": TWICE, "drain_timeout_s": 10.0}

MakeWorld = Callable[..., HandlerWorld]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    made: list[HandlerWorld] = []

    def make(handle: Any, **options: Any) -> HandlerWorld:
        made.append(HandlerWorld(handle, options=OPTIONS | options))
        return made[-1]

    yield make
    for world in made:
        world.end()
        world.cluster.validate()


def options_of(mode: str) -> dict[str, Any]:
    return {"executor": mode} | ({"workers": 3} if mode == "processes" else {})


def done(world: RecordedRun) -> int:
    """Messages that are completed, or stored as letters."""
    return len({event.stored for event in world.events if event.kind == "completed"})


def finish(world: HandlerWorld) -> None:
    """Wait until everything is done and acknowledged."""
    wait_until(
        lambda: world.error or (done(world) == world.per_key.total() and not world.backlog())
    )
    assert world.error is None, world.error


def broken(world: RecordedRun, per_key: Mapping[str, int]) -> dict[str, str]:
    """Promises that a history breaks, and how."""
    world.recorder.sent(world.topic, per_key)
    verdicts = check(world.events)
    return {verdict.name: verdict.message for verdict in verdicts if not verdict.holds}


@pytest.mark.parametrize("mode", MODES)
def test_retries_parking_rejects_and_rescale(
    make_world: MakeWorld, mode: str, tmp_path: Path
) -> None:
    handle = MODES[mode](tmp_path)
    world = make_world(handle, **options_of(mode))
    world.publish(*KEYS * 10)
    wait_until(lambda: world.error or world.count >= 20)
    world.rescale(7)
    world.publish(*KEYS * 10)
    wait_until(lambda: world.error or world.count >= 150)
    world.rescale(2)
    finish(world)
    assert "poison" not in world.handled, "it is parked"
    handle.heal()
    assert world.source.unpark("poison")
    world.publish(*KEYS * 5)
    wait_until(lambda: len(world.handled["poison"]) == 25)
    finish(world)
    world.end()
    assert broken(world, world.per_key) == {}
    verdicts = {verdict.name: verdict for verdict in check(world.events)}
    for name in ("one handler per key", "acknowledged after the checkpoint", "routed by key"):
        assert verdicts[name].checked
    for key, count in world.per_key.items():
        wanted = [seq for seq in range(count) if key != "wrong" or seq % 2 == 0]
        assert world.handled[key] == wanted
    failures = [event for event in world.events if event.kind == "failed"]
    assert {event.key for event in failures} == {*KEYS[:6], "poison", "wrong"}


@pytest.mark.parametrize("mode", MODES)
def test_a_handler_that_never_returns(make_world: MakeWorld, mode: str, tmp_path: Path) -> None:
    handle = MODES[mode](tmp_path)
    first = make_world(handle, **options_of(mode), drain_timeout_s=0.2)
    first.publish(*["stuck", *KEYS[:12]] * 8)
    wait_until(lambda: handle.hung() and done(first) == 12 * 8 + 1)
    assert first.handled["stuck"] == [0], "the others go on, and its key waits"
    first.end()
    first.recorder.crashed()
    (tmp_path / "after").mkdir()
    other = MODES[mode](tmp_path / "after")
    other.let_go()
    second = RecordedRun(
        other, lambda: MemoryBroker(first.cluster), first.topic, OPTIONS | options_of(mode),
        before=first, parallelism=4,
    )  # fmt: skip
    try:
        second.recorder.faults_stopped()
        wait_until(lambda: len(second.handled["stuck"]) == 8 and not first.backlog())
    finally:
        second.end()
    assert broken(second, first.per_key) == {}
    assert second.handled["stuck"] == list(range(8))


def test_batches_with_a_restart_and_a_rescale(make_world: MakeWorld) -> None:
    world = make_world(lambda _: None)
    world.end()
    world.publish(*KEYS * 20)
    consume(world, "before", len(KEYS) * 10)
    world.recorder.crashed()
    consume(world, "after", world.per_key.total(), rescale=True)
    wait_until(lambda: not world.backlog())
    assert broken(world, world.per_key) == {}


def consume(world: HandlerWorld, name: str, messages: int, *, rescale: bool = False) -> None:
    """Acknowledge batches until some messages are done in all, and leave the next one behind."""
    committed: set[Any] = set()
    for number, batch in enumerate(world.source.batches(max_rows=15, max_wait_s=0.05)):
        named = f"{name}-{number}"
        world.recorder.records(named, batch)
        if rescale and number == 2:
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(world.rescale, 7).result(20).ranges_after == 7
        world.recorder.acknowledging(named)
        batch.ack()
        done_now = {event.batch for event in world.events if event.kind == "checkpointed"}
        committed = {
            event.stored
            for event in world.events
            if event.kind == "delivered" and event.batch in done_now
        }
        if len(committed) == world.per_key.total():
            world.source.stop()
        elif len(committed) >= messages:
            messages = world.per_key.total()
            world.source.stop()


# -- what breaks a promise is found out ------------------------------------------------------------


def a_queue_for_each_message(lanes: Lanes, message: Message, range_index: int) -> KeyQueue:
    return KeyQueue(None, None, range_index % lanes.ranges)


def tried_again_behind_the_next(lanes: Lanes, work: Work, *args: Any, **options: Any) -> None:
    AGAIN(lanes, work, *args, **options)
    work.queue.work.rotate(-1)


def acknowledged_when_taken(handed_out: HandedOut, *args: Any) -> Any:
    taken = TAKE(handed_out, *args)
    for where, _, block in taken:
        with suppress(BrokerError):  # While its range moves.
            consumer = handed_out._worker.range_consumers.consumer_of(where)
            assert consumer is not None
            consumer.acknowledge([block.id])
    return taken


def parked_without_a_letter(letters: DeadLetters, letter: Letter) -> None:
    """The message is nowhere then."""


def nothing_is_held(lanes: Lanes, slots: Sequence[Any]) -> None:
    """Handlers go on while their range changes hands."""


AGAIN, TAKE = Lanes.again, HandedOut.take
BREAKS: dict[str, tuple[Any, str, Any, set[str]]] = {
    "lanes": (Lanes, "_queue_of", a_queue_for_each_message, {"one handler per key"}),
    "retries": (Lanes, "again", tried_again_behind_the_next, {"order per key"}),
    "acknowledgements": (
        HandedOut, "take", acknowledged_when_taken, {"acknowledged after the checkpoint"},
    ),
    "parking": (
        DeadLetters, "send", parked_without_a_letter,
        {"no loss", "acknowledged after the checkpoint"},
    ),
    "rescale": (Lanes, "hold", nothing_is_held, {"routed by key"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_a_promise_is_found_out(
    make_world: MakeWorld, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, instead, promises = BREAKS[name]
    monkeypatch.setattr(owner, method, instead)
    world = make_world(Troubled(tmp_path))
    world.keep_publishing()
    world.publish(*KEYS * 20)
    # Not every rescale finds a handler at work in a range that moves: many do.
    for count in (7, 2) * (8 if name == "rescale" else 1):
        world.more(100)
        world.rescale(count)
    world.more(100)
    world.end()
    assert broken(world, world.per_key).keys() >= promises
