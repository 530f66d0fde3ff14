"""A few cells of the matrix; all of them by ``python -m tests.proofs refusals``."""

from __future__ import annotations

from random import Random

from tests.proofs.runner import repeats
from tests.refusals.matrix import CELLS, REAL_TIME, Cell, run_cells

DRAWN = 20
"""Drawn cells, in addition to the fixed ones."""
ALWAYS = (
    Cell("return", "subscribe", 4),
    Cell("return", "connect", 3),
    Cell("return", "subscribe", 6),
    Cell("reopen", "subscribe", 6),
    Cell("running", "ack", 2),
    Cell("running", "ping", "half a frame"),
    Cell("return", "connect", "listens"),
    Cell("return", "lookup", "astray"),
    Cell("running", "ack", "silent"),
    Cell("return in a worker", "subscribe", 4),
    Cell("another worker", "lookup", 6),
    Cell("running in a worker", "ack", 2),
    Cell("producer's return", "producer", 4),
    Cell("next dead letter", "send", 2),
    Cell("first schema", "get_schema", 4),
    Cell("schema", "get_schema", "silent"),
)


def test_every_refusal_is_survived_or_ends_by_name_or_is_in_the_status() -> None:
    cells = (*ALWAYS, *Random(9).sample([one for one in CELLS if one not in ALWAYS], DRAWN))
    wrong = {
        f"{cell}: {error}": repeats("refusals", CELLS.index(cell))
        for cell, _, error in run_cells(cells)
        if error
    }
    assert not wrong


def test_some_refusals_are_survived_or_named_with_the_waits_of_the_product() -> None:
    wrong = {
        f"{cell}: {error}": repeats("refusals", REAL_TIME.index(cell), "--real-time")
        for cell, _, error in run_cells(REAL_TIME, real_time=True)
        if error
    }
    assert not wrong


def test_the_matrix_has_every_refusal() -> None:
    assert {*ALWAYS, *REAL_TIME} <= set(CELLS)
    assert len({one for one in CELLS if isinstance(one.answer, int)}) == 26 * 41
