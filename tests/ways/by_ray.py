"""The ways to read a topic in Ray."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import keyshard
import ray_adapter
from tests.ways.draw import Published, Reading
from tests.ways.outcome import (
    DEADLINE_S,
    QUIET_S,
    Outcome,
    Place,
    columns_of,
    row_of,
    row_of_message,
    source_of,
)


def dataset(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read with ``ray_adapter.read``."""
    source = source_of(place, made, how)
    found = ray_adapter.read(source, columns=columns_of(source), override_num_blocks=2)
    out.rows += [row_of(row) | {"raw": row["value"]} for row in found.take_all()]


def job(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read with ``ray_adapter.run``."""
    source = source_of(place, made, how)
    handler = partial(row_in_actor, made.kind)
    with ray_adapter.run(source, handler, parallelism=2, num_cpus=0.1) as running:
        timers = [threading.Timer(DEADLINE_S, _stop, [running, out, True])]
        timers[0].start()
        try:
            for row in running:
                out.malformed.update({row["n"]} if row.pop("malformed", False) else ())
                out.rows.append(row)
                if len(out.rows) == made.expected(how):
                    timers[0].cancel()
                    timers.append(threading.Timer(QUIET_S, _stop, [running, out, False]))
                    timers[-1].start()
        finally:
            for timer in timers:
                timer.cancel()


def _stop(running: ray_adapter.Job, out: Outcome, is_late: bool) -> None:
    """Stop a job, after its counts were taken."""
    out.is_late = out.is_late or is_late
    out.count(running.status()["source"])
    running.stop()


def row_in_actor(kind: str, message: keyshard.Message) -> dict[str, Any]:
    """Handle a message in an actor."""
    return row_of_message(kind, message)
