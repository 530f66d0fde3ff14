"""Values, keys and properties at their limits: what a sink stores is what its readers get."""

from __future__ import annotations

import random
import re
from base64 import b64encode
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import Any

import pulsar
import pyarrow as pa
import pytest

from keyshard import KeyShardSink
from keyshard.columns.content import PROPERTIES, TIME_MS_MAX
from keyshard.core.message import Message
from keyshard.errors import ConfigError, MessageTooLargeError
from keyshard.testing.devbroker import DevBroker
from tests.support.stored_topic import admin_of, keeping_namespace, messages_of_topic

pytestmark = pytest.mark.broker
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
LAST = EPOCH + timedelta(milliseconds=TIME_MS_MAX - 1)
"""The last time that readers of keyshard get as one."""
LIMIT = 5 * 1024 * 1024
"""Largest entry of the broker, bytes."""
FIRST = EPOCH + timedelta(milliseconds=1)
MANY = {f"n{number}": f"v{number}" for number in range(10_000)}
LARGE = {"": "", "large": "x" * (1 << 20), "ключ": "\U0001f511\x00"}
HOSTILE: list[dict[str, Any]] = [
    {"value": b"", "key": ""},
    {"value": None, "key": ""},
    {"value": b"no key"},
    {"value": b"\x00\xff", "key": "k" * 65_536},
    {"value": b"control", "key": "\x00\n\u2028\U0001f511"},
    {"value": b"", "key": "a", "properties": MANY},
    {"value": None, "key": "b", "properties": LARGE},
    {"value": b"first", "key": "c", "event_time": FIRST},
    {"value": b"last", "key": "c", "event_time": LAST},
]


@pytest.fixture
def topic(dev_broker: DevBroker) -> str:
    """A topic with deduplication that keeps everything."""
    with admin_of(dev_broker) as admin:
        namespace = keeping_namespace(admin, "values")
        admin.put(f"/persistent/{namespace}/t").raise_for_status()
    return f"persistent://{namespace}/t"


def stored(dev_broker: DevBroker, topic: str) -> list[Message]:
    return messages_of_topic(dev_broker.service_url, topic)


def by_client(dev_broker: DevBroker, topic: str) -> list[Any]:
    """Messages as pulsar-client gets them."""
    found = []
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    with closing(pulsar.Client(dev_broker.service_url, logger=quiet)) as client:
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        while reader.has_message_available():
            found.append(reader.read_next(20_000))
        return found


def sink(dev_broker: DevBroker, topic: str) -> KeyShardSink:
    return KeyShardSink(topic, sink_id="s", service_url=dev_broker.service_url)


def rows(messages: list[dict[str, Any]]) -> pa.RecordBatch:
    pairs = [[*one.get("properties", {}).items()] for one in messages]
    times = [one.get("event_time") for one in messages]
    return pa.record_batch(
        {
            "value": pa.array([one["value"] for one in messages], pa.binary()),
            "__key": pa.array([one.get("key") for one in messages], pa.string()),
            "__properties": pa.array(pairs, PROPERTIES),
            "__eventTime": pa.array(times, pa.timestamp("ms", "UTC")),
        }
    )


def send(opened: KeyShardSink, messages: list[dict[str, Any]]) -> None:
    for one in messages:
        opened.send(**one)
    opened.flush()


def write(opened: KeyShardSink, messages: list[dict[str, Any]]) -> None:
    batch = rows(messages)
    assert opened.write_batch(batch, 0).already_stored == 0
    assert opened.write_batch(batch, 0).already_stored == len(messages)


WAYS = pytest.mark.parametrize("publish", [send, write])
Publish = Callable[[KeyShardSink, list[dict[str, Any]]], None]


@WAYS
def test_values_at_their_limits_are_read_back_by_both_clients(
    dev_broker: DevBroker, topic: str, publish: Publish
) -> None:
    with sink(dev_broker, topic) as opened:
        publish(opened, HOSTILE)

    def sorted_by(found: list[Any]) -> list[Any]:
        return sorted(found, key=repr)

    expected = sorted_by(
        [
            (
                one["value"],
                one.get("key"),
                one.get("properties", {}),
                int((one["event_time"] - EPOCH) / timedelta(milliseconds=1))
                if "event_time" in one
                else 0,
            )
            for one in HOSTILE
        ]
    )
    ours = [
        (
            one.value,
            one.key,
            dict(one.properties),
            0 if one.event_time is None else round((one.event_time - EPOCH).total_seconds() * 1000),
        )
        for one in stored(dev_broker, topic)
    ]
    assert sorted_by(ours) == expected
    # pulsar-client tells neither a null value from an empty one, nor an empty key from none.
    theirs = [
        (one.data(), one.partition_key(), one.properties(), one.event_timestamp())
        for one in by_client(dev_broker, topic)
    ]
    plain = [(value or b"", key or "", pairs, ms) for value, key, pairs, ms in expected]
    assert sorted_by(theirs) == sorted_by(plain)


def test_keys_that_are_no_text_are_read_back_as_bytes(dev_broker: DevBroker, topic: str) -> None:
    keys = [b"\xff\xfe", b"", b"\x00" * 65_536, "k\u00e9".encode("latin-1")]
    batch = pa.record_batch({"value": [b"1"] * len(keys), "__keyBytes": keys})
    with sink(dev_broker, topic) as opened:
        opened.write_batch(batch, 0)
        assert opened.write_batch(batch, 0).already_stored == len(keys)
    expected = sorted(b64encode(key).decode() for key in keys)
    assert sorted(one.key or "" for one in stored(dev_broker, topic)) == expected
    assert sorted(one.partition_key() for one in by_client(dev_broker, topic)) == expected


def excess(error: MessageTooLargeError) -> int:
    """Bytes that an entry has beyond the limit of the broker, as the error tells them."""
    told = re.search(r"have (\d+) bytes, more than the broker's limit of (\d+)", str(error))
    assert told is not None
    return int(told[1]) - int(told[2])


@WAYS
def test_a_value_of_the_limit_is_stored_and_one_byte_more_is_refused(
    dev_broker: DevBroker, topic: str, publish: Publish
) -> None:
    """No compression makes the value smaller, so it is stored as it is."""
    noise = random.Random(0).randbytes(LIMIT)
    small = {"value": b"small", "key": "a"}
    with sink(dev_broker, topic) as opened:
        with pytest.raises(MessageTooLargeError, match="'large'") as caught:
            publish(opened, [{"value": noise, "key": "large"}])
        most = noise[: LIMIT - excess(caught.value)]
        assert LIMIT - 1_024 < len(most) < LIMIT
        one_more = noise[: len(most) + 1]
        with pytest.raises(MessageTooLargeError, match="'large'"):
            publish(opened, [{"value": one_more, "key": "large"}, small])
        assert stored(dev_broker, topic) == []
        publish(opened, [{"value": most, "key": "large"}, small])
    expected = [("a", b"small"), ("large", most)]
    assert sorted((one.key or "", one.value) for one in stored(dev_broker, topic)) == expected
    found = [(one.partition_key(), one.data()) for one in by_client(dev_broker, topic)]
    assert sorted(found) == expected


@pytest.mark.parametrize("time", [EPOCH, EPOCH - timedelta(days=1)])
def test_a_time_that_pulsar_cannot_store_is_refused_before_anything_is_sent(
    dev_broker: DevBroker, topic: str, time: datetime
) -> None:
    wrong: list[dict[str, Any]] = [
        {"value": b"1", "key": "a"},
        {"value": b"2", "key": "b", "event_time": time},
    ]
    with sink(dev_broker, topic) as opened:
        with pytest.raises(ConfigError, match="1970"):
            opened.write_batch(rows(wrong), 0)
        with pytest.raises(ConfigError, match="1970"):
            opened.send(**wrong[1])
    assert stored(dev_broker, topic) == []
