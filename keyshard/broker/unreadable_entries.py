"""Errors for entries that keyshard refuses, with one wording for all broker implementations."""

from __future__ import annotations

from typing import TypeVar

from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import (
    ChunkedMessageError,
    CorruptEntryError,
    EncryptedMessageError,
    KeyShardError,
    UnreadableEntryError,
)

AROUND = "A bounded read can end before it, and another one start after it."
"""Advice for reads without a subscription, to which ``on_corrupt`` and ``on_encrypted`` mean
nothing."""
Refused = TypeVar("Refused", bound=KeyShardError)


def of_entry(
    kind: type[Refused], where: TopicPartition, entry_id: EntryId, problem: str, remedy: str
) -> Refused:
    """Create an error that carries the position of its entry."""
    return kind(
        problem, remedy, topic_partition=where.name, ledger=entry_id.ledger, entry=entry_id.entry
    )


def corrupt_entry(
    where: TopicPartition, entry_id: EntryId, why: str, stored: bytes = b""
) -> CorruptEntryError:
    """Create the error for an entry that cannot be read.

    Args:
        where: Its topic partition.
        entry_id: Its id.
        why: The defect.
        stored: Its stored bytes.
    """
    error = of_entry(
        CorruptEntryError,
        where,
        entry_id,
        f"Entry {entry_id.ledger}:{entry_id.entry} of {where} cannot be read: {why}. Nothing of "
        "it was acknowledged.",
        "Correct the producer that wrote it. To acknowledge, count and skip such entries of a "
        f"subscription, set on_corrupt to skip. {AROUND}",
    )
    error.stored = stored
    return error


def kafka_entry(where: TopicPartition, entry_id: EntryId, stored: bytes = b"") -> CorruptEntryError:
    """Create the error for an entry in the format of Kafka.

    Args:
        where: Its topic partition.
        entry_id: Its id.
        stored: Its stored bytes.
    """
    error = of_entry(
        CorruptEntryError,
        where,
        entry_id,
        f"Entry {entry_id.ledger}:{entry_id.entry} of {where} has the format of Kafka, as KoP "
        "writes it with entryFormat=kafka. Nothing of it was acknowledged.",
        "Set entryFormat=pulsar in KoP, so that clients of Pulsar can read new entries, and read "
        "this one with a client of Kafka. To acknowledge, count and skip such entries of a "
        f"subscription, set on_corrupt to skip. {AROUND}",
    )
    error.stored = stored
    return error


def entry_of(refused: UnreadableEntryError | ChunkedMessageError) -> EntryId:
    """Return the id of the entry that an error names."""
    ledger, entry = refused.facts["ledger"], refused.facts["entry"]
    assert isinstance(ledger, int)
    assert isinstance(entry, int)
    return EntryId(ledger, entry)


def encrypted_entry(
    where: TopicPartition, entry_id: EntryId, stored: bytes = b""
) -> EncryptedMessageError:
    """Create the error for an encrypted entry.

    Args:
        where: Its topic partition.
        entry_id: Its id.
        stored: Its stored bytes.
    """
    error = of_entry(
        EncryptedMessageError,
        where,
        entry_id,
        f"Message {entry_id.ledger}:{entry_id.entry} of {where} is encrypted, and keyshard has "
        "no keys. Nothing of it was acknowledged.",
        "Consume the topic with a client that has the keys. To acknowledge, count and skip "
        f"encrypted messages of a subscription, set on_encrypted to skip. {AROUND}",
    )
    error.stored = stored
    return error
