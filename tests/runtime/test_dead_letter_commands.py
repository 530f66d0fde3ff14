"""Dead letters over the control socket, on the in-memory broker."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from keyshard.broker.memory import Message as Stored
from keyshard.config.connection import Connection
from keyshard.control import RunningSource, running_source
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind
from keyshard.core.message import Message
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError
from keyshard.observe import dead_letter_requests
from keyshard.observe.dead_letter_requests import decoded_value
from tests.helpers import present, wait_until
from tests.support.parking_topic import ParkingTopic

pytestmark = pytest.mark.usefixtures("control_folder")

OTHER = "persistent://public/default/other"
BOTH = ("persistent://public/default/orders", OTHER)


def control() -> RunningSource:
    return running_source(pid=os.getpid())


def test_dead_letters_are_counted_before_they_are_discarded(parking: ParkingTopic) -> None:
    # Only key d reaches its message 1: the other keys are parked at their message 0.
    parking.rejected = {b"1"}
    parking.cluster.create_topic("other")
    with parking.run(topics=BOTH):
        parking.broken = {"a", "c"}
        parking.publish(*"aadd")
        parking.cluster.publish(OTHER, Stored(b"0", key="c"))
        wait_until(lambda: len(parking.dead_letters()) == 4)
        source = control()
        for fields, count in (({"all": True}, 3), ({"topic": "other"}, 1), ({"rejected": True}, 1)):
            for _ in range(2):
                assert source.ask("discard", dry_run=True, **fields)["deadLetters"] == count
        assert source.ask("discard", all=True)["deadLetters"] == 3
        assert source.ask("discard", rejected=True)["deadLetters"] == 1
        wait_until(lambda: parking.resting() == 0)


def test_a_request_with_a_wrong_or_unknown_field_changes_nothing(parking: ParkingTopic) -> None:
    parking.broken = {"a"}
    parking.publish("a")
    with parking.run() as run:
        wait_until(lambda: len(parking.dead_letters()) == 1)
        source = control()
        for do in ("discard", "unpark"):
            for wrong in ("true", 1, None):
                with pytest.raises(ConfigError, match="dry_run is"):
                    source.ask(do, key="a", dry_run=wrong)
            with pytest.raises(ConfigError, match="'older_than'"):
                source.ask(do, topic="orders", older_than=7_200)
        with pytest.raises(ConfigError, match="'subject'"):
            source.ask("dead_letters", subject="orders")
        with pytest.raises(ConfigError, match="dry_run is 1; it must be true or false"):
            source.ask("rescale", ranges=2, dry_run=1)
        with pytest.raises(ConfigError, match="'dryRun'"):
            source.ask("rescale", ranges=2, dryRun=True)
        assert run.source.status()["parkedKeys"] == 1
        assert len(run.source.status()["ranges"]) == 3


def test_dead_letters_are_listed_and_shown_by_request(parking: ParkingTopic) -> None:
    parking.broken = {"a"}
    parking.publish(*"aab")
    with parking.run() as run:
        wait_until(lambda: len(parking.dead_letters()) == 2)
        source = control()
        first = source.ask("dead_letters", limit=1)
        assert [one["error"] for one in first["deadLetters"]] == ["ValueError"]
        rest = source.ask("dead_letters", **{"from": first["next"]})
        assert [one["error"] for one in rest["deadLetters"]] == ["waiting"]
        assert (first["examined"] + rest["examined"], rest["next"]) == (2, None)
        (waiting,) = rest["deadLetters"]
        shown = source.ask("dead_letter", id=waiting["messageId"])
        assert waiting.items() - {("ageSeconds", waiting["ageSeconds"])} <= {
            (name, value) for name, value in shown.items() if name != "properties"
        }
        assert (shown["value"], shown["properties"]) == ("MQ==", {"trace": "a-1"})
        for wrong in (
            {"limit": 0}, {"limit": 1_001}, {"from": "x"}, {"key": 3}, {"older_than_s": -1},
        ):  # fmt: skip
            with pytest.raises(ConfigError):
                source.ask("dead_letters", **wrong)
        for request in ("unpark", "discard"):
            with pytest.raises(ConfigError, match="Nothing selects"):
                source.ask(request)
        with pytest.raises(ConfigError, match="Rejected dead letters are not replayed"):
            source.ask("unpark", rejected=True)
        plan = source.ask("unpark", error="ValueError", dry_run=True)
        assert plan == {
            "keys": 1, "deadLetters": 2, "matching": 1,
            "first": [{"key": "a", "deadLetters": 2, "matching": 1}],
        }  # fmt: skip
        assert run.source.status()["parkedKeys"] == 1
        parking.broken.clear()
        assert run.source.unpark(error="waiting", newer_than_s=3_600) == 1
        wait_until(lambda: parking.handled["a"] == [0, 1])
        wait_until(lambda: not [*run.source.dead_letters()])


def test_an_explanation_names_the_reason_of_a_parked_key(parking: ParkingTopic) -> None:
    parking.broken = {"a"}
    parking.publish(*"aab")
    with parking.run() as run:
        wait_until(lambda: len(parking.dead_letters()) == 2)
        source = control()
        output = source.ask("explain", key="a")
        by = output["parkedBy"]
        assert output["parked"]
        assert by["deadLetters"] == 2
        assert 0 <= by["forSeconds"] < 60
        assert by["unknown"] == ""
        first = parking.dead_letters()[0]
        assert by["message"] == {
            "topic": first.message.topic, "partition": first.message.partition,
            "messageId": str(first.message.message_id), "attempts": 2, "error": first.error,
            "value": "0", "valueBytes": 1,
        }  # fmt: skip
        assert source.ask("explain", key="b")["parkedBy"] is None
        assert parking.resting() == 2, "a look takes nothing away"
        parking.broken.clear()
        run.source.unpark("a")
        wait_until(lambda: parking.handled.get("a") == [0, 1])


ORDER = {
    "type": "record", "name": "Order", "fields": [
        {"name": "id", "type": "int"}, {"name": "seal", "type": "bytes"},
    ],
}  # fmt: skip
WIDER = ORDER | {"fields": [{"name": "note", "type": ["null", "string"]}, *ORDER["fields"]]}
BY_WIDER = b"\x02\x04hi\x0e\x04\x00\xff"
INTEGERS = {"type": "array", "items": "int"}
NUMBERS = {"type": "record", "name": "N", "fields": [{"name": "of", "type": INTEGERS}]}


def letter(topic: str, value: bytes | None, version: int | None) -> DeadLetter:
    message = Message.for_test(value)._replace(topic=topic, schema_version=version)
    return DeadLetter(message, "keyshard", DeadLetterKind.PARKED, 1, "ValueError: no")


def test_a_dead_letter_is_decoded_by_the_schema_version_of_its_message(
    parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastavro")
    connection = Connection(parking.url)
    versions = [
        TopicSchema("AVRO", json.dumps(ORDER).encode(), 0),
        TopicSchema("AVRO", json.dumps(WIDER).encode(), 1),
        TopicSchema("INT32", b"", 2),
        TopicSchema("JSON", json.dumps(ORDER).encode(), 3),
        TopicSchema("AVRO", json.dumps(NUMBERS).encode(), 4),
    ]

    def told(value: bytes | None, version: int | None) -> Any:
        return decoded_value(connection, letter(parking.topic, value, version))

    assert "has no schema. The other forms show its bytes." in told(b"1", None)["problem"]
    assert "does not exist any more" in told(b"1", 0)["problem"]
    parking.cluster.schemas[parking.topic] = versions
    for value, version, wanted in (
        (b"\x0e\x04\x00\xff", 0, {"id": 7, "seal": "AP8="}),
        (BY_WIDER, 1, {"note": "hi", "id": 7, "seal": "AP8="}),
        (b"\x00\x00\x00\x07", 2, 7),
        (b'{"id": 7}', 3, {"id": 7, "seal": None}),
        (None, 0, None),
    ):
        found = told(value, version)
        assert (json.loads(found["text"]), found["problem"]) == (wanted, None)
        assert (found["type"], found["version"]) == (versions[version].type, version)
    numbers = b"\x06\x02\x04\x06\x00"
    assert json.loads(told(numbers, None)["text"]) == {"of": [1, 2, 3]}, "the newest"
    found = told(b"7", 2)
    assert found["text"] is None
    assert "does not fit version 2 of the INT32 schema" in found["problem"]
    assert "Version 9 of the schema" in told(b"7", 9)["problem"]
    monkeypatch.setattr(dead_letter_requests, "DECODED_CHARS_MAX", 5)
    found = told(numbers, 4)
    assert len(found["text"]) == 5
    assert "Only the first 5 of" in found["problem"]
    monkeypatch.setattr(dead_letter_requests, "DECODED_BYTES_MAX", 4)
    assert "The value has 5 bytes" in told(numbers, 4)["problem"]


def test_a_registry_that_cannot_be_reached_is_a_sentence_in_the_answer() -> None:
    nobody = Connection("pulsar://127.0.0.1:1", admin_url="http://127.0.0.1:1")
    found = decoded_value(nobody, letter("persistent://public/default/orders", b"1", 0))
    assert found["text"] is None
    assert "127.0.0.1:1" in present(found["problem"])


def test_a_running_source_decodes_on_request_only(parking: ParkingTopic) -> None:
    parking.broken = {"a"}
    parking.cluster.schemas[parking.topic] = [TopicSchema("STRING", b"", 0)]
    parking.publish("a")
    with parking.run():
        wait_until(lambda: len(parking.dead_letters()) == 1)
        at = str(parking.dead_letters()[0].message.message_id)
        assert control().ask("dead_letter", id=at)["decoded"] is None
        found = control().ask("dead_letter", id=at, schema=True)["decoded"]
        assert (found["type"], found["text"]) == ("STRING", '"0"')
