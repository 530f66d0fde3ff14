"""The dead-letter topic on the in-memory broker: what is kept, found again, and given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from helpers import COMMITTED
from keyshard.broker.memory import Message as Stored
from keyshard.broker.port import Producer
from keyshard.core.dead_letter.letters import LetterKind, position_of_text
from keyshard.core.dead_letter.parking import State
from keyshard.core.position.entry import EntryId
from keyshard.errors import (
    BrokerUnavailableError,
    DataLossTrimmedError,
    MalformedMessageError,
    ReplayTimeoutError,
    SubscriptionInUseError,
)
from letter_world import FaultyBroker, World, large, letter, replay


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.cluster.validate()
    for client in made.clients:
        client.close()


def test_nothing_parked_is_lost_with_the_process(world: World) -> None:
    letters = world.open()
    for number in range(7):
        letters.send(letter(number))
        letters.send(letter(number, "other"))
    world.die()
    again = world.open()
    assert again.keys.parking.states() == {"k": State.PARKED, "other": State.PARKED}
    for number in range(9):
        again.send(letter(number))
    assert replay(again) == list(range(9)), "each once, though each was sent twice"
    assert again.keys.parking.states() == {"other": State.PARKED}
    assert world.kept == 7


def hostile(**changes: str | None) -> Stored:
    """A parked letter of the source, written by somebody who changed some of its properties."""
    properties = letter(50, "bad").properties() | {"keyshard.parts": "", "keyshard.head": "2"}
    for name, value in changes.items():
        properties.pop(f"keyshard.{name}", None)
        if value is not None:
            properties[f"keyshard.{name}"] = value
    return Stored(b"x", key="bad", properties=properties)


HUGE = "9" * 30
HOSTILE = {
    "a time out of range": hostile(publishTime=HUGE),
    "a time before all times": hostile(publishTime="-" + HUGE),
    "a time that is no number": hostile(publishTime="soon"),
    "a number of too many digits": hostile(attempts="9" * 5_000),
    "no position": hostile(messageId="1:2"),
    "an unknown kind": hostile(kind="lost"),
    "no subscription": hostile(subscription=None),
    "the oldest letter nowhere": hostile(oldest="far away"),
    "parts nowhere": hostile(parts="1:x"),
    "a head that is no number": hostile(parts="1:1", head="all"),
    "a schema version of text": hostile(schemaVersion="new"),
    "a key of no bytes": hostile(keyBytes="\u00e9"),
    "a letter without a key": replace(hostile(), key=None),
    "a marker of nothing": hostile(kind="replayed", messageId=None),
    "a sweep up to nowhere": hostile(kind="replayed", upTo="1"),
}


@pytest.mark.parametrize("how", [*HOSTILE, "all"])
def test_a_malformed_letter_is_named_and_kept_and_stops_no_start(
    world: World, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue: a letter with a time out of range ended every start with a raw exception."""
    letters = world.open()
    letters.send(letter(1))
    malformed = list(HOSTILE.values()) if how == "all" else [HOSTILE[how]]
    world.cluster.publish(world.where.topic, *malformed)
    letters.send(letter(2))
    world.die()
    for _ in range(2):
        caplog.clear()
        again = world.open()
        assert again.keys.parking.states() == {"k": State.PARKED}
        (named,) = [one.getMessage() for one in caplog.records if "malformed" in one.getMessage()]
        assert named.startswith(f"{len(malformed)} message")
        assert again.keys.malformed == len(malformed)
        time.sleep(0.02)
        assert world.kept == 2 + len(malformed), "nothing of it is acknowledged"
        world.die()
        world.cluster.crash()
    again = world.open()
    assert replay(again) == [1, 2]
    assert not world.errors


@pytest.mark.parametrize("kind", ["encrypted", "corrupt"])
def test_an_unreadable_entry_is_a_malformed_letter_and_stops_neither_a_start_nor_a_replay(
    world: World, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue: every start ended at one, and named an option that is not about dead letters."""
    letters = world.open()
    letters.send(letter(1))
    topic = world.where.topic
    world.cluster.publish(topic, Stored(b"?", key="k"), **{kind: True})
    letters.send(letter(2))
    world.die()
    again = world.open()
    assert again.keys.malformed == 1
    assert "1 message of " in caplog.text
    caplog.clear()
    world.cluster.publish(topic, Stored(b"?", key="k"), **{kind: True})
    time.sleep(0.02)
    assert world.kept == 4, "nothing of it is acknowledged"
    assert replay(again) == [1, 2]
    assert world.kept >= 2
    assert "not received any more" not in caplog.text
    assert not world.errors


def test_parts_that_are_no_letter_are_named_when_it_is_replayed(world: World) -> None:
    letters = world.open()
    letters.send(large(3, 6_000_000))
    first = world.cluster.log(world.where).id(0)
    properties = {"parts": f"{first.ledger}:{first.entry}", "head": "7"}
    world.cluster.publish(world.where.topic, hostile(**properties))
    world.die()
    again = world.open()
    assert again.keys.unpark("bad")
    with pytest.raises(MalformedMessageError, match=r"key 'bad'.*keyshard discard"):
        again.first("bad")


def test_a_replay_that_was_cut_off_goes_on_behind_its_last_marker(world: World) -> None:
    letters = world.open()
    for number in range(6):
        letters.send(letter(number))
    assert replay(letters, most=2) == [0, 1]
    world.die()
    # The broker forgets what was acknowledged; the markers it does not.
    world.cluster.crash()
    again = world.open()
    assert world.kept == 4, "what is finished with was acknowledged again"
    assert replay(again) == [2, 3, 4, 5]
    world.die()
    assert world.open().keys.parking.states() == {}


def test_a_letter_without_confirmation_is_sent_again_and_counts_once(world: World) -> None:
    letters = world.open()
    letters.send(letter(0))
    world.clients[-1].fails = 1
    letters.send(letter(1))
    letters.send(letter(2))
    assert len(world.cluster.log(world.where)) == 4
    world.die()
    again = world.open()
    assert world.kept == 3, "the repeated one is finished with"
    assert replay(again) == [0, 1, 2]
    assert world.kept == 0


def test_a_letter_that_failed_for_good_is_found_by_the_next_start(world: World) -> None:
    letters = world.open()
    letters.send(letter(0, "other"))
    world.clients[-1].fails = 1_000
    with pytest.raises(BrokerUnavailableError):
        letters.send(letter(1))
    world.clients[-1].fails = 0
    letters.send(letter(2, "other"))
    saved = letters.checkpoint(COMMITTED)
    assert (saved["from"], saved["oldest"]) == ("1:0", "1:0"), "before what may be stored"
    world.die()
    again = world.open(saved)
    assert again.keys.parking.states() == {"k": State.PARKED, "other": State.PARKED}
    assert replay(again, "other") == [0, 2]


def test_a_restart_with_a_checkpoint_reads_from_the_first_letter_that_rests(world: World) -> None:
    letters = world.open()
    letters.send(letter(0, "out"))
    assert replay(letters, "out") == [0]
    letters.send(letter(0))
    first = letters.checkpoint(COMMITTED)["oldest"]
    for number in range(1, 7):
        letters.send(letter(number))
    saved = letters.checkpoint(COMMITTED)
    letters.send(letter(7))
    letters.send(letter(0, "later"))
    world.die()
    again = world.open(saved)
    assert world.clients[-1].starts == [position_of_text(first)], "from the first letter that rests"
    assert again.keys.parking.states() == {"k": State.PARKED, "later": State.PARKED}
    assert replay(again) == list(range(8))


def test_a_checkpoint_older_than_what_is_stored_parks_no_key_that_was_let_out(
    world: World,
) -> None:
    letters = world.open(checkpointed=True)
    for number in range(2):
        letters.send(letter(number))
    saved = letters.checkpoint(COMMITTED)
    assert replay(letters) == [0, 1]
    letters.send(letter(5, "other"))
    assert world.kept == 3, "markers prove that what the checkpoint names is done"
    world.die()
    assert world.open(saved).keys.parking.states() == {"other": State.PARKED}


def test_markers_are_finished_with_when_a_checkpoint_is_stored_behind_them(world: World) -> None:
    letters = world.open(checkpointed=True)
    for number in range(3):
        letters.send(letter(number))
    assert replay(letters, most=2) == [0, 1]
    letters.checkpoint(COMMITTED)
    assert letters.keys.unpark("k") is False
    assert world.kept == 3
    letters.saved()
    assert world.kept == 1


def expired(world: World, before: EntryId) -> None:
    """Retention removes what rests."""
    world.die()
    world.cluster.trim(world.where, before)


def test_letters_that_expired_are_data_loss_at_the_next_start(world: World) -> None:
    letters = world.open()
    for number in range(5):
        letters.send(letter(number))
    expired(world, EntryId(2, 0))
    with pytest.raises(DataLossTrimmedError, match="the oldest lay at 1:0, and it begins at 2:0"):
        world.open()
    again = world.open(fail_on_data_loss=False)
    assert replay(again) == [3, 4]
    world.die()
    assert world.open().keys.parking.states() == {}, "what was accepted is not told again"


def test_a_loss_that_was_accepted_is_told_once(world: World) -> None:
    letters = world.open()
    for number in range(5):
        letters.send(letter(number))
    expired(world, EntryId(2, 0))
    world.open(fail_on_data_loss=False)
    world.die()
    assert world.open().keys.parking.states() == {"k": State.PARKED}


@pytest.mark.parametrize("before", [EntryId(2, 0), EntryId(9, 0)])
def test_letters_that_a_checkpoint_knows_are_missed_when_they_expired(
    world: World, before: EntryId
) -> None:
    letters = world.open(checkpointed=True)
    for number in range(3):
        letters.send(letter(number))
    saved = letters.checkpoint(COMMITTED)
    letters.saved()
    expired(world, before)
    with pytest.raises(DataLossTrimmedError, match="it is empty"):
        world.open(saved, checkpointed=True)
    again = world.open(saved, checkpointed=True, fail_on_data_loss=False)
    assert again.keys.parking.states() == {}


def test_a_loss_is_told_by_what_else_is_stored(world: World) -> None:
    letters = world.open()
    letters.send(letter(0))
    for number in range(1, 3):
        letters.send(letter(number, "other", LetterKind.REJECTED))
    letters.send(letter(4, "other", LetterKind.REJECTED))
    expired(world, EntryId(2, 0))
    with pytest.raises(DataLossTrimmedError, match="the oldest lay at 1:0"):
        world.open()


def test_rejected_letters_stay_and_park_nothing(world: World) -> None:
    letters = world.open()
    letters.send(letter(0, kind=LetterKind.REJECTED))
    letters.send(letter(1, kind=LetterKind.DEAD_LETTER))
    world.die()
    again = world.open()
    assert again.keys.parking.states() == {}
    assert world.kept == 2


def test_what_is_not_ours_is_let_go_and_what_cannot_be_read_stays(world: World) -> None:
    letters = world.open()
    letters.send(letter(0))
    properties = letter(1).properties() | {"keyshard.messageId": "?"}
    foreign = letter(2, by="billing").properties()
    world.cluster.publish(
        world.where,
        Stored(b"", "k"),
        Stored(b"", "k", properties=properties),
        Stored(b"", "k", properties=foreign),
    )
    world.die()
    again = world.open()
    assert world.kept == 2
    assert replay(again) == [0]


def test_letters_that_are_gone_are_data_loss(world: World) -> None:
    letters = world.open()
    for number in range(5):
        letters.send(letter(number))
    world.cluster.trim(world.where, EntryId(2, 0))
    assert letters.keys.unpark("k")
    with pytest.raises(DataLossTrimmedError, match="1 dead letters of key 'k'") as caught:
        letters.first("k")
    assert caught.value.facts["missing"] == "1:0"


@pytest.mark.parametrize(("before", "left"), [(EntryId(2, 0), [3, 4]), (EntryId(3, 0), [])])
def test_letters_that_are_gone_may_be_accepted(
    world: World, before: EntryId, left: list[int]
) -> None:
    letters = world.open(fail_on_data_loss=False)
    for number in range(5):
        letters.send(letter(number))
    world.cluster.trim(world.where, before)
    assert letters.keys.unpark("k")
    found = []
    resting = letters.first("k")
    rest = None if resting is None else letters.replay("k", resting)
    while rest is not None and resting is not None:
        found.append(int(resting.letter.message.value))
        letters.done("k", resting)
        resting = rest.next()
    assert found == left
    # Without any left it drains until its next message comes, which is replayed at once.
    assert letters.keys.parking.states() == ({} if left else {"k": State.DRAINING})


def test_two_sources_cannot_park_as_the_same_subscription(world: World) -> None:
    world.open()
    with pytest.raises(SubscriptionInUseError, match="unit-parked"):
        world.open(subscribe_timeout_ms=50)
    assert world.open(subscription="other").keys.parking.states() == {}


def test_a_topic_that_cannot_be_read_to_its_end_ends_the_start(world: World) -> None:
    world.open().send(letter(0))
    world.die()
    FaultyBroker.stuck = True
    try:
        began = time.monotonic()
        with pytest.raises(ReplayTimeoutError):
            world.open(replay_timeout_ms=300)
        assert 0.2 < time.monotonic() - began < 5
    finally:
        FaultyBroker.stuck = False
    assert world.open().keys.parking.states() == {"k": State.PARKED}


def test_keys_that_come_out_together_share_what_is_read() -> None:
    world = World(entries_per_ledger=1_000)
    letters = world.open()
    keys = [f"key-{number}" for number in range(5)]
    for number in range(20):
        for key in keys:
            letters.send(letter(number, key))
    world.cluster.publish(world.where, Stored(b"", keys[0], properties={"keyshard.kind": "?"}))
    for key in keys:
        assert letters.keys.unpark(key)
    opened = len(world.clients[-1].starts)
    replays = {}
    for key in keys:
        first = letters.first(key)
        assert first is not None
        replays[key] = (first, letters.replay(key, first))
    for key, (first, rest) in replays.items():
        done, resting = [], first
        while resting is not None:
            done.append(int(resting.letter.message.value))
            letters.done(key, resting)
            resting = rest.next()
        assert done == list(range(20))
    assert len(world.clients[-1].starts) <= opened + 2
    assert not letters._reader._near
    assert letters._reader._near_bytes == 0


@pytest.mark.parametrize(
    ("size", "properties"),
    [
        (5 * 1024 * 1024, {}),
        (30_000_000, {"a": "1", "keyshard.kind": "mine"}),
        (3, {"a": "x" * 6_000_000}),
    ],
)
def test_a_letter_larger_than_the_broker_takes_is_kept_in_parts(
    world: World, size: int, properties: dict[str, str]
) -> None:
    letters = world.open()
    letters.send(letter(0))
    letters.send(large(1, size, **properties))
    letters.send(letter(2))
    world.die()
    letters = world.open()
    assert letters.keys.unpark("k")
    resting, found = letters.first("k"), []
    assert resting is not None
    rest = letters.replay("k", resting)
    while resting is not None:
        found.append(resting.letter)
        letters.done("k", resting)
        resting = rest.next()
    assert found[1].message.value == large(1, size).message.value
    assert found[1].message.properties == properties
    assert [int(one.message.value.split()[0].rstrip(b"\0")) for one in found] == [0, 1, 2]
    assert world.kept == 0, "the parts go with their letter"
    world.die()
    assert world.open().keys.parking.states() == {}


def test_a_letter_in_parts_keeps_its_null_value(world: World) -> None:
    letters, made = world.open(), large(1, 3, a="x" * 6_000_000)
    letters.send(replace(made, message=made.message._replace(value=None)))
    world.die()
    letters = world.open()
    assert letters.keys.unpark("k")
    resting = letters.first("k")
    assert resting is not None
    found = resting.letter.message
    assert (found.value, found.properties) == (None, {"a": "x" * 6_000_000})


def test_parts_without_their_letter_are_let_go(world: World) -> None:
    letters = world.open(acknowledge_timeout_ms=1_000)
    world.clients[-1].fails = 1_000
    with pytest.raises(BrokerUnavailableError):
        letters.send(large(1, 6_000_000))
    world.die()
    letters = world.open()
    assert letters.keys.parking.states() == {}
    assert world.kept == 0


def test_parts_fit_a_broker_that_takes_little() -> None:
    world = World()
    world.cluster.message_bytes_max = 70_000
    letters = world.open()
    letters.send(large(1, 1_000_000))
    world.die()
    letters = world.open()
    assert letters.keys.unpark("k")
    resting = letters.first("k")
    assert resting is not None
    assert resting.letter.message.value == large(1, 1_000_000).message.value


def test_a_letter_whose_parts_expired_is_data_loss(world: World) -> None:
    letters = world.open()
    letters.send(large(1, 6_000_000))
    world.cluster.trim(world.where, EntryId(2, 0))
    assert letters.keys.unpark("k")
    with pytest.raises(DataLossTrimmedError, match="1 dead letters of key 'k'"):
        letters.first("k")


class SlowTogether:
    """Implements the ``Producer`` port: sends are confirmed when four of them wait."""

    def __init__(self, inner: Producer) -> None:
        self._inner = inner
        self._four = threading.Barrier(4)

    def send(self, value: bytes, **fields: Any) -> EntryId:
        sent = self._inner.send(value, **fields)
        self._four.wait(10)
        return sent

    def close(self) -> None:
        self._inner.close()


def test_letters_of_many_keys_are_given_up_without_a_round_trip_for_each(world: World) -> None:
    keys = [f"k{number}" for number in range(40)]
    letters = world.open()
    for number in range(3):
        for key in keys:
            letters.send(letter(number, key))
    assert letters._writer._producer is not None
    letters._writer._producer = SlowTogether(letters._writer._producer)
    assert letters.discard([*keys, "no such key"]) == 120
    assert letters.keys.parking.parked.keys == {}
    assert world.kept == 0
    world.die()
    assert world.open().keys.parking.states() == {}
