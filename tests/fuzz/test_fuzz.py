"""The public API keeps its promises under hostile input; ``make simulate`` runs many more."""

from __future__ import annotations

import os

from tests.fuzz.runner import TARGETS, run_seeds

SEEDS = 20 * len(TARGETS)


def test_no_attack_on_the_public_api_breaks_a_promise() -> None:
    broken = [
        f"seed {seed}: {error}"
        for seed, error in run_seeds(0, SEEDS, len(os.sched_getaffinity(0)))
        if error
    ]
    assert not broken, "\n".join(broken)
