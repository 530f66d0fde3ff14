"""Faults of the world of worker processes, in addition to those of the first one."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

from tests.simulation import faults

CELLS = faults.CELLS


class Trouble(str, Enum):
    """Faults of a worker, and of its requests."""

    KILLED = "worker killed"
    STOPPED = "worker stopped"
    WOKE_IN_TIME = "woke within its lease"
    WOKE_LATE = "woke after its lease"
    LOST = "answer lost"
    LATE = "question or answer late"
    REPEATED = "question repeated"
    SLOW = "slow network"
    CLAIMED_TWICE = "range claimed by two workers"


def table(reached: Counter[Any]) -> str:
    """The counts, as a table and a list for people."""
    return faults.table_with(reached, Trouble)


def events(reached: Counter[Any]) -> int:
    """Number of faults."""
    return faults.events(reached)


def missing(reached: Counter[Any]) -> list[str]:
    """Faults and steps that never met, and faults that hit no worker."""
    return [*faults.missing(reached), *untroubled(reached)]


def untroubled(reached: Counter[Any]) -> list[str]:
    """Faults that hit no worker."""
    return faults.unmet(reached, Trouble)
