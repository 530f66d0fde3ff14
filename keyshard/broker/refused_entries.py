"""Entries that keyshard refuses, by name: one wording for every implementation of the port."""

from __future__ import annotations

from typing import TypeVar

from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import (
    CorruptEntryError,
    EncryptedMessageError,
    KeyShardError,
    UnreadableEntryError,
)

Refused = TypeVar("Refused", bound=KeyShardError)


def of_entry(kind: type[Refused], text: str, where: TopicPartition, entry_id: EntryId) -> Refused:
    """An error that has the facts of the entry that it is about."""
    return kind(text, topic_partition=where.name, ledger=entry_id.ledger, entry=entry_id.entry)


def corrupt_entry(
    where: TopicPartition, entry_id: EntryId, why: str, stored: bytes = b""
) -> CorruptEntryError:
    """An entry cannot be read.

    Args:
        where: Where it lies.
        entry_id: It.
        why: What is wrong with it.
        stored: The bytes of it.
    """
    error = of_entry(
        CorruptEntryError,
        f"Entry {entry_id.ledger}:{entry_id.entry} of {where} cannot be read: {why}. Nothing of it "
        "was acknowledged. Look for the producer that wrote it; on_corrupt=skip acknowledges such "
        "entries, counts them and leaves them out.",
        where,
        entry_id,
    )
    error.stored = stored
    return error


def entry_of(refused: UnreadableEntryError) -> EntryId:
    """The entry that an error is about."""
    ledger, entry = refused.facts["ledger"], refused.facts["entry"]
    assert isinstance(ledger, int)
    assert isinstance(entry, int)
    return EntryId(ledger, entry)


def encrypted_entry(
    where: TopicPartition, entry_id: EntryId, stored: bytes = b""
) -> EncryptedMessageError:
    """An entry is encrypted.

    Args:
        where: Where it lies.
        entry_id: It.
        stored: The bytes of it.
    """
    error = of_entry(
        EncryptedMessageError,
        f"Message {entry_id.ledger}:{entry_id.entry} of {where} is encrypted, and keyshard has no "
        "keys. Nothing of it was acknowledged. Consume the topic with a client that has the keys, "
        "or read up to the message and from behind it; on_encrypted=skip acknowledges encrypted "
        "messages, counts them and leaves them out.",
        where,
        entry_id,
    )
    error.stored = stored
    return error
