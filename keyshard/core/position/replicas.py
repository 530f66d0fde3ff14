"""The bookies that store each entry of a ledger, as BookKeeper places them.

Source: ``LedgerMetadata`` and ``RoundRobinDistributionSchedule`` of Apache BookKeeper 4.17. In an
ensemble of ``n`` bookies with write quorum ``q``, entry ``e`` is on ``q`` consecutive bookies, the
first of which is number ``e mod n``. After a failure, a new ensemble applies from an entry on.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias
from uuid import UUID

DIGESTS = ("CRC32C", "CRC32")
"""Types of digests that can be checked without the password of a ledger."""
ENSEMBLES_MAX, BOOKIES_MAX = 1_000, 100
"""Most ensembles, and most bookies, of a ledger that is read from bookies. Plans have them, and a
reader has a connection to each bookie."""
METADATA_MAX = 1024 * 1024
"""Longest metadata of a ledger that is parsed, characters."""
_FIELD = re.compile(r"(\w+)=(-?\w+)")
_ENSEMBLE = re.compile(r"(\d+)=\[((?:[^\[\]]|\[[^\[\]]*\])*)\]")
"""First entry and bookies of an ensemble; an IPv6 address has brackets of its own."""
_ENSEMBLES = re.compile(r"ensembles=\{([^}]*)\}")


@dataclass(frozen=True, slots=True)
class LedgerReplicas:
    """A closed ledger, and the bookies of its entries."""

    ledger: int
    last: int
    """Last entry; -1 if the ledger is empty."""
    write_quorum: int
    """Number of bookies that store an entry."""
    digest: str
    """Type of the digest of an entry, one of :data:`DIGESTS`."""
    ensembles: tuple[tuple[int, tuple[str, ...]], ...]
    """First entry and bookies of each ensemble, ascending; the first begins with the first entry
    that is read, or before it."""

    def bookies_of(self, entry: int) -> tuple[str, ...]:
        """Return the bookies that store an entry, as the ledger's metadata names them."""
        at = bisect_right(self.ensembles, entry, key=_first) - 1 if len(self.ensembles) > 1 else 0
        placed = _placed(self.ensembles[at][1], self.write_quorum)
        return placed[entry % len(placed)]

    @property
    def names(self) -> frozenset[str]:
        """All bookies of its ensembles."""
        return frozenset(name for _, names in self.ensembles for name in names)

    def part(self, first: int, end: int) -> LedgerReplicas:
        """Return these replicas with only the ensembles of entries ``first`` to ``end - 1``."""
        if len(self.ensembles) == 1:
            return self
        at = bisect_right(self.ensembles, first, key=_first) - 1
        return replace(self, ensembles=tuple(one for one in self.ensembles[at:] if one[0] < end))


@dataclass(frozen=True, slots=True)
class OffloadedLedger:
    """A closed ledger that a broker offloaded to another store."""

    ledger: int
    last: int
    """Last entry."""
    size_bytes: int
    """Bytes of its entries."""
    uuid: str
    """Id of the offload; the name of its files has it."""


Placement: TypeAlias = LedgerReplicas | OffloadedLedger | str
"""Where a ledger is stored, or why the broker is asked for its entries."""
OFFLOADED = "it is offloaded"
"""The placement of an offloaded ledger, as long as its offload was not asked for."""
UNKNOWN = "its bookies were not asked for"
"""The placement of a ledger in a plan that does not read from bookies."""


def _first(ensemble: tuple[int, tuple[str, ...]]) -> int:
    return ensemble[0]


@lru_cache(maxsize=1024)
def _placed(ensemble: tuple[str, ...], write_quorum: int) -> tuple[tuple[str, ...], ...]:
    """Return the bookies of an entry, by its number modulo the size of the ensemble."""
    size = len(ensemble)
    return tuple(
        tuple(ensemble[(start + number) % size] for number in range(write_quorum))
        for start in range(size)
    )


def replicas_of(stats: Mapping[str, Any]) -> dict[int, Placement]:
    """Return the replicas of each ledger in ``internalStats?metadata=true``.

    Returns:
        By ledger: its replicas, or why its entries cannot be read from bookies.

    Raises:
        KeyError, TypeError, ValueError: The broker's answer has another format.
    """
    return {int(each["ledgerId"]): _replicas(each) for each in stats["ledgers"]}


def offloads_of(info: Mapping[str, Any]) -> dict[int, str]:
    """Return the id of the offload of each offloaded ledger in ``internal-info``.

    Raises:
        KeyError, TypeError, ValueError: The broker's answer has another format.
    """
    return {
        int(each["ledgerId"]): str(UUID(each["offloadedContextUuid"]))
        for each in info["ledgers"]
        if each.get("isOffloaded")
    }


def _replicas(listed: Mapping[str, Any]) -> Placement:
    if listed.get("offloaded"):
        return OFFLOADED
    text = str(listed.get("metadata") or "")
    if len(text) > METADATA_MAX:
        return f"its metadata has more than {METADATA_MAX:,} characters"
    found = _ENSEMBLES.search(text)
    fields = dict(_FIELD.findall(text[: found.start()] if found else text))
    if fields.get("state") != "CLOSED":
        return "it is not closed"
    if fields.get("digestType") not in DIGESTS:
        return f"its digest type {fields.get('digestType')} cannot be checked"
    return _placed_by(int(listed["ledgerId"]), fields, found[1] if found else "")


def _placed_by(ledger: int, fields: Mapping[str, str], text: str) -> Placement:
    """Return the replicas of a ledger.

    Args:
        ledger: Its number.
        fields: Fields of its metadata.
        text: The field ``ensembles`` of its metadata, without braces.
    """
    parts = _ENSEMBLE.findall(text)
    ensembles = tuple(
        (int(first), tuple(name.strip() for name in names.split(","))) for first, names in parts
    )
    quorum = int(fields.get("writeQuorumSize", 0))
    parsed = ", ".join(f"{first}=[{names}]" for first, names in parts) == text
    whole = parsed and ensembles and ensembles[0][0] == 0 and "lastEntryId" in fields
    if not whole or any(not 1 <= quorum <= len(names) for _, names in ensembles):
        return "its metadata is not understood"
    if len(ensembles) > ENSEMBLES_MAX:
        return f"it has more than {ENSEMBLES_MAX:,} ensembles"
    replicas = LedgerReplicas(
        ledger=ledger,
        last=int(fields["lastEntryId"]),
        write_quorum=quorum,
        digest=fields["digestType"],
        ensembles=tuple(sorted(ensembles)),
    )
    if len(replicas.names) > BOOKIES_MAX:
        return f"it has more than {BOOKIES_MAX:,} bookies"
    return replicas
