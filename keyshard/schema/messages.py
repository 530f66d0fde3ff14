"""Entries -> messages for handlers."""

from __future__ import annotations

from datetime import datetime, timezone

from keyshard.core.entry import EntryBlock, TopicPartition
from keyshard.core.message import Message, MessageId


def messages_of(topic_partition: TopicPartition, block: EntryBlock) -> list[Message]:
    """The messages of an entry, in the order of their indices."""
    published = datetime.fromtimestamp(block.publish_ms / 1000, timezone.utc)
    ledger, entry = block.id
    topic, partition = topic_partition.topic, topic_partition.partition
    return [
        Message(
            value, key, ordering_key, MessageId(ledger, entry, index), topic, partition,
            published, event_time, dict(properties), slot, block.redelivered,
        )
        for value, key, ordering_key, event_time, properties, index, slot in zip(
            block.column("value"), block.column("__key"), block.column("__orderingKey"),
            block.column("__eventTime"), block.column("__properties"), block.indices, block.slots,
            strict=True,
        )
    ]  # fmt: skip
