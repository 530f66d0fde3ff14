"""Ledgers of a topic partition, as the broker lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keyshard.core.position.entry import EntryId
from keyshard.core.position.replicas import UNKNOWN, Placement, replicas_of


@dataclass(frozen=True, slots=True)
class Ledger:
    """A stored ledger at one moment. The last ledger of a list is the one being written."""

    id: int
    entries: int
    size_bytes: int
    """Stored size of its entries: with metadata, and after compression."""
    placement: Placement = UNKNOWN
    """Where its entries are stored, if that was asked for."""


def ledgers_of(stats: Mapping[str, Any]) -> tuple[Ledger, ...]:
    """Return the ledgers in ``internalStats`` of the admin interface, ascending.

    Raises:
        KeyError, TypeError, ValueError: The broker's answer has another format.
    """
    found = {int(each["ledgerId"]): each for each in stats["ledgers"]}
    # The list has no size for the ledger being written. "currentLedgerEntries" is no substitute: it
    # also counts entries that are not stored yet. No consumer sees them, and they may never be
    # stored. If the broker closes a ledger while it answers, the field counts the closed ledger.
    written, confirmed = last_written_of(stats)
    ledgers = []
    for ledger, each in sorted(found.items()):
        entries, size = int(each["entries"]), int(each.get("size", 0))
        if ledger == written:
            entries = max(entries, confirmed + 1)
            size = max(size, int(stats.get("currentLedgerSize", 0)))
        ledgers.append(Ledger(ledger, entries, size))
    return tuple(ledgers)


def placed_ledgers_of(stats: Mapping[str, Any]) -> tuple[Ledger, ...]:
    """Return the ledgers in ``internalStats?metadata=true``, and where each is stored.

    Raises:
        KeyError, TypeError, ValueError: The broker's answer has another format.
    """
    placed = replicas_of(stats)
    return tuple(replace(one, placement=placed[one.id]) for one in ledgers_of(stats))


def last_written_of(stats: Mapping[str, Any]) -> EntryId:
    """Return the last written entry in ``internalStats`` of the admin interface.

    Raises:
        KeyError, TypeError, ValueError: The broker's answer has another format.
    """
    ledger, entry = map(int, str(stats["lastConfirmedEntry"]).split(":"))
    return EntryId(ledger, entry)


def shown(ledgers: Sequence[Ledger], last: EntryId | None) -> tuple[Ledger, ...]:
    """Return the ledgers up to the last entry that the broker shows to consumers.

    Later ledgers are left out. The ledger of that entry ends with it.

    Args:
        ledgers: All ledgers, ascending.
        last: The last entry that the broker shows; ``None``: it shows all.
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


def ledgers_read(
    first_from: Callable[[EntryId], EntryId | None], size_bytes: int, placement: Placement = UNKNOWN
) -> tuple[Ledger, ...]:
    """Return the ledgers of a topic partition whose ledgers nobody lists, by looking at entries.

    A ledger of n entries takes about 2 log(n) looks, or two if it has as many as the one before.
    Entries that no consumer receives count only if another one follows them in the ledger.

    Args:
        first_from: Returns the first entry that is stored at or after a position; ``None`` if there
            is none. Entries may be added between two calls.
        size_bytes: Stored size of all entries, bytes. Each entry gets an equal part.
        placement: Where the entries are stored, or why they are read by the broker.
    """
    counts: dict[int, int] = {}
    first, expected = first_from(EntryId(0, 0)), 1
    while first is not None:
        ledger = first.ledger
        expected, first = _end_of(first, expected, first_from)
        counts[ledger] = expected
    total = sum(counts.values())
    return tuple(
        Ledger(ledger, entries, size_bytes * entries // total, placement)
        for ledger, entries in counts.items()
    )


def _end_of(
    first: EntryId, expected: int, first_from: Callable[[EntryId], EntryId | None]
) -> tuple[int, EntryId | None]:
    """Return the number of entries of a ledger, and the first entry after it.

    Args:
        first: An entry of the ledger.
        expected: Its likely number of entries.
        first_from: See :func:`ledgers_read`.
    """
    stored, end, after = first.entry, None, None  # an entry that is stored, one that is not
    while end is None or end - stored > 1:
        if end is not None:
            at = (stored + end) // 2
        elif stored < expected:
            at = max(expected - 1, stored + 1)
        else:
            at = max(2 * stored, stored + 1)
        found = first_from(EntryId(first.ledger, at))
        if found is not None and found.ledger == first.ledger:
            stored = found.entry
        else:
            end, after = at, found
    return end, after
