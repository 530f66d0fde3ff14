"""Judges a history: one pure function per promise, from events to a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from keyshard.errors import HistoryError
from keyshard.testing.verify.check_messages import (
    LIVENESS_S,
    bounded_duplicates,
    exactly_once,
    key_order,
    liveness,
    no_loss,
    rerun_equality,
)
from keyshard.testing.verify.check_order import possible_order
from keyshard.testing.verify.check_workers import (
    ack_after_checkpoint,
    mutual_exclusion,
    ring_coverage,
    routing,
)
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.history_view import HistoryView
from keyshard.testing.verify.verdict import Verdict

__all__ = [
    "LIVENESS_S",
    "Verdict",
    "ack_after_checkpoint",
    "bounded_duplicates",
    "check",
    "exactly_once",
    "key_order",
    "liveness",
    "mutual_exclusion",
    "no_loss",
    "possible_order",
    "rerun_equality",
    "ring_coverage",
    "routing",
]


def check(
    events: Sequence[Event],
    *,
    deliveries_max: int | None = None,
    liveness_s: float = LIVENESS_S,
) -> list[Verdict]:
    """Return the verdict of every checker.

    Args:
        events: A history, in the order of writing.
        deliveries_max: See :func:`bounded_duplicates`.
        liveness_s: See :func:`liveness`, seconds.

    Raises:
        HistoryError: The history has no event that a checker needs.
    """
    view = HistoryView(events)
    verdicts = [
        no_loss(view),
        key_order(view),
        exactly_once(view),
        ack_after_checkpoint(view),
        bounded_duplicates(view, deliveries_max),
        rerun_equality(view),
        ring_coverage(view),
        routing(view),
        mutual_exclusion(view),
        liveness(view, liveness_s),
        possible_order(view),
    ]
    if not any(verdict.checked for verdict in verdicts):
        raise HistoryError(
            "The history contains no events to check.",
            "Record events that docs/history.md describes.",
        )
    return verdicts
