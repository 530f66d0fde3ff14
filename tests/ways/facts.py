"""The metadata of a message, in one form for every way to read it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from keyshard.core.message import Message
from keyshard.core.protobuf import fields_of
from keyshard.core.ring.key_slot import key_slot
from tests.ways.kinds import plain
from tests.ways.produce import Draft, Facts

_NAMES = {
    "__key": "key", "__keyBytes": "key_bytes", "__orderingKey": "ordering_key",
    "__eventTime": "event_us", "__publishTime": "publish_us", "__producer": "producer",
    "__sequenceId": "sequence_id", "__properties": "properties",
    "__messageProperties": "properties", "__partition": "partition", "__slot": "slot",
    "__schemaVersion": "schema_version", "__messageId": "id", "__deliverAt": "deliver_us",
    "__topic": "topic",
}  # fmt: skip
ON_REQUEST = ("__orderingKey", "__producer", "__messageIdBytes")
"""Columns that a reading has to name."""
BY_WIRE = ("__keyBytes", "__sequenceId", "__deliverAt")
"""Those that ``transport`` ``client`` refuses."""
DECLARED = {
    "__key": "string", "__orderingKey": "string", "__eventTime": "timestamp",
    "__publishTime": "timestamp", "__producer": "string", "__partition": "int", "__slot": "int",
    "__schemaVersion": "bigint", "__messageId": "string", "__topic": "string",
    "__properties": "map<string,string>", "__keyBytes": "binary", "__sequenceId": "bigint",
    "__deliverAt": "timestamp",
}  # fmt: skip
"""Types in Spark."""
DECLARED_BY_PULSAR = {
    "__key": "binary", "__eventTime": "timestamp", "__publishTime": "timestamp",
    "__messageId": "binary", "__topic": "string", "__messageProperties": "map<string,string>",
}  # fmt: skip
"""Types of the columns of ``format("pulsar")``."""
_OF_KEY = ("key", "ordering_key", "slot")


def of_draft(one: Draft, topic: str, partition: int) -> Facts:
    """Return what every reader has to get of a message."""
    text = b64encode(one.key).decode() if isinstance(one.key, bytes) else one.key
    routing = text if one.ordering_key is None else one.ordering_key
    return {
        "key": text,
        "key_bytes": one.key.encode() if isinstance(one.key, str) else one.key,
        "ordering_key": one.ordering_key,
        "event_us": one.event_ms * 1_000,
        "sequence_id": one.number,
        "properties": one.properties,
        "topic": f"persistent://public/default/{topic}",
        "partition": partition,
        "slot": None if routing is None else key_slot(routing),
        "deliver_us": None if one.deliver_ms is None else one.deliver_ms * 1_000,
    }


def of_row(row: Mapping[str, Any]) -> Facts:
    """Return the metadata of a row of any host."""
    found = {_NAMES[name]: plain(value) for name, value in row.items() if name in _NAMES}
    found["properties"] = dict(found["properties"])
    if "__messageProperties" in row:  # format("pulsar"): bytes of keys, topic partitions as topics
        if "key" in found:
            found["key_bytes"] = found.pop("key")
        found["topic"], _, partition = found["topic"].partition("-partition-")
        found["partition"] = int(partition or -1)
    serialized = row.get("__messageIdBytes")
    if isinstance(found.get("id"), bytes):
        serialized = found.pop("id")
    elif "id" in found:
        found["id"] = tuple(map(int, found["id"].split(":")))
    if serialized is not None:
        fields = fields_of(serialized)
        at = tuple(int(fields.get(number, 0)) for number in (1, 2, 4))  # type: ignore[arg-type]
        # A message without a batch has index -1, as a varint of 64 bits.
        found["id"] = found.get("id", at) if at[:2] == found.get("id", at)[:2] else at
        found["id"] = (*found["id"][:2], 0 if found["id"][2] >= 2**31 else found["id"][2])
    return found


def of_message(message: Message) -> Facts:
    """Return the metadata of a message of a handler."""
    found = {
        "key": message.key, "ordering_key": message.ordering_key,
        "event_us": plain(message.event_time), "publish_us": plain(message.publish_time),
        "properties": dict(message.properties), "topic": message.topic,
        "partition": message.partition, "schema_version": message.schema_version,
        "id": tuple(message.message_id),
    }  # fmt: skip
    return found if message.key_bytes is None else found | {"key_bytes": message.key_bytes}


def differing(wanted: Facts, found: Facts, *, by_client: bool) -> dict[str, tuple[Any, Any]]:
    """Return the columns that differ, with both values.

    Args:
        wanted: Metadata that was published, or that another way read.
        found: Metadata that was read.
        by_client: Whether pulsar-client read it, for which an empty key is a missing one.
    """
    pairs = {name: (wanted[name], found[name]) for name in wanted.keys() & found.keys()}
    differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if by_client and "" in {one.get(name) for one in (wanted, found) for name in _OF_KEY[:2]}:
        return {name: pair for name, pair in differ.items() if name not in _OF_KEY}
    return differ
