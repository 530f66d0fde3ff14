"""Zones leave out exactly what they rule out, and never a zone with a wanted message."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.message import MessageId
from keyshard.core.position import zones as position_zones
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.split import Closed, Span, cut, stretch
from keyshard.core.position.zones import Wanted, Zone, Zoned
from tests.helpers import P0
from tests.property.test_splits import BOUNDED, POSITIONS, messages

ENTRIES = 12
SMALL = st.lists(st.tuples(st.integers(0, 60), st.integers(0, ENTRIES)), max_size=6).map(
    lambda found: tuple(Ledger(*one, 1_000) for one in sorted(dict(found).items()))
)
INTERVALS = st.tuples(st.integers(0, ENTRIES - 1), st.integers(1, ENTRIES), st.booleans())


def of_span(span: Span) -> set[tuple[int, int]]:
    return {(span.ledger, entry) for entry in range(span.first, span.end)}


def bound(data: st.DataObject, ledgers: tuple[Ledger, ...]) -> MessageId | None:
    """Draw a position, mostly inside an entry of the ledgers."""
    some = [one for one in ledgers if one.entries]
    if not some or data.draw(st.integers(0, 3)) == 0:
        return data.draw(st.none() | POSITIONS)
    ledger = data.draw(st.sampled_from(some))
    entry, index = (data.draw(st.integers(0, last)) for last in (ledger.entries - 1, 2))
    return MessageId(ledger.id, entry, index)


@BOUNDED
@given(SMALL, st.integers(1, 9), st.data())
def test_the_parts_of_a_stretch_cover_all_entries_that_are_not_ruled_out(
    ledgers: tuple[Ledger, ...], number: int, data: st.DataObject
) -> None:
    start, end = bound(data, ledgers), bound(data, ledgers)
    whole = stretch(P0, ledgers, start, end)
    zones = []
    for ledger in ledgers:
        for first, length, wanted in data.draw(st.lists(INTERVALS, max_size=5)):
            published = (5, 5) if wanted else (1, 1)
            stop = min(first + length, ledger.entries)
            if first < stop:
                zones.append(Zone(ledger.id, first, stop, 1, published, None))
    closed = {one.id: Closed(one.entries, one.size_bytes) for one in ledgers[:-1]}
    hole_bytes = data.draw(st.sampled_from([0, 500, 10**6]))
    with patch.object(position_zones, "HOLE_BYTES", hole_bytes):
        parts = Zoned(zones, Wanted(published=(5, 6))).of(whole, closed)

    covered = {(one.ledger, entry) for one in zones for entry in range(one.first, one.end)}
    out = {
        (one.ledger, entry)
        for one in zones
        if one.published == (1, 1)
        for entry in range(one.first, one.end)
    }
    skipped = [at for span in parts[0].skipped for at in of_span(span)]
    assert len(skipped) == len(set(skipped)) == whole.entries - sum(one.entries for one in parts)
    assert set(skipped) <= out
    kept = [one for part in cut(parts, number) for one in messages(part)]
    assert kept == [one for one in messages(whole) if one[:2] not in skipped]
    ends = [one for one in messages(whole) if one[:2] not in out]
    assert kept[:1] == ends[:1], "both ends of the stretch are left out, however small"
    assert kept[-1:] == ends[-1:]
    if not hole_bytes:
        assert kept == ends
    assert not any(one.skipped for one in parts[1:])
    for part in parts:
        assert (part.topic_partition, part.end, part.created) == (P0, whole.end, whole.created)
        stored = [at for one in ledgers for at in sorted(of_span(Span(one.id, 0, one.entries, 0)))]
        mine = [at for span in part.spans for at in sorted(of_span(span))]
        begin = stored.index(mine[0]) if mine else 0
        assert mine == stored[begin : begin + len(mine)], "no holes"
        assert len({span.ledger for span in part.spans}) == len(part.spans)
        for span in part.spans:
            lacks = not of_span(span) <= covered
            assert span.closed == (closed.get(span.ledger) if lacks else None)
            if span.closed:
                told = {(span.ledger, at) for one in span.lacking for at in range(*one)}
                assert of_span(span) - covered == of_span(span) & told


TIMES = st.none() | st.integers(1, 30)
LIMITS = st.tuples(TIMES, TIMES)


def within(time: int | None, limits: tuple[int | None, int | None]) -> bool:
    start, end = limits
    if start is None and end is None:
        return True
    return time is not None and not (
        (start is not None and time < start) or (end is not None and time >= end)
    )


@BOUNDED
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5), LIMITS, LIMITS)
def test_a_zone_with_a_wanted_message_is_kept(
    rows: list[tuple[int | None, int | None]], published: tuple[int | None, int | None],
    events: tuple[int | None, int | None],
) -> None:  # fmt: skip
    bounds = []
    for column in zip(*rows, strict=True):
        known = [one for one in column if one is not None]
        bounds.append((min(known), max(known)) if known else None)
    zone = Zone(1, 0, 1, len(rows), bounds[0], bounds[1])
    ruled_out = Wanted(published, events).rules_out(zone)
    wanted = [one for one in rows if within(one[0], published) and within(one[1], events)]
    assert not (ruled_out and wanted)
    if len(rows) == 1 and not wanted:
        empty = any(None not in one and one[0] >= one[1] for one in (published, events))  # type: ignore[operator]
        assert ruled_out or empty, "the bounds of one row are exact"
