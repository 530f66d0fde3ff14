"""Deleted ledgers on their bookies, which return entries until they collect garbage."""

from __future__ import annotations

from contextlib import closing

from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.ledger_reader import EntryNotReadError, LedgerReader
from keyshard.core.position.replicas import LedgerReplicas, Placement


def is_dropped(placed: Placement) -> bool:
    """Return whether no bookie has the first entry of a ledger any more."""
    assert isinstance(placed, LedgerReplicas)
    with closing(Bookies({})) as bookies:
        try:
            LedgerReader(placed, 0, 0, bookies, 1 << 20).read()
        except EntryNotReadError as exc:
            return "missing" in str(exc)
    return False
