"""What goes wrong in the world of worker processes, beside what goes wrong in the first one."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

from tests.simulation import faults

CELLS = faults.CELLS


class Trouble(str, Enum):
    """What befalls a worker, or what is said to it."""

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
    width = max(len(trouble.value) for trouble in Trouble)
    lines = (f"{trouble.value:{width}} {reached[trouble, None]:>9}" for trouble in Trouble)
    return "\n".join([faults.table(reached), *lines])


def events(reached: Counter[Any]) -> int:
    """Number of faults."""
    return faults.events(reached)


def missing(reached: Counter[Any]) -> list[str]:
    """Faults and steps that never met, and what befell no worker."""
    return [*faults.missing(reached), *untroubled(reached)]


def untroubled(reached: Counter[Any]) -> list[str]:
    """What befell no worker."""
    return [trouble.value for trouble in Trouble if not reached[trouble, None]]
