"""The data of a message by the schema of its topic, for handlers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import keyshard
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind, parse
from keyshard.errors import ConfigError, MalformedMessageError, SchemaError
from keyshard.reading.message_decoder import MessageDecoder
from tests.support.schema_shop import FIELDS, FIRST, SECOND, Shop, avro, of_java, publish, source_of

WANTED = [
    {"id": 1, "name": "a", "added": None},
    {"id": 2, "name": "b", "added": 7},
    None,
    "[KEYSHARD_MALFORMED_MESSAGE]",
]


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_handler_has_the_data_of_each_message(shop: Shop, kind: str) -> None:
    topic = shop.topic("orders", FIRST, SECOND)
    publish(shop, topic)
    source = source_of(shop, topic)
    seen: dict[str, Any] = {}

    def note(message: keyshard.Message) -> None:
        try:
            found = message.data
        except MalformedMessageError as exc:
            found = str(exc).partition(" ")[0]
        seen[str(message.key)] = found
        if len(seen) == len(WANTED):
            source.stop()

    async def note_async(message: keyshard.Message) -> None:
        note(message)

    source.run(note_async if kind == "coroutine" else note)
    assert [seen[key] for key in sorted(seen)] == WANTED


def test_data_with_an_undescribed_field_is_refused(shop: Shop) -> None:
    message = keyshard.Message.for_test(b"\x08\x01")._replace(topic=of_java(shop))
    with pytest.raises(SchemaError, match=r"(?s)'state' .*is an enumeration.*message\.value"):
        MessageDecoder(shop.connection)(message)


def test_outside_of_a_handler_there_is_no_data() -> None:
    with pytest.raises(ConfigError, match=r"only in handlers of a source"):
        _ = keyshard.Message.for_test(b"x").data


def test_a_dead_letter_keeps_the_version_of_its_original() -> None:
    one = keyshard.Message.for_test(b"x", key="k")._replace(schema_version=3)
    dead_letter = DeadLetter(one, "s", DeadLetterKind.PARKED, 1, "why")
    back = parse(one._replace(properties=dead_letter.properties(), schema_version=None))
    assert isinstance(back, DeadLetter)
    assert back.message.schema_version == 3


def test_a_time_that_python_does_not_have_is_malformed_for_a_handler(shop: Shop) -> None:
    topic = shop.topic("times", None, kind="TIMESTAMP")
    read = MessageDecoder(shop.connection)
    far = keyshard.Message.for_test((300_000_000_000_000).to_bytes(8, "big"))._replace(topic=topic)
    with pytest.raises(MalformedMessageError, match="TIMESTAMP"):
        read(far)
    assert read(far._replace(value=None)) is None


def test_data_of_a_schema_that_is_gone_is_an_error_and_not_its_bytes(shop: Shop) -> None:
    topic = shop.topic("gone", FIRST)
    one = keyshard.Message.for_test(avro(FIRST, {"id": 1, "name": "a"}))
    one = one._replace(topic=topic, schema_version=0)
    read = MessageDecoder(shop.connection)
    assert read(one) == {"id": 1, "name": "a"}
    del shop.cluster.schemas[topic]
    # The process remembers; another one asks.
    assert read(one) == {"id": 1, "name": "a"}
    other = pickle.loads(pickle.dumps(read))
    with pytest.raises(
        SchemaError, match=rf"(?s)version 0 of the schema of {topic}.*message.value"
    ):
        other(one)
    assert other(one._replace(schema_version=None)) == one.value


def test_messages_of_a_topic_that_was_created_again_have_data_of_its_own_schema(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST, SECOND)
    read = MessageDecoder(shop.connection)
    value = avro(FIRST, {"id": 1, "name": "a"})
    one = keyshard.Message.for_test(value)._replace(topic=topic, schema_version=0)
    before = one._replace(message_id=one.message_id._replace(ledger=7))
    after = one._replace(message_id=one.message_id._replace(ledger=9))
    assert read(before) == {"id": 1, "name": "a", "added": None}
    # The same bytes as numbers and texts of other names.
    fields = [FIELDS[0] | {"name": "number"}, FIELDS[1] | {"name": "text"}]
    shop.cluster.schemas[topic] = []
    shop.add(topic, FIRST | {"fields": fields})
    assert read(after) == {"number": 1, "text": "a"}
    assert read(before) == {"id": 1, "name": "a", "added": None}
    shop.add(topic, SECOND)  # a version that follows changes nothing
    assert read(after._replace(message_id=after.message_id._replace(ledger=11))) == read(after)
