"""Redelivered dead letters: acknowledged as soon as nothing needs them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from keyshard.broker.memory import Message as Stored
from keyshard.core.dead_letter import DeadLetterKind
from keyshard.core.position.entry import EntryId
from keyshard.dead_letters import acknowledging
from keyshard.dead_letters.parking import ParkingState
from tests.helpers import COMMITTED, wait_until
from tests.support.dead_letter_topic import (
    KEEPS,
    DeadLetterTopic,
    dead_letter,
    discard,
    large,
    replay,
)
from tests.support.parking_topic import ParkingTopic


def test_done_dead_letters_below_the_checkpoint_are_acknowledged_again(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open(checkpointed=True)
    for number in range(6):
        dead_letters.send(dead_letter(number))
    dead_letters.send(large(6, 6_000_000))
    dead_letters.send(dead_letter(0, "other"))
    assert discard(dead_letters, "other") == 1
    assert replay(dead_letters) == list(range(7))
    saved = dead_letters.checkpoint(COMMITTED)
    dead_letters.saved()
    assert dlq.kept == 0
    dlq.die()
    dlq.cluster.crash()
    assert dlq.kept, "the broker forgot"
    again = dlq.open(saved, checkpointed=True)
    assert again.keys.parking.states() == {}
    wait_until(lambda: dlq.kept == 0)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_running_source_acknowledges_again_after_the_broker_forgot(
    dlq: DeadLetterTopic, checkpointed: bool
) -> None:
    dead_letters = dlq.open(checkpointed=checkpointed)
    for number in range(6):
        dead_letters.send(dead_letter(number))
    assert replay(dead_letters) == list(range(6))
    dead_letters.checkpoint(COMMITTED)
    dead_letters.saved()
    assert dlq.kept == 0
    dlq.cluster.crash()
    wait_until(lambda: dlq.kept == 0)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_resting_dead_letters_are_kept_though_they_are_redelivered(
    dlq: DeadLetterTopic, checkpointed: bool
) -> None:
    dead_letters = dlq.open(checkpointed=checkpointed)
    for number in range(3):
        dead_letters.send(dead_letter(number, "done"))
    dead_letters.send(dead_letter(0, kind=DeadLetterKind.REJECTED))
    dead_letters.send(large(1, 6_000_000, kind=DeadLetterKind.DEAD_LETTER))
    for number in range(2, 5):
        dead_letters.send(dead_letter(number))
    assert replay(dead_letters, "done") == [0, 1, 2]
    dead_letters.send(large(5, 6_000_000))
    saved = dead_letters.checkpoint(COMMITTED)
    dead_letters.saved()
    parts = 6_000_000 // (1024 * 1024) + 1
    rests = 1 + 3 + 2 * (parts + 1)
    assert dlq.kept == rests
    for _ in range(2):
        dlq.cluster.crash()
        wait_until(lambda: dlq.kept == rests)
    dlq.die()
    dlq.cluster.crash()
    again = dlq.open(saved if checkpointed else None, checkpointed=checkpointed)
    again.checkpoint(COMMITTED)
    again.saved()
    wait_until(lambda: dlq.kept == rests)
    assert again.keys.parking.states() == {"k": ParkingState.PARKED}
    assert replay(again) == [2, 3, 4, 5]
    again.checkpoint(COMMITTED)
    again.saved()
    wait_until(lambda: dlq.kept == 1 + parts + 1)


def test_markers_behind_the_stored_checkpoint_stay_until_the_next_is_stored(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open(checkpointed=True)
    for number in range(3):
        dead_letters.send(dead_letter(number))
    saved = dead_letters.checkpoint(COMMITTED)
    dead_letters.saved()
    assert replay(dead_letters) == [0, 1, 2]
    for _ in range(2):
        # It died before it stored another one, and so does the next.
        dlq.die()
        dlq.cluster.crash()
        again = dlq.open(saved, checkpointed=True)
        assert again.keys.parking.states() == {}
        wait_until(lambda: dlq.kept >= 1)
        trim_what_is_acknowledged(dlq)
    again.checkpoint(COMMITTED)
    again.saved()
    wait_until(lambda: dlq.kept == 0)


def trim_what_is_acknowledged(dlq: DeadLetterTopic) -> None:
    """Trim as a broker without retention: whole ledgers before the first kept entry."""
    dlq.cluster.roll_ledger(dlq.where)
    log = dlq.cluster.log(dlq.where)
    cursor = dlq.cluster.subscription(dlq.where, KEEPS).cursor
    kept = [one for one in range(log.first, len(log)) if not cursor.is_acked(one)]
    before = log.id(kept[0]) if kept else EntryId(log.id(len(log) - 1).ledger + 1, 0)
    dlq.cluster.trim(dlq.where, EntryId(before.ledger, 0))


def test_foreign_dead_letters_are_acknowledged_by_a_running_source(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open(checkpointed=True)
    dead_letters.send(dead_letter(0))
    foreign = dead_letter(2, by="billing").properties()
    dlq.cluster.publish(dlq.where, Stored(b"", "k"), Stored(b"", "k", properties=foreign))
    dead_letters.send(dead_letter(1))
    dead_letters.checkpoint(COMMITTED)
    dead_letters.saved()
    assert replay(dead_letters, most=1) == [0]
    dlq.cluster.crash()
    dead_letters.checkpoint(COMMITTED)
    dead_letters.saved()
    wait_until(lambda: dlq.kept == 1)


def test_the_backlog_of_dead_letters_becomes_empty_without_further_traffic(
    parking: ParkingTopic, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.json"
    before = set(threading.enumerate())
    parking.broken = {"b"}
    parking.publish(*"ab" * 5)
    with parking.run(checkpoint=f"file://{path}") as run:
        wait_until(lambda: len(parking.dead_letters()) == 5 and parking.backlog() == 0)
        parking.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: len(parking.handled["b"]) == 5)
        wait_until(lambda: parking.resting() == 0)
        assert json.loads(path.read_text())["parked"]["oldest"] is None
    parking.cluster.crash()
    assert parking.resting()
    with parking.run(checkpoint=f"file://{path}"):
        wait_until(lambda: parking.resting() == 0)
    assert parking.handled["b"] == list(range(5))
    assert not {one for one in threading.enumerate() if "letter-returns" in one.name} - before


def test_a_new_checkpoint_is_stored_for_dead_letters_that_are_done_without_any_traffic(
    parking: ParkingTopic, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.json"
    parking.broken = {"b"}
    parking.publish(*"ab" * 5)
    with parking.run() as run:
        wait_until(lambda: len(parking.dead_letters()) == 5 and parking.backlog() == 0)
        parking.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: len(parking.handled["b"]) == 5 and parking.resting() == 0)
    parking.cluster.unload(parking.topic)
    parking.cluster.crash()
    assert parking.resting()
    for _ in range(2):
        with parking.run(checkpoint=f"file://{path}"):
            wait_until(lambda: parking.resting() == 0)
        assert json.loads(path.read_text())["parked"]["oldest"] is None
        parking.cluster.crash()
    with parking.run(checkpoint=f"file://{path}"):
        parking.publish(*"ab")
        wait_until(lambda: parking.backlog() == 0 and parking.resting() == 0)
    assert parking.handled["b"] == list(range(6))


def test_an_unexpected_error_of_the_thread_ends_the_source_by_name(
    dlq: DeadLetterTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0))

    def broken(*_: object) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(acknowledging, "is_finished", broken)
    dlq.cluster.crash()
    wait_until(lambda: dlq.errors)
    assert (
        "Thread keyshard-dead-letter-redelivery ended unexpectedly: RuntimeError('a bug')"
        in str(dlq.errors[0])
    )
    assert dlq.kept == 1


def test_a_forged_run_of_parts_is_no_dead_letter_and_stays(
    dlq: DeadLetterTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """Invalid numbers of parts are named, in a run and at a start."""
    dead_letters = dlq.open()
    forged = {
        **dead_letter(0).own_properties(),
        "keyshard.parts": "0:0-999999999999",
        "keyshard.head": "2",
    }
    for number in range(2):
        dead_letters.send(dead_letter(number, "other"))
        dlq.cluster.publish(dlq.where, Stored(b"", key="k", properties=forged))
    for parts in "?", f"0:0-{10**40}":
        wrong = forged | {"keyshard.parts": parts}
        dlq.cluster.publish(dlq.where, Stored(b"", key="k", properties=wrong))
    of_others = forged | {"keyshard.subscription": "others"}
    dlq.cluster.publish(dlq.where, Stored(b"", key="k", properties=of_others))
    assert replay(dead_letters, "other") == [0, 1]
    dlq.cluster.crash()  # everything is received once more, when all of it is known
    wait_until(lambda: dlq.kept == 4)
    dlq.die()
    dlq.cluster.crash()
    again = dlq.open()
    assert again.keys.parking.states() == {}
    assert "keyshard.parts names 1000000000000 entries" in caplog.text
    again.checkpoint(COMMITTED)
    again.saved()
    wait_until(lambda: dlq.kept == 4)
    assert not dlq.errors
