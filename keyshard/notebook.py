"""Small HTML tables, as notebooks show them for a value: escaped, short and without secrets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

from keyshard.redaction import redacted

ROWS_MAX = 20
"""Most rows of a table."""
CELL_MAX = 200
"""Most characters of a cell."""


def table(title: str, rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Return a table.

    Args:
        title: Its caption.
        rows: Cells of each row; without a head, the first cell is a name. More than
            ``ROWS_MAX`` rows are only counted.
        head: Titles of the columns.
    """
    rest = iter(rows)
    first = list(islice(rest, ROWS_MAX))
    more = sum(1 for _ in rest)
    lines = [f"<table><caption>{_text(title)}</caption>"]
    if head:
        lines.append(f"<thead><tr>{''.join(f'<th>{_text(one)}</th>' for one in head)}</tr></thead>")
    lines.append("<tbody>")
    for row in first:
        names, values = ([], row) if head else (row[:1], row[1:])
        cells = [f"<th>{_text(one)}</th>" for one in names]
        cells += [f"<td>{_text(one)}</td>" for one in values]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    if more:
        width = len(first[0])
        lines.append(f'<tr><td colspan="{width}">... and {more:,} more</td></tr>')
    return "".join([*lines, "</tbody></table>"])


def _text(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:,}" if type(value) is int else str(value)
    text = redacted(text)
    return escape(text if len(text) <= CELL_MAX else f"{text[:CELL_MAX]}...")
