"""Faults of a query that writes to a topic, in addition to those of one that reads."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

from tests.simulation import faults

CELLS = faults.CELLS


class Trouble(str, Enum):
    """Faults of tasks, and of the brokers that they write to."""

    KILLED = "task killed"
    """The process of an attempt is killed between two steps of its connection."""
    UNNOTICED = "task killed unnoticed"
    """The same, and the broker learns it later."""
    SECOND = "second attempt at once"
    """Another attempt of a task begins while the first runs."""
    LEFT_BEHIND = "attempt left behind"
    """An attempt goes on though nobody waits for it any more."""
    CRASH = "output broker crash"
    UNLOAD = "output unload"
    CUT = "connection cut"
    """The producers of an attempt lose their connection."""
    LATE = "slow writes"
    """Accepted entries are stored later."""
    LOST = "failed writes"
    """Accepted entries are lost, and all producers of the topic partition with them."""
    QUOTA = "quota exceeded"
    FORGETS = "names forgotten"
    """The broker forgets the names that no connection has, as after hours."""
    TOO_FEW = "too few ids recovered"
    """A broker before Pulsar 5.0 loads the topic, and knows too few ids of its names."""


def table(reached: Counter[Any]) -> str:
    """The counts, as a table and a list for people."""
    return faults.table_with(reached, Trouble)


def events(reached: Counter[Any]) -> int:
    """Number of faults."""
    return faults.events(reached)


def missing(reached: Counter[Any]) -> list[str]:
    """Faults and steps that never met, and faults that hit no task."""
    return [*faults.missing(reached), *untroubled(reached)]


def untroubled(reached: Counter[Any]) -> list[str]:
    """Faults that hit no task."""
    return faults.unmet(reached, Trouble)
