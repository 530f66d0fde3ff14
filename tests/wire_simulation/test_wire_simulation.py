"""A few seeds of the wire simulation."""

from __future__ import annotations

from tests.wire_simulation.run import run

SEEDS = range(16)


def test_the_promises_of_the_transport_hold() -> None:
    for seed in SEEDS:
        outcome = run(seed)
        assert not outcome.error, f"seed {seed}: {outcome.error}"
