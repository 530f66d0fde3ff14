"""What the broker delivers again of a dead-letter topic: let go as soon as nothing needs it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import COMMITTED, wait_until
from keyshard.broker.memory import Message as Stored
from keyshard.core.dead_letter.letters import LetterKind
from keyshard.core.dead_letter.parking import State
from keyshard.core.position.entry import EntryId
from keyshard.dead_letter import finished
from letter_world import KEEPS, World, large, letter, replay
from parking_place import Place


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.cluster.validate()
    for client in made.clients:
        client.close()


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(f"{request.node.originalname}-{time.monotonic_ns()}")
    yield made
    made.cluster.validate()


def test_done_letters_below_the_checkpoint_are_let_go_when_the_broker_forgot_that(
    world: World,
) -> None:
    letters = world.open(checkpointed=True)
    for number in range(6):
        letters.send(letter(number))
    letters.send(large(6, 6_000_000))
    letters.send(letter(0, "other"))
    assert letters.discard(["other"]) == 1
    assert replay(letters) == list(range(7))
    saved = letters.checkpoint(COMMITTED)
    letters.saved()
    assert world.kept == 0
    world.die()
    world.cluster.crash()
    assert world.kept, "the broker forgot"
    again = world.open(saved, checkpointed=True)
    assert again.keys.parking.states() == {}
    wait_until(lambda: world.kept == 0)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_running_source_lets_go_what_the_broker_forgot(world: World, checkpointed: bool) -> None:
    letters = world.open(checkpointed=checkpointed)
    for number in range(6):
        letters.send(letter(number))
    assert replay(letters) == list(range(6))
    letters.checkpoint(COMMITTED)
    letters.saved()
    assert world.kept == 0
    world.cluster.crash()
    wait_until(lambda: world.kept == 0)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_rests_and_what_nobody_replays_is_kept_though_it_comes_again(
    world: World, checkpointed: bool
) -> None:
    letters = world.open(checkpointed=checkpointed)
    for number in range(3):
        letters.send(letter(number, "done"))
    letters.send(letter(0, kind=LetterKind.REJECTED))
    letters.send(large(1, 6_000_000, kind=LetterKind.DEAD_LETTER))
    for number in range(2, 5):
        letters.send(letter(number))
    assert replay(letters, "done") == [0, 1, 2]
    letters.send(large(5, 6_000_000))
    saved = letters.checkpoint(COMMITTED)
    letters.saved()
    parts = 6_000_000 // (1024 * 1024) + 1
    rests = 1 + 3 + 2 * (parts + 1)
    assert world.kept == rests
    for _ in range(2):
        world.cluster.crash()
        wait_until(lambda: world.kept == rests)
    world.die()
    world.cluster.crash()
    again = world.open(saved if checkpointed else None, checkpointed=checkpointed)
    again.checkpoint(COMMITTED)
    again.saved()
    wait_until(lambda: world.kept == rests)
    assert again.keys.parking.states() == {"k": State.PARKED}
    assert replay(again) == [2, 3, 4, 5]
    again.checkpoint(COMMITTED)
    again.saved()
    wait_until(lambda: world.kept == 1 + parts + 1)


def test_markers_behind_the_stored_checkpoint_stay_until_the_next_is_stored(world: World) -> None:
    letters = world.open(checkpointed=True)
    for number in range(3):
        letters.send(letter(number))
    saved = letters.checkpoint(COMMITTED)
    letters.saved()
    assert replay(letters) == [0, 1, 2]
    for _ in range(2):
        # It died before it stored another one, and so does the next.
        world.die()
        world.cluster.crash()
        again = world.open(saved, checkpointed=True)
        assert again.keys.parking.states() == {}
        wait_until(lambda: world.kept >= 1)
        trim_what_is_acknowledged(world)
    again.checkpoint(COMMITTED)
    again.saved()
    wait_until(lambda: world.kept == 0)


def trim_what_is_acknowledged(world: World) -> None:
    """What a broker without retention does: whole ledgers before the first entry that is kept."""
    world.cluster.roll_ledger(world.where)
    log = world.cluster.log(world.where)
    cursor = world.cluster.subscription(world.where, KEEPS).cursor
    kept = [one for one in range(log.first, len(log)) if not cursor.is_acked(one)]
    before = log.id(kept[0]) if kept else EntryId(log.id(len(log) - 1).ledger + 1, 0)
    world.cluster.trim(world.where, EntryId(before.ledger, 0))


def test_letters_of_others_are_let_go_by_a_running_source(world: World) -> None:
    letters = world.open(checkpointed=True)
    letters.send(letter(0))
    foreign = letter(2, by="billing").properties()
    world.cluster.publish(world.where, Stored(b"", "k"), Stored(b"", "k", properties=foreign))
    letters.send(letter(1))
    letters.checkpoint(COMMITTED)
    letters.saved()
    assert replay(letters, most=1) == [0]
    world.cluster.crash()
    letters.checkpoint(COMMITTED)
    letters.saved()
    wait_until(lambda: world.kept == 1)


def test_the_backlog_of_letters_becomes_empty_without_further_traffic(
    place: Place, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.json"
    before = set(threading.enumerate())
    place.broken = {"b"}
    place.publish(*"ab" * 5)
    with place.run(checkpoint=f"file://{path}") as run:
        wait_until(lambda: len(place.letters()) == 5 and place.backlog() == 0)
        place.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: len(place.handled["b"]) == 5)
        wait_until(lambda: place.resting() == 0)
        assert json.loads(path.read_text())["parked"]["oldest"] is None
    place.cluster.crash()
    assert place.resting()
    with place.run(checkpoint=f"file://{path}"):
        wait_until(lambda: place.resting() == 0)
    assert place.handled["b"] == list(range(5))
    assert not {one for one in threading.enumerate() if "letter-returns" in one.name} - before


def test_a_new_checkpoint_is_stored_for_letters_that_are_done_without_any_traffic(
    place: Place, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.json"
    place.broken = {"b"}
    place.publish(*"ab" * 5)
    with place.run() as run:
        wait_until(lambda: len(place.letters()) == 5 and place.backlog() == 0)
        place.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: len(place.handled["b"]) == 5 and place.resting() == 0)
    place.cluster.unload(place.topic)
    place.cluster.crash()
    assert place.resting()
    for _ in range(2):
        with place.run(checkpoint=f"file://{path}"):
            wait_until(lambda: place.resting() == 0)
        assert json.loads(path.read_text())["parked"]["oldest"] is None
        place.cluster.crash()
    with place.run(checkpoint=f"file://{path}"):
        place.publish(*"ab")
        wait_until(lambda: place.backlog() == 0 and place.resting() == 0)
    assert place.handled["b"] == list(range(6))


def test_an_unexpected_error_of_the_thread_ends_the_source_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = world.open()
    letters.send(letter(0))

    def broken(*_: object) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(finished, "is_finished", broken)
    world.cluster.crash()
    wait_until(lambda: world.errors)
    assert "Thread keyshard-letter-returns ended unexpectedly: RuntimeError('a bug')" in str(
        world.errors[0]
    )
    assert world.kept == 1


def test_a_forged_run_of_parts_is_no_letter_and_stays(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Named with numbers that nobody can count: while it runs, and at a start."""
    letters = world.open()
    forged = {
        **letter(0).own_properties(), "keyshard.parts": "0:0-999999999999", "keyshard.head": "2",
    }  # fmt: skip
    for number in range(2):
        letters.send(letter(number, "other"))
        world.cluster.publish(world.where, Stored(b"", key="k", properties=forged))
    for parts in "?", f"0:0-{10**40}":
        wrong = forged | {"keyshard.parts": parts}
        world.cluster.publish(world.where, Stored(b"", key="k", properties=wrong))
    of_others = forged | {"keyshard.subscription": "others"}
    world.cluster.publish(world.where, Stored(b"", key="k", properties=of_others))
    assert replay(letters, "other") == [0, 1]
    world.cluster.crash()  # everything is received once more, when all of it is known
    wait_until(lambda: world.kept == 4)
    world.die()
    world.cluster.crash()
    again = world.open()
    assert again.keys.parking.states() == {}
    assert "keyshard.parts names 1000000000000 entries" in caplog.text
    again.checkpoint(COMMITTED)
    again.saved()
    wait_until(lambda: world.kept == 4)
    assert not world.errors
