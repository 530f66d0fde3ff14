"""``python -m tests.proofs simulation``: seeds in each world, and the steps that faults hit."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

from tests.proofs.runner import Options, Outcome, Outcomes, Proof
from tests.simulation import faults, worker_faults
from tests.simulation.handling import faults as handling_faults
from tests.simulation.pipeline import faults as pipeline_faults
from tests.simulation.runner import WORLDS, details, run_seed, run_seeds, run_verbosely
from tests.simulation.segment_faults import OF_HANDLERS, OF_QUERY

FAULTS: dict[str, Any] = {
    "spark": faults, "handlers": handling_faults, "workers": worker_faults,
    "pipeline": pipeline_faults, "spark-frames": faults, "handlers-frames": handling_faults,
    "pipeline-frames": pipeline_faults, "spark-segments": OF_QUERY,
    "handlers-segments": OF_HANDLERS, "workers-segments": worker_faults,
    "spark-segments-frames": OF_QUERY, "handlers-segments-frames": OF_HANDLERS,
}  # fmt: skip
"""Faults of each world."""


def _outcomes(given: Options, seeds: range) -> Outcomes:
    run = run_verbosely if given.verbose else run_seed
    processes = 1 if given.verbose else len(os.sched_getaffinity(0))
    for world in [given.world] if given.world else WORLDS:
        of, reached = FAULTS[world], Counter[Any]()
        for one in run_seeds(partial(run, world=world), seeds.start, len(seeds), processes):
            reached.update(one.reached)
            counts = Counter({
                "rows": one.rows, "seconds of virtual time": round(one.now_s),
                "faults": of.events(one.reached), "restarts": one.lives - 1,
            })  # fmt: skip
            again = {"world": world, "verbose": True}
            yield Outcome(one.seed, one.error, details(one), counts, again)
        print(f"{world}: how often each fault hit each step:\n{of.table(reached)}")
        if len(seeds) >= len(of.CELLS):
            print(f"Never met: {', '.join(of.missing(reached)) or 'none'}.")


PROOF = Proof(
    _outcomes, seeds=1_000, seed_start=0,
    options={
        "--world": {"choices": WORLDS, "help": "the only one (default: one after the other)"},
        "--verbose": {"action": "store_true", "help": "print the trace of every seed"},
    },
)  # fmt: skip
