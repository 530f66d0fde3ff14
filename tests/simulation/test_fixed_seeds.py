"""The promises hold for the same few seeds of each world, in one process."""

from __future__ import annotations

import pytest

from tests.simulation.runner import describe, run_seed

SEEDS = {
    "spark": 20, "handlers": 20, "workers": 20, "pipeline": 20,
    "spark-frames": 20, "handlers-frames": 20, "pipeline-frames": 20, "spark-segments": 20,
    "handlers-segments": 10, "spark-segments-frames": 5, "handlers-segments-frames": 5,
}  # fmt: skip
AT_ONCE = 5
"""Seeds of a test; several processes share the tests of a world."""
FIRST = 1_000
"""Other tests begin at 0."""


@pytest.mark.parametrize(
    ("world", "first"),
    [
        (world, FIRST + start)
        for world, count in SEEDS.items()
        for start in range(0, count, AT_ONCE)
    ],
)
def test_the_promises_hold(world: str, first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        outcome = run_seed(seed, world)
        assert not outcome.error, describe(outcome, world)
