"""Rows whose content workers keep: where it is, and how a task puts the rows together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import pyarrow as pa

from keyshard.arrow.columns import put_together
from keyshard.arrow.content import CONTENT_NAMES
from keyshard.core.position.entry import Part
from keyshard.errors import WorkerUnreachableError

_log = logging.getLogger(__name__)

Place = tuple[str, str]
"""Where a worker is asked for content, and the token for that."""
Run = tuple[int, int, int]
"""Number under which a worker keeps content, the first row there, and how many."""


class Elsewhere(NamedTuple):
    """Where the content of some rows is; plain JSON values."""

    places: Sequence[Place]
    runs: Sequence[tuple[int, Run]]
    """In the order of the rows; each begins with the index of its place."""

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Elsewhere:
        """Where the content of some parts is, all of which is kept."""
        places: dict[Place, int] = {}
        runs = [
            (
                places.setdefault(part.kept.place, len(places)),
                (part.kept.number, part.start, part.rows),
            )
            for part in parts
        ]
        return cls(list(places), runs)


Chunk = tuple[pa.RecordBatch, Elsewhere | None]
"""Rows, or their columns that are no content and where that is."""


class Ask(Protocol):
    """Asks the source for rows; directly, if it may say that they are elsewhere."""

    def __call__(self, *, direct: bool) -> Iterator[Chunk]: ...


Fetch = Callable[[Place, Sequence[Run], Sequence[str]], pa.RecordBatch]
"""Asks a worker for columns of the content of some runs.

Raises ``WorkerUnreachableError`` where it does not give them, for whatever reason.
"""


def rows_of(ask: Ask, fetch: Fetch, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Rows of one layout partition of a batch.

    Args:
        ask: Asks the source for them. The rows are the same every time.
        fetch: Asks a worker.
        columns: Columns wanted.
    """
    given = 0
    for rows, elsewhere in ask(direct=True):
        try:
            batch = rows if elsewhere is None else _fetched(rows, elsewhere, fetch, columns)
        except WorkerUnreachableError as exc:
            _log.warning("%s The source has to read those rows again.", exc.message)
            break
        given += batch.num_rows
        yield batch
    else:
        return
    for batch, _ in ask(direct=False):
        known = min(given, batch.num_rows)
        given -= known
        if known < batch.num_rows:
            yield batch.slice(known)


def _fetched(
    others: pa.RecordBatch, elsewhere: Elsewhere, fetch: Fetch, columns: Sequence[str]
) -> pa.RecordBatch:
    wanted = [name for name in columns if name in CONTENT_NAMES]
    if not wanted:
        return put_together(others, None, columns)
    shares: dict[int, list[Run]] = {}
    for place, run in elsewhere.runs:
        shares.setdefault(place, []).append(run)
    got = {place: fetch(elsewhere.places[place], runs, wanted) for place, runs in shares.items()}
    if len(got) == 1:
        return put_together(others, got.popitem()[1], columns)
    begins = dict.fromkeys(got, 0)
    slices: list[pa.RecordBatch] = []
    for place, runs in groupby(elsewhere.runs, lambda one: one[0]):
        rows = sum(run[2] for _, run in runs)
        slices.append(got[place].slice(begins[place], rows))
        begins[place] += rows
    return put_together(others, pa.concat_batches(slices), columns)
