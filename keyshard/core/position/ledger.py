"""Ledgers of a topic partition, as the broker lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keyshard.core.position.entry import EntryId


@dataclass(frozen=True, slots=True)
class Ledger:
    """A stored ledger at one moment; the last of a list is the one written to."""

    id: int
    entries: int
    size_bytes: int
    """What its entries take as they are stored: with metadata, and compressed where producers
    compress."""


def ledgers_of(stats: Mapping[str, Any]) -> tuple[Ledger, ...]:
    """Ledgers of the admin interface's ``internalStats``, ascending.

    Raises:
        KeyError, TypeError, ValueError: The broker names or writes things otherwise.
    """
    found = {int(each["ledgerId"]): each for each in stats["ledgers"]}
    # Of the ledger that is written to, the list does not tell the size. "currentLedgerEntries"
    # counts entries that are on their way to the disk, which nobody is shown and which may never
    # get there; and that of the ledger before, where one was closed while the broker answered.
    written, confirmed = last_written_of(stats)
    ledgers = []
    for ledger, each in sorted(found.items()):
        entries, size = int(each["entries"]), int(each.get("size", 0))
        if ledger == written:
            entries = max(entries, confirmed + 1)
            size = max(size, int(stats.get("currentLedgerSize", 0)))
        ledgers.append(Ledger(ledger, entries, size))
    return tuple(ledgers)


def last_written_of(stats: Mapping[str, Any]) -> EntryId:
    """The last entry that was written, by the admin interface's ``internalStats``.

    Raises:
        KeyError, TypeError, ValueError: The broker names or writes things otherwise.
    """
    ledger, entry = map(int, str(stats["lastConfirmedEntry"]).split(":"))
    return EntryId(ledger, entry)


def shown(ledgers: Sequence[Ledger], last: EntryId | None) -> tuple[Ledger, ...]:
    """Ledgers without what the broker shows nobody yet.

    Args:
        ledgers: All, ascending.
        last: The last entry that it shows; ``None``: it shows all.
    """
    if last is None:
        return tuple(ledgers)
    found = []
    for ledger in ledgers:
        if ledger.id == last.ledger and ledger.entries > last.entry + 1:
            size = ledger.size_bytes * (last.entry + 1) // ledger.entries
            found.append(replace(ledger, entries=last.entry + 1, size_bytes=size))
        elif ledger.id <= last.ledger:
            found.append(ledger)
    return tuple(found)
