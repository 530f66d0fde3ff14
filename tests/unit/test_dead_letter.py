"""The properties of a dead letter describe its original and its failure."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from keyshard.core.dead_letter import (
    ERROR_CHARS_MAX,
    DeadLetter,
    DeadLetterKind,
    DoneMarker,
    DoneUpToMarker,
    RunsAgainNote,
    parse,
)
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.key_slot import key_slot

WHERE = TopicPartition("persistent://public/default/orders", 3)
DEAD = "persistent://public/default/orders-keyshard-DLQ"
PUBLISHED = datetime(2024, 5, 1, 12, 0, 0, 123_000, tzinfo=timezone.utc)


def message(key: str | None = "k", ordering_key: str | None = None) -> Message:
    routing = ordering_key if ordering_key is not None else key
    return Message(
        b"\0value", key, ordering_key, MessageId(7, 8, 9), WHERE.topic, WHERE.partition, PUBLISHED,
        PUBLISHED, {"a": "1"}, None if routing is None else key_slot(routing), redelivered=True,
    )  # fmt: skip


def read_back(
    dead_letter: DeadLetter, **changes: str
) -> DeadLetter | DoneMarker | RunsAgainNote | DoneUpToMarker | None:
    """Return a dead letter as the dead-letter topic stores it."""
    sent = dead_letter.message
    properties = dead_letter.properties() | changes
    return parse(
        sent._replace(
            message_id=MessageId(50, 1, 0),
            topic=DEAD,
            partition=-1,
            publish_time=datetime.now(timezone.utc),
            properties=properties,
            redelivered=False,
        )
    )


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("ordering_key", ["o", None])
@pytest.mark.parametrize("kind", list(DeadLetterKind))
def test_a_dead_letter_is_read_back_as_it_was(
    key: str | None, ordering_key: str | None, kind: DeadLetterKind
) -> None:
    dead_letter = DeadLetter(message(key, ordering_key), "billing", kind, 5, "ValueError: no")
    assert read_back(dead_letter) == dead_letter
    assert dead_letter.key == (ordering_key or key)
    assert dead_letter.topic_partition == WHERE


def test_a_dead_letter_has_these_properties() -> None:
    one = message()._replace(schema_version=2, key_bytes=b"\0k")
    dead_letter = DeadLetter(one, "billing", DeadLetterKind.PARKED, 5, "OSError: no")
    assert dead_letter.properties() == {
        "a": "1",
        "keyshard.kind": "parked",
        "keyshard.subscription": "billing",
        "keyshard.topic": WHERE.topic,
        "keyshard.partition": "3",
        "keyshard.messageId": "7:8:9",
        "keyshard.publishTime": "1714564800123",
        "keyshard.attempts": "5",
        "keyshard.errorKind": "OSError",
        "keyshard.error": "OSError: no",
        "keyshard.schemaVersion": "2",
        "keyshard.keyBytes": "AGs=",
    }


def test_the_event_time_is_in_milliseconds_and_0_if_it_is_unset() -> None:
    dead_letter = DeadLetter(message(), "billing", DeadLetterKind.PARKED, 5, "no")
    assert dead_letter.event_ms == 1_714_564_800_123
    unset = DeadLetter(
        message()._replace(event_time=None), "billing", DeadLetterKind.PARKED, 5, "no"
    )
    assert unset.event_ms == 0


def test_a_long_error_is_cut() -> None:
    dead_letter = DeadLetter(message(), "billing", DeadLetterKind.PARKED, 5, "x" * 100_000)
    assert dead_letter.properties()["keyshard.error"] == "x" * ERROR_CHARS_MAX


def test_a_dead_letter_of_a_dead_letter_describes_the_newer_one() -> None:
    older = DeadLetter(message(), "billing", DeadLetterKind.PARKED, 5, "older")
    found = older.message._replace(topic=DEAD, partition=-1, properties=older.properties())
    newer = DeadLetter(found, "audit", DeadLetterKind.REJECTED, 1, "newer")
    back = read_back(newer)
    assert isinstance(back, DeadLetter)
    assert (back.error, back.message.topic, dict(back.message.properties)) == (
        "newer", DEAD, older.properties(),
    )  # fmt: skip
    again = DeadLetter(back.message, "third", DeadLetterKind.REJECTED, 1, "newest")
    third = read_back(again)
    assert isinstance(third, DeadLetter)
    assert third.message.properties == back.message.properties


def test_properties_of_the_user_are_kept_under_every_name() -> None:
    own = {"keyshard.kind": "mine", "keyshard.own.x": "1", "keyshard.": "2", "keyshard": "3"}
    dead_letter = DeadLetter(
        message()._replace(properties=own), "billing", DeadLetterKind.PARKED, 5, "no"
    )
    assert read_back(dead_letter) == dead_letter


def marker_message(marker: DoneMarker | DoneUpToMarker, **changes: str) -> Message:
    return message()._replace(properties=marker.properties() | changes)


MARKER = DoneMarker("k", "billing", WHERE, MessageId(7, 8, 9))
SWEEP = DoneUpToMarker("k", "billing", EntryId(50, 3))


@pytest.mark.parametrize("marker", [MARKER, SWEEP])
def test_a_marker_is_read_back_as_it_was(marker: DoneMarker | DoneUpToMarker) -> None:
    assert parse(marker_message(marker)) == marker


def test_other_messages_are_neither_dead_letters_nor_markers() -> None:
    assert parse(message()) is None
    assert parse(message()._replace(properties={"keyshard.kind": "noted"})) is None


@pytest.mark.parametrize("name", ["kind", "messageId", "attempts", "partition", "publishTime"])
def test_a_damaged_dead_letter_is_refused(name: str) -> None:
    dead_letter = DeadLetter(message(), "billing", DeadLetterKind.PARKED, 5, "no")
    with pytest.raises(ValueError, match=r"."):
        read_back(dead_letter, **{f"keyshard.{name}": "?"})


def test_a_damaged_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="not a position"):
        parse(marker_message(SWEEP, **{"keyshard.upTo": "1:2:3"}))
    with pytest.raises(ValueError, match="without a key"):
        parse(marker_message(MARKER)._replace(key=None))
    for marker, name in ((MARKER, "keyshard.messageId"), (SWEEP, "keyshard.subscription")):
        damaged = marker_message(marker)
        properties = {k: v for k, v in damaged.properties.items() if k != name}
        with pytest.raises(ValueError, match=name.replace(".", r"\.") + " is missing"):
            parse(damaged._replace(properties=properties))
