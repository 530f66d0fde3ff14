"""The shape of a run: sizes and options, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from keyshard.broker.memory import Batching, LookAhead, UnackedLimits
from keyshard.core.releases import TESTED

SUBSCRIPTION = "simulation"


def version_of(seed: object) -> str:
    """Draw the release of Pulsar that the broker of a run behaves like."""
    return Random(f"{seed}:release").choice(TESTED)


@dataclass(frozen=True)
class Shape:
    """Sizes and options of one run; small, so that limits are met and boundaries are many."""

    partitions: int
    brief: int
    """Short-lived topics of the start; with one or more, topics are found by a pattern."""
    ranges: tuple[int, ...]
    """Numbers of ranges that the query has in turn."""
    keys: int
    keyless: float
    """Share of the messages that have no key."""
    bytes_keys: bool
    """Whether producers set keys as bytes: their base64 is the key, and they are hashed."""
    messages_min: int
    """Messages that are published at least."""
    batching: Batching
    entries_per_ledger: int
    rows_per_partition_min: int
    """Rows that are worth a partition of the host."""
    bounded: bool
    """Whether each run of the query ends with the messages published before it."""
    look_ahead: LookAhead
    unacked_limits: UnackedLimits
    cursor_write_ms: int
    admin: bool
    """Whether the query may ask the admin interface."""
    options: dict[str, Any]
    """Options of the source."""

    @classmethod
    def of(
        cls, random: Random, *, small_window: bool, may_end: bool, brief: bool, forgets: bool
    ) -> Shape:
        """Draw one.

        Args:
            random: Decides.
            small_window: Whether the window is to be full all the time.
            may_end: Whether the query may be bounded.
            brief: Whether topics come and go.
            forgets: Whether the broker hardly ever writes acknowledgements.
        """
        options: dict[str, Any] = {
            "window_rows_max": random.choice((4, 8) if small_window else (60, 400)),
            "receive_threads": random.choice((1, 2, 4)),
            "receiver_queue_size": random.choice((1, 3, 20)),
            "discovery_interval_ms": random.choice((200, 1_000)),
            "settle_after_ms": random.choice((2_000, 20_000, 300_000)),
        }
        if random.random() < 0.7:
            options["batch_rows_max"] = random.choice((5, 20))
        return cls(
            partitions=random.randint(1, 3),
            brief=random.choice((1, 2, 8)) if brief else 0,
            ranges=tuple(random.sample((1, 2, 3, 5, 8), 4)),
            keys=random.choice((3, 8, 20)),
            keyless=random.choice((0.0, 0.0, 0.1)),
            bytes_keys=random.random() < 0.3,
            messages_min=random.choice((40, 100)),
            batching=random.choice((Batching.NONE, Batching.BY_KEY)),
            entries_per_ledger=random.choice((7, 30, 1_000)),
            rows_per_partition_min=random.choice((1, 3, 100)),
            bounded=may_end and not brief and random.random() < 0.2,
            unacked_limits=random.choice((UnackedLimits(), UnackedLimits(40, 60))),
            look_ahead=random.choice((LookAhead(), LookAhead(10, 40))),
            cursor_write_ms=10**9 if forgets else random.choice((0, 1_000, 60_000)),
            admin=brief or random.random() < 0.5,
            options=options,
        )
