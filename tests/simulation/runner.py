"""Runs seeds in several processes, and describes the one that broke a promise."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.simulation.frames.worlds import (
    FramedHandlerWorld,
    FramedScalableHandlerWorld,
    FramedScalableWorld,
    FramedWorld,
)
from tests.simulation.handling.scalable import ScalableHandlerWorld
from tests.simulation.handling.world import HandlerWorld
from tests.simulation.pipeline.world import FramedPipelineWorld, PipelineWorld
from tests.simulation.scalable import ScalableWorld
from tests.simulation.scalable_workers import ScalableWorkersWorld
from tests.simulation.workers import WorkersWorld
from tests.simulation.world import Outcome, World

WORLDS: dict[str, type[World] | type[HandlerWorld]] = {
    "spark": World, "handlers": HandlerWorld, "workers": WorkersWorld,
    "pipeline": PipelineWorld, "spark-frames": FramedWorld, "handlers-frames": FramedHandlerWorld,
    "pipeline-frames": FramedPipelineWorld, "spark-segments": ScalableWorld,
    "handlers-segments": ScalableHandlerWorld,
    "workers-segments": ScalableWorkersWorld,
    "spark-segments-frames": FramedScalableWorld,
    "handlers-segments-frames": FramedScalableHandlerWorld,
}  # fmt: skip
CHUNK = 8
"""Seeds that a worker process takes at once."""


def run_seed(seed: int, world: str = "spark") -> Outcome:
    """Run one seed in a world."""
    with silent():
        return WORLDS[world](seed).run()


def run_verbosely(seed: int, world: str = "spark") -> Outcome:
    """Run one seed and print what happened, line by line, and a name of its course of events."""
    with silent():
        made = WORLDS[world](seed, trace_max=None)
        outcome = made.run()
    print("\n".join(outcome.trace))
    print(f"seed {seed} of {world}: {outcome.rows} rows, course {made.course()}")
    return outcome


@contextmanager
def silent() -> Iterator[None]:
    """No log lines of keyshard."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run_seeds(
    run: Callable[[int], Outcome], first: int, count: int, processes: int
) -> Iterator[Outcome]:
    """Run seeds in their order, in several processes; ends them when it is closed."""
    seeds = range(first, first + count)
    if processes == 1 or count == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(run, seeds, CHUNK)


def details(outcome: Outcome) -> str:
    """Return all that is needed to look into a run that failed."""
    faults = "\n".join(f"    {fault}" for fault in outcome.faults)
    trace = "\n".join(outcome.trace)
    return (
        f"\n{outcome.details}\n"
        f"  {outcome.shape}\n  faults:\n{faults}\n  the end of its trace:\n{trace}\n"
    )


def describe(outcome: Outcome, world: str = "spark") -> str:
    """Return the text about a run that failed, for a test."""
    command = f"python -m tests.proofs simulation --seeds 1 --seed-start {outcome.seed}"
    return (
        f"seed {outcome.seed} breaks a promise: {outcome.error}\n{details(outcome)}\n"
        f"seed {outcome.seed} breaks a promise. To run it again, with its whole trace:\n"
        f"    {command} --world {world} --verbose\n"
    )
