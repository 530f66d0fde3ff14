"""A short run of bounded reads under faults; ``python -m tests.proofs bounded`` runs longer."""

from __future__ import annotations

import pytest

from tests.support.proof_run import hold

SEED, SEEDS = 0, 3
LIMIT_S = 540
"""Longest time of a run; on two busy cores it takes about 60 s."""


@pytest.mark.broker
@pytest.mark.timeout(LIMIT_S + 10)
def test_a_bounded_read_gives_the_stored_messages_or_fails_by_name() -> None:
    output = hold(
        "bounded", "--seed-start", str(SEED), "--seeds", str(SEEDS), "--minutes", "8",
        limit_s=LIMIT_S,
    )  # fmt: skip
    assert f"{SEEDS} of {SEEDS} seeds hold" in output
