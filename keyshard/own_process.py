"""What is set in processes that are keyshard's own: Spark's stream process, a worker process."""

from __future__ import annotations

import gc

YOUNG = 50_000
"""Objects after which the youngest are looked at; Python's own number is 700 to 2,000."""
OLDER = 20
"""Looks at the younger ones after which the older are looked at; Python's own number is 10."""


def collect_rarely() -> None:
    """Have Python's garbage collector look seldom, and never at what is imported.

    A window holds some objects for each of many entries, all of them alive, and none of them in a
    cycle: looking at them again and again took a fifth of what a row costs.
    """
    gc.freeze()
    gc.set_threshold(YOUNG, OLDER, OLDER)
