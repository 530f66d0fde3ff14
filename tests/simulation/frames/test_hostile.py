"""Nothing that a broker sends does harm; few seeds here, more by its command."""

from __future__ import annotations

from tests.simulation.frames.hostile import Run
from tests.simulation.runner import silent

SEEDS = (*range(20), 5009)


def test_no_frame_does_harm() -> None:
    for seed in SEEDS:
        with silent():
            harm = Run(seed).run()
        assert not harm, f"seed {seed}: {harm}"
