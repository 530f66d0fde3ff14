"""Entries of one ledger: runs, or a roaring bitmap when the runs are many and close together.

A delayed message leaves a gap, and a million gaps are a million runs. A roaring bitmap takes about
one bit for each entry of such a set. Its text is the shorter of two:

- ``~`` and the portable serialization in base64
  (https://github.com/RoaringBitmap/RoaringFormatSpec)
- the first entry, ``~``, and base64 of one bit for each entry from it on, lowest bit first. A
  roaring bitmap has at least 8 KB for each 65,536 entries with many runs, so this text is shorter
  for a ledger with fewer entries.

The set alone decides form and text, so equal sets have equal texts.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from operator import and_, or_, sub

from pyroaring import BitMap

from keyshard.core.position.entry_runs import (
    Run,
    Runs,
    difference,
    format_runs,
    intersection,
    parse_runs,
    run_at,
    union,
)

RUNS_MAX = 64
"""Runs up to which entries are always runs, and their text is readable."""
_CONTAINER = 2**16
"""Numbers in one container of a roaring bitmap. Each container has a header, so a bitmap pays only
for sets with at least one run for each container."""
_BITMAP_MAX = 2**32 - 2
"""Highest number in a bitmap here. No ledger has as many entries."""
_ARRAY_MAX = 4_096
"""Most numbers of a container that is an array."""
_MARK = "~"
_BITS_MAX = _CONTAINER
"""Most bits in the second text; beyond it, it saves little and costs more time."""
_PIECE = 49_152
"""Bits that are taken from one container."""
_FILL = BitMap(range(_PIECE, _CONTAINER, 2))
"""Numbers that make a container a plain bitset, because they are many and form no runs."""
_BITSET_START = 16
"""Position of the only container in a serialization without runs."""

LedgerEntries = Runs | BitMap
"""Entries of one ledger; the bitmap is never changed once it is in use."""


def any_compact(ledgers: Iterable[LedgerEntries]) -> bool:
    """Return whether one of some ledgers is a bitmap, whose text older releases cannot read."""
    return BitMap in map(type, ledgers)


def settled(entries: LedgerEntries) -> LedgerEntries:
    """Return the entries in their canonical form: as runs or as a bitmap.

    Equal sets get the same form. A given bitmap may be changed, so no other set may use it.
    """
    if isinstance(entries, BitMap):
        if entries and _suits_bitmap(run_count(entries), entries.min(), entries.max()):
            entries.run_optimize()
            return entries
        return tuple(runs_in(entries))
    if len(entries) > RUNS_MAX and _suits_bitmap(len(entries), entries[0][0], entries[-1][1]):
        found = _bitmap(entries)
        found.run_optimize()
        return found
    return entries


def _suits_bitmap(runs: int, first: int, last: int) -> bool:
    return runs > RUNS_MAX and (last - first) // _CONTAINER <= runs and last <= _BITMAP_MAX


def _bitmap(entries: LedgerEntries) -> BitMap:
    if isinstance(entries, BitMap):
        return entries
    found = BitMap()
    for first, last in entries:
        found.add_range(first, last + 1)
    return found


def runs_in(entries: LedgerEntries) -> Iterator[Run]:
    """Return the runs, ascending."""
    if isinstance(entries, BitMap):
        return zip(entries - entries.shift(1), entries - entries.shift(-1), strict=True)
    return iter(entries)


def run_count(entries: LedgerEntries) -> int:
    """Return the number of runs. The time for a bitmap grows with its containers, not its runs."""
    if isinstance(entries, BitMap):
        return entries.difference_cardinality(entries.shift(1))
    return len(entries)


def count(entries: LedgerEntries) -> int:
    """Return the number of entries."""
    if isinstance(entries, BitMap):
        return len(entries)
    return sum(last - first + 1 for first, last in entries)


def lowest(entries: LedgerEntries) -> int:
    """Return the first entry."""
    return entries.min() if isinstance(entries, BitMap) else entries[0][0]


def highest(entries: LedgerEntries) -> int:
    """Return the last entry."""
    return entries.max() if isinstance(entries, BitMap) else entries[-1][1]


def holds(entries: LedgerEntries, entry: int) -> bool:
    """Return whether an entry is in the set."""
    if isinstance(entries, BitMap):
        return 0 <= entry <= _BITMAP_MAX and entry in entries
    return run_at(entries, entry) is not None


def end_of_run(entries: LedgerEntries, entry: int) -> int | None:
    """Return the last entry of the run that holds ``entry``; ``None`` without one."""
    if not isinstance(entries, BitMap):
        run = run_at(entries, entry)
        return None if run is None else run[1]
    if not holds(entries, entry):
        return None
    absent: BitMap = BitMap(range(entry, entries.max() + 2)) - entries
    return absent.min() - 1


def above(entries: LedgerEntries, entry: int) -> LedgerEntries:
    """Return the entries after ``entry``."""
    return subtract(entries, ((0, entry),)) if entry >= 0 else entries


def unite(left: LedgerEntries, right: LedgerEntries) -> LedgerEntries:
    """Return the entries that are in one of the sets."""
    return _combine(left, right, union, or_)


def intersect(left: LedgerEntries, right: LedgerEntries) -> LedgerEntries:
    """Return the entries that are in both sets."""
    return _combine(left, right, intersection, and_)


def subtract(left: LedgerEntries, right: LedgerEntries) -> LedgerEntries:
    """Return the entries of ``left`` that are not in ``right``."""
    return _combine(left, right, difference, sub)


def _combine(
    left: LedgerEntries,
    right: LedgerEntries,
    of_runs: Callable[[Runs, Runs], Runs],
    of_bitmaps: Callable[[BitMap, BitMap], BitMap],
) -> LedgerEntries:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return settled(of_runs(left, right))
    if max(_end(left), _end(right)) <= _BITMAP_MAX:
        return settled(of_bitmaps(_bitmap(left), _bitmap(right)))
    return settled(of_runs(tuple(runs_in(left)), tuple(runs_in(right))))


def _end(entries: LedgerEntries) -> int:
    return highest(entries) if entries else 0


def text_of(entries: LedgerEntries) -> str:
    """Return the text form: ``0-3,7``, or that of a bitmap."""
    if not isinstance(entries, BitMap):
        return format_runs(entries)
    serialized, first = _serialized(entries), entries.min()
    span = entries.max() - first + 1
    if span > _BITS_MAX or span // 8 >= len(serialized):
        return _MARK + b64encode(serialized).decode()
    return f"{first}{_MARK}{b64encode(_bits(entries, first, span)).decode()}"


def _bits(entries: BitMap, first: int, span: int) -> bytes:
    """Return one bit for each of ``span`` entries from ``first`` on, lowest bit first."""
    found = bytearray()
    for start in range(first, first + span, _PIECE):
        piece = (entries & BitMap(range(start, start + _PIECE))).shift(-start)
        found += (piece | _FILL).serialize()[_BITSET_START : _BITSET_START + _PIECE // 8]
    return bytes(found[: (span + 7) // 8])


def _serialized(entries: BitMap) -> bytes:
    """Return the canonical serialization: equal sets have equal bytes.

    pyroaring keeps the form of a container, runs or an array, if both are equally small. So
    containers that may be arrays are built again from their numbers.
    """
    made = BitMap()
    for start in range(entries.min() // _CONTAINER * _CONTAINER, entries.max() + 1, _CONTAINER):
        end = start + _CONTAINER
        if 0 < entries.range_cardinality(start, end) <= _ARRAY_MAX:
            made |= BitMap((entries & BitMap(range(start, end))).to_array())
    found = (entries - made) | made
    found.run_optimize()
    return found.serialize()


def parse_entries(text: str) -> LedgerEntries:
    """Parse the text form.

    Raises:
        ValueError: The text is not the one that :func:`text_of` writes for a set.
    """
    first, mark, encoded = text.partition(_MARK)
    if not mark:
        return settled(parse_runs(text))
    given = b64decode(encoded, validate=True)
    if not given:
        raise ValueError(text)
    if first:
        bits = int.from_bytes(given[: _BITS_MAX // 8], "little")
        numbers = [n for n, bit in enumerate(bin(bits)[:1:-1], int(first)) if bit == "1"]
        if numbers and not 0 <= numbers[0] <= numbers[-1] <= _BITMAP_MAX:
            raise ValueError(first)
        found = settled(BitMap(numbers))
    else:
        # The numbers are added one by one: a bitmap from a damaged text may contradict itself.
        found = settled(BitMap(BitMap.deserialize(given).to_array()))
    if text_of(found) != text:
        raise ValueError("the bitmap is not in its canonical form")
    return found
