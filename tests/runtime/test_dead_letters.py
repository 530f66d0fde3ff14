"""The dead-letter topic on the in-memory broker: kept, found again, and discarded dead letters."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from keyshard.broker.memory import MemoryConsumer, MemoryReader
from keyshard.broker.memory import Message as Stored
from keyshard.broker.port import Producer
from keyshard.core.dead_letter import DeadLetterKind, StoredDeadLetter, position_of_text
from keyshard.core.position.entry import EntryId
from keyshard.dead_letters.parking import ParkingState
from keyshard.errors import (
    BrokerUnavailableError,
    DataLossTrimmedError,
    MalformedMessageError,
    ReplayTimeoutError,
    SubscriptionInUseError,
)
from tests.helpers import COMMITTED, DEADLINE_S, present
from tests.support.dead_letter_topic import (
    DeadLetterTopic,
    dead_letter,
    discard,
    large,
    replay,
)
from tests.support.deadlines import deadline


def test_nothing_parked_is_lost_with_the_process(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    for number in range(7):
        dead_letters.send(dead_letter(number))
        dead_letters.send(dead_letter(number, "other"))
    dlq.die()
    again = dlq.open()
    assert again.keys.parking.states() == {"k": ParkingState.PARKED, "other": ParkingState.PARKED}
    for number in range(9):
        again.send(dead_letter(number))
    assert replay(again) == list(range(9)), "each once, though each was sent twice"
    assert again.keys.parking.states() == {"other": ParkingState.PARKED}
    assert dlq.kept == 7


def hostile(**changes: str | None) -> Stored:
    """Write a parked dead letter of the source with some changed properties."""
    properties = dead_letter(50, "bad").properties() | {"keyshard.parts": "", "keyshard.head": "2"}
    for name, value in changes.items():
        properties.pop(f"keyshard.{name}", None)
        if value is not None:
            properties[f"keyshard.{name}"] = value
    return Stored(b"x", key="bad", properties=properties)


HUGE = "9" * 30
UNCONFIRMED = BrokerUnavailableError("No confirmation.")
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
def test_a_malformed_dead_letter_is_named_and_kept_and_stops_no_start(
    dlq: DeadLetterTopic, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue: a dead letter with a time out of range ended every start with a raw exception."""
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(1))
    malformed = list(HOSTILE.values()) if how == "all" else [HOSTILE[how]]
    dlq.cluster.publish(dlq.where.topic, *malformed)
    dead_letters.send(dead_letter(2))
    dlq.die()
    for _ in range(2):
        caplog.clear()
        again = dlq.open()
        assert again.keys.parking.states() == {"k": ParkingState.PARKED}
        (named,) = [one.getMessage() for one in caplog.records if "malformed" in one.getMessage()]
        assert named.startswith(f"{len(malformed)} malformed dead letter")
        assert again.keys.malformed == len(malformed)
        time.sleep(0.02)
        assert dlq.kept == 2 + len(malformed), "nothing of it is acknowledged"
        dlq.die()
        dlq.cluster.crash()
    again = dlq.open()
    assert replay(again) == [1, 2]
    assert not dlq.errors


@pytest.mark.parametrize("kind", ["encrypted", "corrupt"])
def test_an_unreadable_entry_of_the_topic_stops_neither_a_start_nor_a_replay(
    dlq: DeadLetterTopic, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue: every start ended at one, and named an option that is not about dead letters."""
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(1))
    topic = dlq.where.topic
    dlq.cluster.publish(
        topic, Stored(b"?", key="k"), encrypted=kind == "encrypted", corrupt=kind == "corrupt"
    )
    dead_letters.send(dead_letter(2))
    dead_letters.close()
    dlq.die()
    again = dlq.open()
    assert again.keys.malformed == 1
    assert "1 malformed dead letter in " in caplog.text
    caplog.clear()
    dlq.cluster.publish(
        topic, Stored(b"?", key="k"), encrypted=kind == "encrypted", corrupt=kind == "corrupt"
    )
    time.sleep(0.02)
    assert dlq.kept == 4, "nothing of it is acknowledged"
    assert replay(again) == [1, 2]
    assert dlq.kept >= 2
    assert "not received any more" not in caplog.text
    assert not dlq.errors


def test_parts_that_are_no_dead_letter_are_named_when_it_is_replayed(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    dead_letters.send(large(3, 6_000_000))
    first = dlq.cluster.log(dlq.where).id(0)
    properties = {"parts": f"{first.ledger}:{first.entry}", "head": "7"}
    dlq.cluster.publish(dlq.where.topic, hostile(**properties))
    dlq.die()
    again = dlq.open()
    assert again.keys.unpark("bad")
    with pytest.raises(MalformedMessageError, match=r"(?s)key 'bad'.*dead-letters discard"):
        again.first("bad")


def test_a_replay_that_was_cut_off_continues_behind_its_last_marker(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    for number in range(6):
        dead_letters.send(dead_letter(number))
    assert replay(dead_letters, most=2) == [0, 1]
    dlq.die()
    # The broker forgets the acknowledgements, but keeps the markers.
    dlq.cluster.crash()
    again = dlq.open()
    assert dlq.kept == 4, "what is finished with was acknowledged again"
    assert replay(again) == [2, 3, 4, 5]
    dlq.die()
    assert dlq.open().keys.parking.states() == {}


def test_a_dead_letter_without_confirmation_is_sent_again_and_counts_once(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0))
    dlq.sends.errors.append(UNCONFIRMED)
    dead_letters.send(dead_letter(1))
    dead_letters.send(dead_letter(2))
    assert len(dlq.cluster.log(dlq.where)) == 4
    dlq.die()
    again = dlq.open()
    assert dlq.kept == 3, "the repeated one is finished with"
    assert replay(again) == [0, 1, 2]
    assert dlq.kept == 0


def test_a_dead_letter_that_failed_for_good_is_found_by_the_next_start(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0, "other"))
    dlq.sends.raises = UNCONFIRMED
    with pytest.raises(BrokerUnavailableError):
        dead_letters.send(dead_letter(1))
    dlq.sends.raises = None
    dead_letters.send(dead_letter(2, "other"))
    saved = dead_letters.checkpoint(COMMITTED)
    assert (saved["from"], saved["oldest"]) == ("1:0", "1:0"), "before what may be stored"
    dlq.die()
    again = dlq.open(saved)
    assert again.keys.parking.states() == {"k": ParkingState.PARKED, "other": ParkingState.PARKED}
    assert replay(again, "other") == [0, 2]


def test_a_restart_with_a_checkpoint_reads_from_the_first_dead_letter_that_rests(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0, "out"))
    assert replay(dead_letters, "out") == [0]
    dead_letters.send(dead_letter(0))
    first = dead_letters.checkpoint(COMMITTED)["oldest"]
    for number in range(1, 7):
        dead_letters.send(dead_letter(number))
    saved = dead_letters.checkpoint(COMMITTED)
    dead_letters.send(dead_letter(7))
    dead_letters.send(dead_letter(0, "later"))
    dlq.die()
    dlq.readers.asked.clear()
    again = dlq.open(saved)
    assert dlq.starts == [position_of_text(first)], "from the first dead letter that rests"
    assert again.keys.parking.states() == {"k": ParkingState.PARKED, "later": ParkingState.PARKED}
    assert replay(again) == list(range(8))


def test_an_older_checkpoint_parks_no_key_that_was_unparked(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open(checkpointed=True)
    for number in range(2):
        dead_letters.send(dead_letter(number))
    saved = dead_letters.checkpoint(COMMITTED)
    assert replay(dead_letters) == [0, 1]
    dead_letters.send(dead_letter(5, "other"))
    assert dlq.kept == 3, "markers prove that what the checkpoint names is done"
    dlq.die()
    assert dlq.open(saved).keys.parking.states() == {"other": ParkingState.PARKED}


def test_markers_are_finished_with_when_a_checkpoint_is_stored_behind_them(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open(checkpointed=True)
    for number in range(3):
        dead_letters.send(dead_letter(number))
    assert replay(dead_letters, most=2) == [0, 1]
    dead_letters.checkpoint(COMMITTED)
    assert dead_letters.keys.unpark("k") is False
    assert dlq.kept == 3
    dead_letters.saved()
    assert dlq.kept == 1


def expired(dlq: DeadLetterTopic, before: EntryId) -> None:
    """Stop the client, and let retention remove the dead letters before an entry."""
    dlq.die()
    dlq.cluster.trim(dlq.where, before)


def test_dead_letters_that_expired_are_data_loss_at_the_next_start(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    for number in range(5):
        dead_letters.send(dead_letter(number))
    expired(dlq, EntryId(2, 0))
    with pytest.raises(DataLossTrimmedError, match="the oldest was at 1:0, and it begins at 2:0"):
        dlq.open()
    again = dlq.open(fail_on_data_loss=False)
    assert replay(again) == [3, 4]
    dlq.die()
    assert dlq.open().keys.parking.states() == {}, "what was accepted is not told again"


def test_an_accepted_loss_is_logged_once(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    for number in range(5):
        dead_letters.send(dead_letter(number))
    expired(dlq, EntryId(2, 0))
    dlq.open(fail_on_data_loss=False)
    dlq.die()
    assert dlq.open().keys.parking.states() == {"k": ParkingState.PARKED}


@pytest.mark.parametrize("before", [EntryId(2, 0), EntryId(9, 0)])
def test_dead_letters_that_a_checkpoint_knows_are_missed_when_they_expired(
    dlq: DeadLetterTopic, before: EntryId
) -> None:
    dead_letters = dlq.open(checkpointed=True)
    for number in range(3):
        dead_letters.send(dead_letter(number))
    saved = dead_letters.checkpoint(COMMITTED)
    dead_letters.saved()
    expired(dlq, before)
    with pytest.raises(DataLossTrimmedError, match="it is empty"):
        dlq.open(saved, checkpointed=True)
    again = dlq.open(saved, checkpointed=True, fail_on_data_loss=False)
    assert again.keys.parking.states() == {}


def test_a_lost_dead_letter_is_detected_from_the_other_stored_entries(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0))
    for number in range(1, 3):
        dead_letters.send(dead_letter(number, "other", DeadLetterKind.REJECTED))
    dead_letters.send(dead_letter(4, "other", DeadLetterKind.REJECTED))
    expired(dlq, EntryId(2, 0))
    with pytest.raises(DataLossTrimmedError, match="the oldest was at 1:0"):
        dlq.open()


def test_rejected_dead_letters_stay_and_park_nothing(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0, kind=DeadLetterKind.REJECTED))
    dead_letters.send(dead_letter(1, kind=DeadLetterKind.DEAD_LETTER))
    dlq.die()
    again = dlq.open()
    assert again.keys.parking.states() == {}
    assert dlq.kept == 2


def test_foreign_dead_letters_are_acknowledged_and_unreadable_ones_stay(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0))
    properties = dead_letter(1).properties() | {"keyshard.messageId": "?"}
    foreign = dead_letter(2, by="billing").properties()
    dlq.cluster.publish(
        dlq.where,
        Stored(b"", "k"),
        Stored(b"", "k", properties=properties),
        Stored(b"", "k", properties=foreign),
    )
    dlq.die()
    again = dlq.open()
    assert dlq.kept == 2
    assert replay(again) == [0]


def test_dead_letters_that_are_gone_are_data_loss(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    for number in range(5):
        dead_letters.send(dead_letter(number))
    dlq.cluster.trim(dlq.where, EntryId(2, 0))
    assert dead_letters.keys.unpark("k")
    with pytest.raises(DataLossTrimmedError, match="1 dead letters of key 'k'") as caught:
        dead_letters.first("k")
    assert caught.value.facts["missing"] == "1:0"


@pytest.mark.parametrize(("before", "left"), [(EntryId(2, 0), [3, 4]), (EntryId(3, 0), [])])
def test_dead_letters_that_are_gone_may_be_accepted(
    dlq: DeadLetterTopic, before: EntryId, left: list[int]
) -> None:
    dead_letters = dlq.open(fail_on_data_loss=False)
    for number in range(5):
        dead_letters.send(dead_letter(number))
    dlq.cluster.trim(dlq.where, before)
    assert dead_letters.keys.unpark("k")
    found = []
    resting = dead_letters.first("k")
    rest = None if resting is None else dead_letters.replay("k", resting)
    while rest is not None and resting is not None:
        found.append(int(present(resting.dead_letter.message.value)))
        dead_letters.done("k", resting)
        resting = rest.next()
    assert found == left
    # Without any left it drains until its next message comes; that one is replayed at once.
    assert dead_letters.keys.parking.states() == ({} if left else {"k": ParkingState.DRAINING})


def test_two_sources_cannot_park_as_the_same_subscription(dlq: DeadLetterTopic) -> None:
    dlq.open()
    with pytest.raises(SubscriptionInUseError, match="unit-parked"):
        dlq.open(subscribe_timeout_ms=50)
    assert dlq.open(subscription="other").keys.parking.states() == {}


def test_a_topic_that_cannot_be_read_to_its_end_ends_the_start(dlq: DeadLetterTopic) -> None:
    dlq.open().send(dead_letter(0))
    dlq.die()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryReader, "read", lambda *_: [])
        patch.setattr(MemoryReader, "at_end", lambda _: False)
        began = time.monotonic()
        with pytest.raises(ReplayTimeoutError):
            dlq.open(replay_timeout_ms=300)
        assert 0.2 < time.monotonic() - began < deadline(20)
    assert dlq.open().keys.parking.states() == {"k": ParkingState.PARKED}


def test_an_outage_at_a_failed_start_does_not_hide_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. Two sources start without the topic, and one parks. 2. The other parks. 3. A third one
    cannot read the topic. In 2. and 3. the consumer does not close in time.
    """
    dlq, close = DeadLetterTopic(exists=False), MemoryConsumer.close

    def closes_late(this: MemoryConsumer, **how: Any) -> None:
        close(this, **how)
        raise BrokerUnavailableError("The broker did not answer in time.")

    second, first = dlq.open(), dlq.open()
    first.send(dead_letter(0))
    dlq.die()
    monkeypatch.setattr(MemoryConsumer, "close", closes_late)
    with pytest.raises(SubscriptionInUseError, match="has parked keys"):
        second.send(dead_letter(1))
    monkeypatch.setattr(MemoryReader, "read", lambda *_: [])
    monkeypatch.setattr(MemoryReader, "at_end", lambda _: False)
    with pytest.raises(ReplayTimeoutError):
        dlq.open(replay_timeout_ms=300)


def test_keys_that_are_unparked_together_share_one_read() -> None:
    dlq = DeadLetterTopic(entries_per_ledger=1_000)
    dead_letters = dlq.open()
    keys = [f"key-{number}" for number in range(5)]
    for number in range(20):
        for key in keys:
            dead_letters.send(dead_letter(number, key))
    dlq.cluster.publish(dlq.where, Stored(b"", keys[0], properties={"keyshard.kind": "?"}))
    for key in keys:
        assert dead_letters.keys.unpark(key)
    opened = len(dlq.starts)
    replays = {}
    for key in keys:
        first = present(dead_letters.first(key))
        replays[key] = (first, dead_letters.replay(key, first))
    for key, (first, rest) in replays.items():
        done = []
        resting: StoredDeadLetter | None = first
        while resting is not None:
            done.append(int(present(resting.dead_letter.message.value)))
            dead_letters.done(key, resting)
            resting = rest.next()
        assert done == list(range(20))
    assert len(dlq.starts) <= opened + 2
    assert not dead_letters._reader._near
    assert dead_letters._reader._near_bytes == 0


@pytest.mark.parametrize(
    ("size", "properties"),
    [
        (5 * 1024 * 1024, {}),
        (30_000_000, {"a": "1", "keyshard.kind": "mine"}),
        (3, {"a": "x" * 6_000_000}),
    ],
)
def test_a_dead_letter_larger_than_the_broker_takes_is_kept_in_parts(
    dlq: DeadLetterTopic, size: int, properties: dict[str, str]
) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0))
    dead_letters.send(large(1, size, properties=properties))
    dead_letters.send(dead_letter(2))
    dlq.die()
    dead_letters = dlq.open()
    assert dead_letters.keys.unpark("k")
    resting, found = dead_letters.first("k"), []
    assert resting is not None
    rest = dead_letters.replay("k", resting)
    while resting is not None:
        found.append(resting.dead_letter)
        dead_letters.done("k", resting)
        resting = rest.next()
    assert found[1].message.value == large(1, size).message.value
    assert found[1].message.properties == properties
    assert [int(present(one.message.value).split()[0].rstrip(b"\0")) for one in found] == [0, 1, 2]
    assert dlq.kept == 0, "the parts go with their letter"
    dlq.die()
    assert dlq.open().keys.parking.states() == {}


def test_a_dead_letter_in_parts_keeps_its_null_value(dlq: DeadLetterTopic) -> None:
    dead_letters, made = dlq.open(), large(1, 3, properties={"a": "x" * 6_000_000})
    dead_letters.send(replace(made, message=made.message._replace(value=None)))
    dlq.die()
    dead_letters = dlq.open()
    assert dead_letters.keys.unpark("k")
    resting = dead_letters.first("k")
    assert resting is not None
    found = resting.dead_letter.message
    assert (found.value, found.properties) == (None, {"a": "x" * 6_000_000})


def test_parts_without_their_dead_letter_are_acknowledged(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open(acknowledge_timeout_ms=1_000)
    dlq.sends.raises = UNCONFIRMED
    with pytest.raises(BrokerUnavailableError):
        dead_letters.send(large(1, 6_000_000))
    dlq.die()
    dlq.sends.raises = None
    dead_letters = dlq.open()
    assert dead_letters.keys.parking.states() == {}
    assert dlq.kept == 0


def test_parts_fit_a_broker_that_takes_little() -> None:
    dlq = DeadLetterTopic()
    dlq.cluster.message_bytes_max = 70_000
    dead_letters = dlq.open()
    dead_letters.send(large(1, 1_000_000))
    dlq.die()
    dead_letters = dlq.open()
    assert dead_letters.keys.unpark("k")
    resting = dead_letters.first("k")
    assert resting is not None
    assert resting.dead_letter.message.value == large(1, 1_000_000).message.value


def test_a_dead_letter_whose_parts_expired_is_data_loss(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    dead_letters.send(large(1, 6_000_000))
    dlq.cluster.trim(dlq.where, EntryId(2, 0))
    assert dead_letters.keys.unpark("k")
    with pytest.raises(DataLossTrimmedError, match="1 dead letters of key 'k'"):
        dead_letters.first("k")


class SlowTogether:
    """Implements the ``Producer`` port: sends are confirmed when four of them wait."""

    def __init__(self, inner: Producer) -> None:
        self._inner = inner
        self._four = threading.Barrier(4)

    def send(self, value: bytes | None, **fields: Any) -> EntryId:
        sent = self._inner.send(value, **fields)
        self._four.wait(DEADLINE_S)
        return sent

    def close(self) -> None:
        self._inner.close()


def test_dead_letters_of_many_keys_are_discarded_without_a_round_trip_for_each(
    dlq: DeadLetterTopic,
) -> None:
    keys = [f"k{number}" for number in range(40)]
    dead_letters = dlq.open()
    for number in range(3):
        for key in keys:
            dead_letters.send(dead_letter(number, key))
    assert dead_letters._writer._producer is not None
    dead_letters._writer._producer = SlowTogether(dead_letters._writer._producer)
    assert discard(dead_letters, *keys, "no such key") == 120
    assert dead_letters.keys.parking.parked.keys == {}
    assert dlq.kept == 0
    dlq.die()
    assert dlq.open().keys.parking.states() == {}
